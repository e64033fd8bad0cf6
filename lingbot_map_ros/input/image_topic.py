"""The subscription of images, and the publishers of its topic that it cannot hear."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
import threading
import time

from lingbot_map_ros.parameter_spec import ParameterError
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

_DEPTH = 5  # in the middleware, when queue is latest
_OVERRIDABLE = (
    QoSPolicyKind.HISTORY,
    QoSPolicyKind.DEPTH,
    QoSPolicyKind.RELIABILITY,
    QoSPolicyKind.DURABILITY,
)
_LOST_SAID_EVERY_S = 60.0
_QOS_POLICIES = {
    'history': ('keep_last', 'keep_all'),
    'reliability': ('reliable', 'best_effort', 'system_default'),
    'durability': ('volatile', 'transient_local', 'system_default'),
}
_LENIENT = {'reliability': 'best_effort', 'durability': 'volatile'}  # what hears everybody
PATIENCE_S = 5.0
_AGAIN_S = 60.0
_TRANSPORTS = {'sensor_msgs/msg/Image': 'raw', 'sensor_msgs/msg/CompressedImage': 'compressed'}


class ImageTopic:
    """
    Subscribes images and watches who publishes them.

    `heard` counts the publishers that fit; `unheard` holds, by node, why its publishers do not.
    `lost` counts images that were sent and that the middleware did not bring here whole.
    """

    def __init__(
        self, node: Node, params: NodeParams, on_image: Callable, callback_group: CallbackGroup
    ):
        self.heard, self.unheard = 0, {}
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
            self._qos,  # overrides are written into it
            callback_group=callback_group,
            qos_overriding_options=QoSOverridingOptions(_OVERRIDABLE),
            event_callbacks=SubscriptionEventCallbacks(
                incompatible_qos=lambda _: self.look(), message_lost=self._on_lost
            ),
        )

    @property
    def reliability(self) -> str:
        return self._qos.reliability.name.lower()

    def destroy(self) -> None:
        self._node.destroy_subscription(self.subscription)

    def look(self) -> None:
        """See who publishes now; warn of nodes that are not heard."""
        with self._lock:
            self.heard, counts = 0, Counter()
            for info in self._node.get_publishers_info_by_topic(self.name):
                obstacle = self._obstacle(info)
                if obstacle:
                    counts[_node_name(info), obstacle] += 1
                else:
                    self.heard += 1
            before, self.unheard = self.unheard, {}
            for (name, obstacle), count in counts.items():
                times = f' ({count} publishers)' if count > 1 else ''
                self.unheard[name + times] = obstacle
            for name in self.unheard.keys() - before.keys():
                self._node.get_logger().warning(
                    f'images of {name} on {self.name} are not heard: {self.unheard[name]}'
                )

    def _on_lost(self, event) -> None:
        self.lost = event.total_count
        self._node.get_logger().warning(self.lost_text(), throttle_duration_sec=_LOST_SAID_EVERY_S)

    def lost_text(self) -> str:
        """Return one line on the images that got lost on the way."""
        return (
            f'{self.lost} images on {self.name} got lost on the way here: make room for large '
            'messages (Fast DDS: set FASTRTPS_DEFAULT_PROFILES_FILE to '
            'config/fastdds_large_messages.xml for the camera and for this node)'
        )

    def _obstacle(self, info: TopicEndpointInfo) -> str:
        """Return why a publisher is not heard, and the remedy; '' if it is."""
        if info.topic_type != self.type_name:
            return f'it publishes {info.topic_type}, not {self.type_name}'
        compatibility, reasons = qos_check_compatible(info.qos_profile, self._qos)
        if compatibility != QoSCompatibility.ERROR:
            return ''
        remedies = [
            f"set the parameter 'qos_overrides.{self.name}.subscription.{policy}' to '{value}'"
            for policy, value in _LENIENT.items()
            if getattr(info.qos_profile, policy) != getattr(self._qos, policy)
        ]
        reasons = reasons.replace('ERROR: ', '').strip('; ').replace(';', ', ').lower()
        return f'{reasons}; ' + ' and '.join(remedies)


def _check_overrides(node: Node, prefix: str) -> None:
    """Raise ParameterError for a QoS override that rclpy would fail on, or take and fail later."""
    for name, parameter in parameter_overrides(node).items():
        policy, value = name.removeprefix(prefix + '.'), parameter.value
        choices = _QOS_POLICIES.get(policy, ())
        if choices and value not in choices:
            raise ParameterError(f"parameter '{name}' is {value!r}: use {' | '.join(choices)}")
        if policy == 'depth' and not (type(value) is int and value > 0):
            raise ParameterError(f"parameter '{name}' is {value!r}: it must be int, at least 1")


def _node_name(info: TopicEndpointInfo) -> str:
    return f'{info.node_namespace.rstrip("/")}/{info.node_name}'


def _compressed_topic(node: Node) -> str:
    """Return the remapped topic, or else that beside `image`, as image_transport has it."""
    topic = 'image/compressed'
    remapped = node.resolve_topic_name(topic)
    if remapped != node.resolve_topic_name(topic, only_expand=True):
        return topic
    return node.resolve_topic_name('image') + '/compressed'


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
