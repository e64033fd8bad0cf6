"""The executor of a process that runs the node."""

from __future__ import annotations

import time
from weakref import ref, ReferenceType, WeakKeyDictionary

from rclpy.event_handler import EventHandler
from rclpy.executors import MultiThreadedExecutor
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.lifecycle import LifecycleNodeMixin
from rclpy.subscription import Subscription

_POLL_S = 0.01


class NodeExecutor(MultiThreadedExecutor):
    """
    Two threads, and a processor that is not kept busy while a message waits for one of them.

    With Fast DDS the events of a subscription (messages lost, QoS that does not fit) share one
    condition with its messages. While a message waits to be taken, a wait for the events returns
    at once, again and again, which keeps the very thread from running that would take it: at
    random, a node gets a tenth of its images. So events are waited for together with messages
    only.
    """

    def __init__(self):
        super().__init__(2)
        self._subscriptions: WeakKeyDictionary[EventHandler, ReferenceType | None] = (
            WeakKeyDictionary()
        )

    def can_execute(self, entity) -> bool:
        """Tell whether to wait for `entity` now, a part of a node that is spun."""
        if not super().can_execute(entity):
            return False
        if not isinstance(entity, EventHandler):
            return True
        subscription = self._subscription_of(entity)
        return subscription is None or super().can_execute(subscription)

    def shutdown(self, timeout_sec: float | None = None) -> bool:
        """
        Begin no more callbacks, and wait for those under way; tell whether they have ended.

        The base class does not wait: it destroys at once what they wake the executor with, so
        that some fail, with a line that nobody understands.
        """
        self._is_shutdown = True
        self.wake()
        idle = self._wait(float('inf') if timeout_sec is None else timeout_sec)
        # Later releases of MultiThreadedExecutor wait here without limit, so not its `shutdown`.
        return super(MultiThreadedExecutor, self).shutdown(0) and idle

    def _wait(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
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


def answer_bad_transitions(node: LifecycleNodeMixin) -> None:
    """
    Answer a transition that is not possible now with success=False.

    rclpy 7.1 raises in the service callback instead: the caller never hears, the executor dies.
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
