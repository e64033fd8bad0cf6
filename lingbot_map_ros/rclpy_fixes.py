"""Fixes for rclpy; the only file that uses private names of rclpy."""

from __future__ import annotations

import threading
import time
from weakref import ref, ReferenceType, WeakKeyDictionary

from rclpy.event_handler import EventHandler
from rclpy.executors import MultiThreadedExecutor, TimeoutException
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.lifecycle import LifecycleNodeMixin
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.subscription import Subscription

_POLL_S = 0.01


class NodeExecutor(MultiThreadedExecutor):
    """
    An executor with two threads that does not spin while a message waits for a free thread.

    With Fast DDS the events of a subscription (lost messages, incompatible QoS) and its messages
    share one condition. While a message waits to be taken, each wait for the events returns at
    once. This busy loop starves the thread that should take the message, and the node randomly
    receives only a tenth of its images. So this executor waits for events only together with
    messages.
    """

    def __init__(self):
        super().__init__(2)
        # Held from the search for a ready callback until the callback is in `_futures`. Reentrant,
        # because a signal handler may call `shutdown` in the spinning thread.
        self._dispatching = threading.RLock()
        self._subscriptions: WeakKeyDictionary[EventHandler, ReferenceType | None] = (
            WeakKeyDictionary()
        )

    def can_execute(self, entity) -> bool:
        """Return whether to wait now for `entity`, a part of a spinning node."""
        if not super().can_execute(entity):
            return False
        if not isinstance(entity, EventHandler):
            return True
        subscription = self._subscription_of(entity)
        return subscription is None or super().can_execute(subscription)

    def wait_for_ready_callbacks(self, *args, **kwargs):
        """
        Return the next ready callback; raise TimeoutException if there is none this time.

        A deactivation destroys a subscription while this thread collects what to wait for. rclpy
        allows for that, but not for the events of the subscription: spinning would end.
        """
        try:
            return super().wait_for_ready_callbacks(*args, **kwargs)
        except rclpy_implementation.InvalidHandle:
            raise TimeoutException from None

    def _spin_once_impl(self, *args, **kwargs) -> None:
        with self._dispatching:
            if not self._is_shutdown:
                super()._spin_once_impl(*args, **kwargs)

    def shutdown(self, timeout_sec: float | None = None) -> bool:
        """
        Start no more callbacks and wait for the running ones; return whether all have ended.

        If not, nothing is released: call it again. The base class does not wait. It destroys at
        once the guard condition that callbacks trigger, so some of them fail with an obscure line.
        """
        self._is_shutdown = True
        self.wake()
        unlimited = timeout_sec is None or timeout_sec < 0
        if not self._wait(threading.TIMEOUT_MAX if unlimited else timeout_sec):
            return False
        # Later releases of MultiThreadedExecutor wait here without limit, so not its `shutdown`.
        return super(MultiThreadedExecutor, self).shutdown(0)

    def _wait(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        # The base class adds a callback to `_futures` only after a thread has it. Once the lock is
        # free, `_futures` is complete, and no more callbacks can begin.
        if not self._dispatching.acquire(timeout=timeout_s):
            return False
        self._dispatching.release()
        while any(not task.done() for task in list(self._futures)):
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _subscription_of(self, handler: EventHandler) -> Subscription | None:
        if handler not in self._subscriptions:
            for node in self.get_nodes():
                for subscription in node.subscriptions:
                    for own in subscription.event_handlers:
                        self._subscriptions[own] = ref(subscription)
            self._subscriptions.setdefault(handler, None)  # of a publisher
        subscription = self._subscriptions[handler]
        return None if subscription is None else subscription()


def parameter_overrides(node: Node) -> dict[str, Parameter]:
    """Return the parameter values that `node` was started with, declared or not."""
    return node._parameter_overrides


def answer_bad_transitions(node: LifecycleNodeMixin) -> None:
    """
    Answer a request for a transition that is not possible now with success=False.

    rclpy 7.1 raises in the service callback: the caller gets no response and the executor ends.
    """
    service = node._service_change_state
    change_state = service.callback

    def answer(request, response):
        try:
            return change_state(request, response)
        except rclpy_implementation.RCLError as error:
            reason = str(error).split(', at ')[0]
            node.get_logger().error(
                f'transition {request.transition.label or request.transition.id} is not possible '
                f'now: {reason}'
            )
            response.success = False
            return response

    service.callback = answer
