"""The executor of a process that runs the node."""

from __future__ import annotations

from weakref import ref, ReferenceType, WeakKeyDictionary

from rclpy.event_handler import EventHandler
from rclpy.executors import MultiThreadedExecutor
from rclpy.subscription import Subscription


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

    def _subscription_of(self, handler: EventHandler) -> Subscription | None:
        if handler not in self._subscriptions:
            for node in self.get_nodes():
                for subscription in node.subscriptions:
                    for own in subscription.event_handlers:
                        self._subscriptions[own] = ref(subscription)
            self._subscriptions.setdefault(handler, None)  # of a publisher
        subscription = self._subscriptions[handler]
        return None if subscription is None else subscription()
