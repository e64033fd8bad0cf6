"""
Subscribe to images, and explain why none arrive.

Reports publishers with an incompatible QoS or type, images lost in transport, a stopped /clock,
and other topics that have images.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
import threading
import time

from lingbot_map.settings import ParameterError
from lingbot_map_ros.parameters import NodeParams
from lingbot_map_ros.rclpy_fixes import parameter_overrides
from rclpy.callback_groups import CallbackGroup
from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.node import Node
from rclpy.qos import (
    qos_check_compatible,
    QoSCompatibility,
    QoSPolicyKind,
    QoSProfile,
    ReliabilityPolicy,
)
from rclpy.qos_overriding_options import QoSOverridingOptions
from rclpy.topic_endpoint_info import TopicEndpointInfo
from sensor_msgs.msg import CompressedImage, Image

_DEPTH = 5  # of the middleware's queue, if queue is latest
_OVERRIDABLE = (
    QoSPolicyKind.HISTORY,
    QoSPolicyKind.DEPTH,
    QoSPolicyKind.RELIABILITY,
    QoSPolicyKind.DURABILITY,
)
_LOST_WARN_PERIOD_S = 60.0
_QOS_POLICIES = {
    'history': ('keep_last', 'keep_all'),
    'reliability': ('reliable', 'best_effort', 'system_default'),
    'durability': ('volatile', 'transient_local', 'system_default'),
}
_MATCHES_ALL = {'reliability': 'best_effort', 'durability': 'volatile'}  # any publisher
PATIENCE_S = 5.0
_WARN_PERIOD_S = 60.0
_TRANSPORTS = {'sensor_msgs/msg/Image': 'raw', 'sensor_msgs/msg/CompressedImage': 'compressed'}


class ImageTopic:
    """
    Subscribes to images and checks the publishers of the topic.

    `matched` is the number of compatible publishers; `incompatible` maps each node with other
    publishers to the reason. `lost` is the number of images that the middleware lost.
    """

    def __init__(
        self, node: Node, params: NodeParams, on_image: Callable, callback_group: CallbackGroup
    ):
        self.matched, self.incompatible = 0, {}
        self.lost = 0
        self._node, self._lock = node, threading.Lock()
        compressed = params.image_transport == 'compressed'
        message_type = CompressedImage if compressed else Image
        self.type_name = f'sensor_msgs/msg/{message_type.__name__}'
        self._qos = QoSProfile(depth=_DEPTH, reliability=ReliabilityPolicy.BEST_EFFORT)
        if params.queue == 'lossless':
            self._qos = QoSProfile(depth=params.queue_size, reliability=ReliabilityPolicy.RELIABLE)
        topic = _compressed_topic(node) if compressed else 'image'
        self.name = node.resolve_topic_name(topic)
        _check_overrides(node, f'qos_overrides.{self.name}.subscription')
        self.subscription = node.create_subscription(
            message_type,
            topic,
            on_image,
            self._qos,  # rclpy writes the overrides into it
            callback_group=callback_group,
            qos_overriding_options=QoSOverridingOptions(_OVERRIDABLE),
            event_callbacks=SubscriptionEventCallbacks(
                incompatible_qos=lambda _: self.check_publishers(), message_lost=self._on_lost
            ),
        )

    @property
    def reliability(self) -> str:
        return self._qos.reliability.name.lower()

    def destroy(self) -> None:
        self._node.destroy_subscription(self.subscription)

    def check_publishers(self) -> None:
        """Check the current publishers; warn of new incompatible ones."""
        with self._lock:
            self.matched, counts = 0, Counter()
            for info in self._node.get_publishers_info_by_topic(self.name):
                reason = self._incompatibility(info)
                if reason:
                    counts[_node_name(info), reason] += 1
                else:
                    self.matched += 1
            before, self.incompatible = self.incompatible, {}
            for (name, reason), count in counts.items():
                times = f' ({count} publishers)' if count > 1 else ''
                self.incompatible[name + times] = reason
            for name in self.incompatible.keys() - before.keys():
                self._node.get_logger().warning(
                    f'images of {name} on {self.name} are not received: {self.incompatible[name]}'
                )

    def _on_lost(self, event) -> None:
        self.lost = event.total_count
        self._node.get_logger().warning(
            self.lost_text(), throttle_duration_sec=_LOST_WARN_PERIOD_S
        )

    def lost_text(self) -> str:
        """Return a line about lost images, with the remedy."""
        return (
            f'{self.lost} images on {self.name} were lost in transport: make room for large '
            'messages (Fast DDS: set FASTRTPS_DEFAULT_PROFILES_FILE to '
            'config/fastdds_large_messages.xml for the camera and for this node)'
        )

    def _incompatibility(self, info: TopicEndpointInfo) -> str:
        """Return why a publisher is incompatible, with the remedy; '' if it is compatible."""
        if info.topic_type != self.type_name:
            return f'it publishes {info.topic_type}, not {self.type_name}'
        compatibility, reasons = qos_check_compatible(info.qos_profile, self._qos)
        if compatibility != QoSCompatibility.ERROR:
            return ''
        remedies = [
            f"set the parameter 'qos_overrides.{self.name}.subscription.{policy}' to '{value}'"
            for policy, value in _MATCHES_ALL.items()
            if getattr(info.qos_profile, policy) != getattr(self._qos, policy)
        ]
        reasons = reasons.replace('ERROR: ', '').strip('; ').replace(';', ', ').lower()
        return f'{reasons}; ' + ' and '.join(remedies)


def _check_overrides(node: Node, prefix: str) -> None:
    """Raise ParameterError for a QoS override at which rclpy would fail, now or later."""
    for name, parameter in parameter_overrides(node).items():
        policy, value = name.removeprefix(prefix + '.'), parameter.value
        choices = _QOS_POLICIES.get(policy, ())
        if choices and value not in choices:
            raise ParameterError(f"parameter '{name}' is {value!r}: use {' | '.join(choices)}")
        if policy == 'depth' and not (type(value) is int and value > 0):
            raise ParameterError(f"parameter '{name}' is {value!r}: it must be int, at least 1")


def _compressed_topic(node: Node) -> str:
    """Return the topic if it is remapped, else `compressed` below `image`, as image_transport."""
    topic = 'image/compressed'
    remapped = node.resolve_topic_name(topic)
    if remapped != node.resolve_topic_name(topic, only_expand=True):
        return topic
    return node.resolve_topic_name('image') + '/compressed'


def _node_name(info: TopicEndpointInfo) -> str:
    return f'{info.node_namespace.rstrip("/")}/{info.node_name}'


class SilenceWatch:
    """
    Warns while no images arrive; call `check` about once a second.

    `text` is the reason if images have been missing for PATIENCE_S seconds, else ''.
    """

    def __init__(self, node: Node):
        self.text = ''
        self._node = node
        self._topic: ImageTopic | None = None
        self._since_s = self._warned_s = -float('inf')
        self._node_time_ns = -1

    def check(self, topic: ImageTopic, is_silent: bool) -> None:
        """Update `text`; warn every minute while it is not empty."""
        now_s = time.monotonic()
        node_time_ns = self._node.get_clock().now().nanoseconds
        is_clock_stopped, self._node_time_ns = node_time_ns == self._node_time_ns, node_time_ns
        if not is_silent or topic is not self._topic:
            self._topic, self._since_s, self._warned_s = topic, now_s, -float('inf')
            self.text = ''
        elif now_s - self._since_s >= PATIENCE_S:
            self.text = (
                stopped_clock_text(topic, node_time_ns)
                if is_clock_stopped
                else silence_text(self._node, topic)
            )
            if now_s - self._warned_s >= _WARN_PERIOD_S:
                self._warned_s = now_s
                self._node.get_logger().warning(self.text)


def stopped_clock_text(topic: ImageTopic, node_time_ns: int) -> str:
    """Return a line about simulated time that does not advance."""
    text = f'no images arrive on {topic.name}: use_sim_time is set'
    if node_time_ns == 0:
        return f'{text}, but nothing was received on /clock'
    return f'{text} and /clock stands still at {node_time_ns / 1e9:.3f} s: is playback paused?'


def silence_text(node: Node, topic: ImageTopic) -> str:
    """Return a line with topic, type and publishers, and the reason or other image topics."""
    count = node.count_publishers(topic.name)
    publishers = f'{count} publisher' + ('' if count == 1 else 's')
    text = f'no images arrive on {topic.name} ({topic.type_name}, {publishers})'
    if topic.incompatible:
        return f'{text}: incompatible are ' + '; '.join(
            f'{name}: {reason}' for name, reason in topic.incompatible.items()
        )
    if topic.lost:
        return f'{text}: {topic.lost_text()}'
    if count:
        return f'{text}: nothing is published'
    found = [
        f'{name} (image_transport: {_TRANSPORTS[found_kind]})'
        for name, kinds in node.get_topic_names_and_types()
        for found_kind in kinds
        if found_kind in _TRANSPORTS and _is_input(node, name)
    ]
    if found:
        return f"{text}, but on {', '.join(found)}: remap 'image' and set image_transport"
    return (
        f'{text}, and no other topic has images: is the camera driver running, with the same '
        'ROS_DOMAIN_ID?'
    )


def _is_input(node: Node, topic: str) -> bool:
    """Return whether a topic has publishers and is not an output of this node."""
    own = node.get_fully_qualified_name() + '/'
    return node.count_publishers(topic) > 0 and not topic.startswith(own)
