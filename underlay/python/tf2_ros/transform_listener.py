from threading import Thread

from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from tf2_msgs.msg import TFMessage
from tf2_ros.buffer import Buffer

DEFAULT_TF_TOPIC = '/tf'
DEFAULT_STATIC_TF_TOPIC = '/tf_static'
_DEPTH = 100
_AUTHORITY = 'default_authority'


class TransformListener:
    """Subscribes to /tf and /tf_static and fills a buffer."""

    def __init__(
        self,
        buffer: Buffer,
        node: Node,
        *,
        spin_thread: bool = False,
        qos: QoSProfile | int | None = None,
        static_qos: QoSProfile | int | None = None,
        tf_topic: str = DEFAULT_TF_TOPIC,
        tf_static_topic: str = DEFAULT_STATIC_TF_TOPIC,
    ) -> None:
        self.buffer, self.node, self.group = buffer, node, ReentrantCallbackGroup()
        self.tf_sub = node.create_subscription(
            TFMessage, tf_topic, self.callback, qos or _DEPTH, callback_group=self.group
        )
        self.tf_static_sub = node.create_subscription(
            TFMessage,
            tf_static_topic,
            self.static_callback,
            static_qos or QoSProfile(depth=_DEPTH, durability=DurabilityPolicy.TRANSIENT_LOCAL),
            callback_group=self.group,
        )
        if spin_thread:
            executor = SingleThreadedExecutor(context=node.context)
            executor.add_node(node)
            Thread(target=executor.spin, daemon=True).start()

    def unregister(self) -> None:
        """Destroy the subscriptions."""
        self.node.destroy_subscription(self.tf_sub)
        self.node.destroy_subscription(self.tf_static_sub)

    def callback(self, data: TFMessage) -> None:
        for transform in data.transforms:
            self.buffer.set_transform(transform, _AUTHORITY)

    def static_callback(self, data: TFMessage) -> None:
        for transform in data.transforms:
            self.buffer.set_transform_static(transform, _AUTHORITY)
