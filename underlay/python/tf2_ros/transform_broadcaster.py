from collections.abc import Iterable

from geometry_msgs.msg import TransformStamped
from rclpy.node import Node
from rclpy.qos import QoSProfile
from tf2_msgs.msg import TFMessage


class TransformBroadcaster:
    """Publish transforms on /tf."""

    def __init__(self, node: Node, qos: QoSProfile | int | None = None) -> None:
        self.pub_tf = node.create_publisher(
            TFMessage, '/tf', QoSProfile(depth=100) if qos is None else qos
        )

    def sendTransform(self, transform: TransformStamped | list[TransformStamped]) -> None:
        """Publish one or several transforms in one message."""
        self.pub_tf.publish(TFMessage(transforms=as_list(transform)))


def as_list(transform: TransformStamped | Iterable[TransformStamped]) -> list[TransformStamped]:
    """Return one or several transforms as a list."""
    return [transform] if isinstance(transform, TransformStamped) else list(transform)
