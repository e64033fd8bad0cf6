"""The ROS node: lifecycle, subscription, services and diagnostics, wired to the pipeline."""

from __future__ import annotations

from collections.abc import Callable
import concurrent.futures
from functools import wraps
import threading

from diagnostic_msgs.msg import DiagnosticArray
from lingbot_map.errors import describe, UserError
from lingbot_map.settings import ParameterError
from lingbot_map.streaming.engine import StreamEngine
from lingbot_map.streaming.loading import load_engine, weights_origin
from lingbot_map_ros import diagnostics
from lingbot_map_ros.input.image_topic import ImageTopic, SilenceWatch
from lingbot_map_ros.mapping.map_session import State
from lingbot_map_ros.mapping.pipeline import Pipeline
from lingbot_map_ros.mapping.scale import scale_notice
from lingbot_map_ros.parameters import (
    check_overrides,
    declare_params,
    NodeParams,
    PARAMETERS,
    read_params,
    refusals,
)
from lingbot_map_ros.rclpy_fixes import answer_bad_transitions, parameter_overrides
from lingbot_map_ros.services import Services
from rcl_interfaces.msg import SetParametersResult
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup, ReentrantCallbackGroup
from rclpy.clock import Clock, ClockType
from rclpy.context import Context
from rclpy.exceptions import InvalidParameterTypeException
from rclpy.lifecycle import LifecycleNodeMixin, LifecycleState, TransitionCallbackReturn
from rclpy.node import Node
from rclpy.parameter import Parameter

SUCCESS, FAILURE = TransitionCallbackReturn.SUCCESS, TransitionCallbackReturn.FAILURE
_CLEANUP_TIMEOUT_S = 10.0
_POLL_S = 0.1


def _logged(callback):
    """Log an exception of a transition callback; rclpy fails the transition without a log."""

    @wraps(callback)
    def guarded(self, state):
        try:
            return callback(self, state)
        except Exception as error:  # the transition fails, the process continues
            expected = isinstance(error, UserError | OSError)
            self._fail(callback.__name__, str(error) if expected else describe(error))
            return FAILURE

    return guarded


class LingbotMapNode(LifecycleNodeMixin, Node):
    """
    Node `lingbot_map`; needs an executor with two threads, since configuring blocks one.

    `engine_factory(params)` loads the network in the worker thread. The caller that spins the node
    stops when `leaving` is set, then calls `close` and exits the process with `exit_code`.
    A wrong parameter raises ParameterError in the constructor.
    """

    def __init__(
        self,
        engine_factory: Callable[[NodeParams], StreamEngine] = load_engine,
        *,
        context: Context | None = None,
        parameter_overrides: list[Parameter] | None = None,
        diagnostics_period_s: float = 1.0,
    ):
        try:
            Node.__init__(
                self, 'lingbot_map', context=context, parameter_overrides=parameter_overrides
            )
        except InvalidParameterTypeException as error:  # of use_sim_time, which rclpy declares
            raise ParameterError(' '.join(str(error).split())) from error
        LifecycleNodeMixin.__init__(self, callback_group=ReentrantCallbackGroup())
        answer_bad_transitions(self)
        self.leaving = threading.Event()
        self.exit_code = 0
        self._engine_factory = engine_factory
        self.pipeline: Pipeline | None = None
        self._image_topic: ImageTopic | None = None
        self._silence = SilenceWatch(self)
        self._subscribed_queue = ''
        self._last_error = ''
        self._declare_parameters()
        Services(self)
        self._create_timers(diagnostics_period_s)

    def leave(self, exit_code: int) -> None:
        """Ask the caller that spins the node to stop; the first exit code counts."""
        if not self.leaving.is_set():
            self.exit_code = exit_code
            self.leaving.set()

    def close(self, timeout_s: float) -> bool:
        """Stop all threads; return whether they ended. If not, the process needs a hard exit."""
        self.leaving.set()
        self._unsubscribe()
        return self.pipeline is None or self.pipeline.close(timeout_s)

    def _declare_parameters(self) -> None:
        overrides = {name: p.value for name, p in parameter_overrides(self).items()}
        for warning in check_overrides(overrides):
            self.get_logger().warning(warning)
        declare_params(self)
        self.add_on_set_parameters_callback(self._on_set_parameters)
        self.add_post_set_parameters_callback(self._after_set_parameters)

    def _create_timers(self, diagnostics_period_s: float) -> None:
        # Not the node's clock: simulated time may be stopped while the node loads.
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._diagnostics_pub = self.create_publisher(DiagnosticArray, '/diagnostics', 10)
        self.create_timer(
            diagnostics_period_s, self._on_second, MutuallyExclusiveCallbackGroup(), clock=steady
        )
        self._image_group = MutuallyExclusiveCallbackGroup()
        if self.get_parameter('autostart').value:
            self._autostart_timer = self.create_timer(
                0.0, self._autostart, MutuallyExclusiveCallbackGroup(), clock=steady
            )

    def _autostart(self) -> None:
        self._autostart_timer.cancel()
        if self.trigger_configure() != SUCCESS or self.trigger_activate() != SUCCESS:
            self.leave(1)

    @_logged
    def on_configure(self, _state: LifecycleState) -> TransitionCallbackReturn:
        params = read_params(self)
        if self._subscribed_queue not in ('', params.queue):
            raise ParameterError(
                f"parameter 'queue' is '{params.queue}' but was "
                f"'{self._subscribed_queue}': restart the process to change it"
            )
        self._announce(params)
        self._last_error = ''
        self.pipeline = Pipeline(self, params, self._engine_factory)
        loaded = self.pipeline.worker.start()
        if not self.wait_for(loaded):
            return FAILURE  # leaving: close() stops the pipeline
        loaded.result()
        return SUCCESS

    @_logged
    def on_activate(self, _state: LifecycleState) -> TransitionCallbackReturn:
        params = self.pipeline.params
        self.pipeline.activate()
        self._image_topic = ImageTopic(self, params, self.pipeline.on_image, self._image_group)
        self._subscribed_queue = params.queue
        self.get_logger().info(
            f'waiting for images on {self._image_topic.name} '
            f'({self._image_topic.reliability}, queue: {params.queue})'
        )
        return SUCCESS

    @_logged
    def on_deactivate(self, _state: LifecycleState) -> TransitionCallbackReturn:
        self._unsubscribe()
        self.pipeline.deactivate()
        return SUCCESS

    @_logged
    def on_cleanup(self, _state: LifecycleState) -> TransitionCallbackReturn:
        return self._release('cleanup')

    @_logged
    def on_shutdown(self, _state: LifecycleState) -> TransitionCallbackReturn:
        self._unsubscribe()
        return self._release('shutdown')

    @_logged
    def on_error(self, _state: LifecycleState) -> TransitionCallbackReturn:
        self._unsubscribe()
        return self._release('error')

    def _release(self, transition: str) -> TransitionCallbackReturn:
        pipeline = self.pipeline
        if pipeline is not None and not pipeline.close(_CLEANUP_TIMEOUT_S):
            self.get_logger().error(
                f'{transition} failed: an image has been processed for '
                f'{pipeline.worker.busy_s():.0f} s; try again, or stop the process'
            )
            return FAILURE
        self.pipeline = None
        return SUCCESS

    def _fail(self, callback: str, reason: str) -> None:
        self._last_error = reason
        self.get_logger().error(f'{callback.removeprefix("on_")} failed: {reason}')
        if self.pipeline is None:
            return
        if callback == 'on_configure':
            self._release('configure')
        elif callback == 'on_activate':
            self.pipeline.deactivate()

    def _unsubscribe(self) -> None:
        if self._image_topic is not None:
            self._image_topic.destroy()
            self._image_topic = None

    def _announce(self, params: NodeParams) -> None:
        self.get_logger().info(f"loading model '{params.model}' ({weights_origin(params)})")
        if params.checkpoint == 'random':
            self.get_logger().warning('the weights are random: poses and points are meaningless')
        self.get_logger().info(scale_notice(params))

    def wait_for(self, future: concurrent.futures.Future) -> bool:
        """Wait for a future of the worker; return whether it was done before the node leaves."""
        while not self.leaving.is_set():
            if concurrent.futures.wait([future], _POLL_S).done:
                return True
        return future.done()

    def _on_second(self) -> None:
        array = DiagnosticArray()
        array.header.stamp = self.get_clock().now().to_msg()
        name, pipeline = self.get_fully_qualified_name().lstrip('/'), self.pipeline
        if pipeline is None:
            array.status = [diagnostics.idle_status(name, self._last_error)]
        else:
            self._watch(pipeline)
            array.status = [diagnostics.status(name, pipeline)]
            topic = self._image_topic  # another thread may deactivate the node
            if topic is not None:
                topic.check_publishers()
                self._silence.check(topic, pipeline.state() is State.WAITING_FOR_IMAGES)
                diagnostics.add_reception(array.status[0], topic, self._silence.text)
        self._diagnostics_pub.publish(array)

    def _watch(self, pipeline: Pipeline) -> None:
        limit_s, busy_s = pipeline.watchdog_limit_s(), pipeline.worker.busy_s()
        if 0 < limit_s < busy_s and not self.leaving.is_set():
            pipeline.session.trouble = f'an image has been processed for {busy_s:.0f} s'
            self.get_logger().fatal(
                f'{pipeline.session.trouble}, more than watchdog_timeout ({limit_s:g} s): exiting '
                'with code 1; raise watchdog_timeout if the device is this slow'
            )
            self.leave(1)

    def _on_set_parameters(self, parameters: list[Parameter]) -> SetParametersResult:
        ours = [p for p in parameters if p.name in PARAMETERS]
        try:
            for p in ours:
                PARAMETERS[p.name].check(p.name, p.value)
        except ParameterError as error:
            return SetParametersResult(successful=False, reason=str(error))
        changed = [p.name for p in ours if p.value != self.get_parameter_or(p.name).value]
        reasons = refusals(changed) if self.pipeline is not None else []
        return SetParametersResult(successful=not reasons, reason='; '.join(reasons))

    def _after_set_parameters(self, _parameters: list[Parameter]) -> None:
        if self.pipeline is not None:
            self.pipeline.set_params(read_params(self))
