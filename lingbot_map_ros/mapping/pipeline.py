"""The image pipeline of a configured node, from the image callback to the publishers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
import time

from lingbot_map.streaming.engine import StreamEngine
from lingbot_map.streaming.loading import choose_device
from lingbot_map_ros.frame import Dropped, Frame, INACTIVE, QUEUE_FULL, RESET, SUPERSEDED, to_stamp
from lingbot_map_ros.input import camera_info
from lingbot_map_ros.input.admission import Admission
from lingbot_map_ros.input.images import ImageInput
from lingbot_map_ros.input.inbox import Inbox
from lingbot_map_ros.input.odometry import OdometryInput
from lingbot_map_ros.mapping.ledger import GAP, Ledger
from lingbot_map_ros.mapping.map_session import MapSession, State
from lingbot_map_ros.mapping.worker import Worker
from lingbot_map_ros.output.frames import FrameTree
from lingbot_map_ros.output.publishing import Outputs
from lingbot_map_ros.output.saving import autosave, check_autosave
from lingbot_map_ros.parameters import NodeParams
from sensor_msgs.msg import CompressedImage, Image

_WARM_UPS = 4.0  # times the warm-up, which includes a scale batch, the slowest step
_SILENCE_S = 2.0  # without images, until the state is WAITING_FOR_IMAGES


class Pipeline:
    """
    Admits images, and owns inbox, worker, outputs and the current map.

    `on_image` must not run in two threads at once; the other methods are thread-safe. The current
    map only changes under `outputs.lock`.
    """

    def __init__(self, node, params: NodeParams, load: Callable[[NodeParams], StreamEngine]):
        check_autosave(params.autosave)
        self.params = params
        self.paused = False
        self._clock, self._logger = node.get_clock(), node.get_logger()
        self.ledger = Ledger(self._logger, lambda: node.get_clock().now().nanoseconds)
        topic = node.resolve_topic_name(camera_info.TOPIC)
        infos = camera_info.CameraInfoStore(
            topic,
            lambda: params.use_camera_info or node.count_publishers(topic) > 0,
            params.camera_info_timeout,
            self._logger,
        )
        self.images = ImageInput(params, infos, self._logger)
        self.tree = FrameTree(node, params.map_frame, only_static=params.tf_mode == 'off')
        uses_odometry = params.scale_source == 'odometry'
        self.odometry = OdometryInput(node) if uses_odometry else None
        self.outputs = Outputs(node, params, self.tree, self._new_session(0, Admission(params)))
        self._info_subscription = camera_info.CameraInfoSubscription(node, infos)
        latest = params.queue == 'latest'
        self._inbox = Inbox(1 if latest else params.queue_size, newest_wins=latest)
        self._is_autosaved = False
        self.worker = Worker(
            load,
            self.images,
            self._inbox,
            self.ledger,
            self.outputs,
            self._start_map,
            self._logger,
        )

    @property
    def session(self) -> MapSession:
        """The current map."""
        return self.outputs.current

    def set_params(self, params: NodeParams) -> None:
        self.params = self.outputs.params = params

    def on_image(self, message: Image | CompressedImage) -> None:
        """Queue an image for the worker, or drop it."""
        if self.paused:
            self.ledger.count_paused()
            with self.outputs.lock:
                self.session.gaps.pause()
            self.outputs.acknowledge(message.header)
            return
        self.ledger.receive()
        with self.outputs.lock:  # a reset is before or after this image
            loser, reason, why = self._admit(message)
        if loser is not None:
            self.ledger.count_drop(reason, why)
            self.outputs.acknowledge(loser.header)

    def _admit(
        self, message: Image | CompressedImage
    ) -> tuple[Image | CompressedImage | None, str, str]:
        """Queue an image; return the image that is dropped, if any, with reason and log text."""
        if not self.outputs.active:
            return message, INACTIVE, ''
        try:
            admitted = self.session.admission.admit(message.header, self._clock.now().nanoseconds)
        except Dropped as drop:
            return message, drop.reason, str(drop)
        if admitted.jump_s:
            self._restart(f'image stamps jumped back by {admitted.jump_s:.3f} s')
        gap = self.session.gaps.check(admitted.stamp_ns)
        if gap:
            self.ledger.count_event(GAP, gap)
        frame = Frame(message, to_stamp(admitted.stamp_ns), admitted.camera, time.monotonic())
        loser = self._inbox.put(frame)
        return (None, '', '') if loser is None else (loser.message, *self._overflow())

    def _overflow(self) -> tuple[str, str]:
        """Return reason and log text for an image that the full inbox drops."""
        if self.params.queue == 'latest':
            return SUPERSEDED, ''
        return QUEUE_FULL, (
            f'{self.params.queue_size} images are waiting: wait for ~/processed before '
            "sending more, or raise the parameter 'queue_size'"
        )

    def reset(self) -> None:
        """Start a new map; no output of the old one is published after this returns."""
        with self.outputs.lock:
            self._restart('reset was called', Admission(self.params))

    def _restart(self, why: str, admission: Admission | None = None) -> None:
        """Start a new map and drop waiting images; the caller holds `outputs.lock`."""
        self._start_map(admission)
        self._empty_inbox(RESET)
        self._inbox.wake()
        self._logger.info(f'{why}: starting a new map')

    def _start_map(self, admission: Admission | None = None) -> MapSession:
        """Make a new map the current one; by default it keeps the admission of the old map."""
        with self.outputs.lock:
            old = self.session
            session = self._new_session(old.number + 1, admission or old.admission)
            self.outputs.current = session
            return session

    def _new_session(self, number: int, admission: Admission) -> MapSession:
        return MapSession(
            number, self.params, admission, self.ledger.counts(), self.tree, self.odometry
        )

    def _empty_inbox(self, reason: str) -> None:
        for frame in self._inbox.clear():
            self.ledger.count_drop(reason)
            self.outputs.acknowledge(frame.message.header)

    def flush(self) -> Future:
        return self.worker.flush()

    def activate(self) -> None:
        self.outputs.active = True

    def deactivate(self) -> None:
        """Stop publishing and drop waiting images; the map is kept."""
        with self.outputs.lock:
            self.outputs.active = False
            self.session.gaps.pause()
            self._empty_inbox(INACTIVE)

    def close(self, timeout_s: float) -> bool:
        """
        Stop both threads, autosave and destroy the publishers; return whether the worker ended.

        Autosave does not wait for the worker: an inactive node adds nothing to the map.
        """
        self.deactivate()
        self._info_subscription.close()
        deadline_s = time.monotonic() + timeout_s
        self.outputs.stop_thread(timeout_s)
        self._autosave()
        ended = self.worker.stop(max(0.0, deadline_s - time.monotonic()))
        if ended:  # otherwise it may still publish
            self.outputs.destroy()
            if self.odometry is not None:
                self.odometry.close()
            self.tree.close()
        return ended

    def _autosave(self) -> None:
        with self.outputs.lock:
            is_due = bool(self.params.autosave) and not self._is_autosaved
            self._is_autosaved = True
        if is_due:
            autosave(self.session, self.params.autosave, self._logger)

    def watchdog_limit_s(self) -> float:
        """Return the time limit for one image, 0: none; on a CPU it follows the warm-up time."""
        limit_s = self.params.watchdog_timeout
        if limit_s and choose_device(self.params.device).type == 'cpu':
            return max(limit_s, _WARM_UPS * self.worker.warm_up.seconds)
        return limit_s

    def state(self) -> State:
        """Return the state of the node, or of its current map."""
        worker = self.worker
        if worker.phase != State.READY or not self.outputs.active:
            return worker.phase
        if self.session.trouble:
            return State.ERROR
        if self.paused:
            return State.PAUSED
        idle = not len(self._inbox) and not worker.busy_s()
        if idle and self.ledger.seconds_since_arrival() > _SILENCE_S:
            return State.WAITING_FOR_IMAGES
        return self.session.state
