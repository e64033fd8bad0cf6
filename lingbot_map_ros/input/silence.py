"""What to say when no images come: who publishes, and where images are to be had."""

from __future__ import annotations

import time

from lingbot_map_ros.input.image_topic import ImageTopic
from rclpy.node import Node

PATIENCE_S = 5.0
_AGAIN_S = 60.0
_TRANSPORTS = {'sensor_msgs/msg/Image': 'raw', 'sensor_msgs/msg/CompressedImage': 'compressed'}


class SilenceWatch:
    """
    Warns while a topic is silent; `check` is to be called about once a second.

    `text` says why no images come once they have been missing for a while, and is empty else.
    """

    def __init__(self, node: Node):
        self.text = ''
        self._node = node
        self._topic: ImageTopic | None = None
        self._since_s = self._said_s = -float('inf')
        self._node_time_ns = -1

    def check(self, topic: ImageTopic, is_silent: bool) -> None:
        now_s = time.monotonic()
        node_time_ns = self._node.get_clock().now().nanoseconds
        time_stands_still, self._node_time_ns = node_time_ns == self._node_time_ns, node_time_ns
        if not is_silent or topic is not self._topic:
            self._topic, self._since_s, self._said_s = topic, now_s, -float('inf')
            self.text = ''
        elif now_s - self._since_s >= PATIENCE_S:
            self.text = (
                standstill_text(topic, node_time_ns)
                if time_stands_still
                else silence_text(self._node, topic)
            )
            if now_s - self._said_s >= _AGAIN_S:
                self._said_s = now_s
                self._node.get_logger().warning(self.text)


def standstill_text(topic: ImageTopic, node_time_ns: int) -> str:
    """Return one line for simulated time that does not go on."""
    text = f'no images come on {topic.name}: use_sim_time is set'
    if node_time_ns == 0:
        return f'{text}, but nothing has come on /clock'
    return f'{text} and /clock stands still at {node_time_ns / 1e9:.3f} s: is playback paused?'


def silence_text(node: Node, topic: ImageTopic) -> str:
    """Return one line: the topic, its type, its publishers, and where images are published."""
    count = node.count_publishers(topic.name)
    publishers = f'{count} publisher' + ('' if count == 1 else 's')
    text = f'no images come on {topic.name} ({topic.type_name}, {publishers})'
    if topic.unheard:
        return f'{text}: not heard are ' + '; '.join(
            f'{name}: {obstacle}' for name, obstacle in topic.unheard.items()
        )
    if topic.lost:
        return f'{text}: {topic.lost_text()}'
    if count:
        return f'{text}: it is silent'
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
