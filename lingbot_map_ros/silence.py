"""What to say when no images come: who publishes, and where images are to be had."""

from __future__ import annotations

import time

from rclpy.node import Node
from rclpy.subscription import Subscription

PATIENCE_S = 5.0
_AGAIN_S = 60.0
_TRANSPORTS = {'sensor_msgs/msg/Image': 'raw', 'sensor_msgs/msg/CompressedImage': 'compressed'}


class SilenceWatch:
    """Warns while a subscription hears nothing; `check` is to be called about once a second."""

    def __init__(self, node: Node):
        self._node = node
        self._subscription: Subscription | None = None
        self._since_s = self._said_s = -float('inf')

    def check(self, subscription: Subscription, is_silent: bool) -> None:
        now_s = time.monotonic()
        if not is_silent or subscription is not self._subscription:
            self._subscription, self._since_s, self._said_s = subscription, now_s, -float('inf')
        elif now_s - self._since_s >= PATIENCE_S and now_s - self._said_s >= _AGAIN_S:
            self._said_s = now_s
            self._node.get_logger().warning(silence_text(self._node, subscription))


def silence_text(node: Node, subscription: Subscription) -> str:
    """Return one line: the topic, its type, its publishers, and where images are published."""
    topic, kind = subscription.topic_name, _type_name(subscription.msg_type)
    count = node.count_publishers(topic)
    publishers = f'{count} publisher' + ('' if count == 1 else 's')
    text = f'no images come on {topic} ({kind}, {publishers})'
    if count:
        return f'{text}: it is silent, or its type or quality of service does not fit'
    found = [
        f'{name} (image_transport: {_TRANSPORTS[found_kind]})'
        for name, kinds in node.get_topic_names_and_types()
        for found_kind in kinds
        if found_kind in _TRANSPORTS and _is_input(node, name)
    ]
    if found:
        return f"{text}, but on {', '.join(found)}: remap 'image' and set image_transport"
    return (
        f'{text}, nor does anybody publish images elsewhere: is the camera driver running, with '
        'the same ROS_DOMAIN_ID?'
    )


def _is_input(node: Node, topic: str) -> bool:
    """Tell whether somebody publishes there, and not this node its own results."""
    own = node.get_fully_qualified_name() + '/'
    return node.count_publishers(topic) > 0 and not topic.startswith(own)


def _type_name(message_type: type) -> str:
    return f'{message_type.__module__.split(".")[0]}/msg/{message_type.__name__}'
