from geometry_msgs.msg import TransformStamped
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from tf2_msgs.msg import TFMessage
from tf2_ros.transform_broadcaster import as_list


class StaticTransformBroadcaster:
    """Publish static transforms on /tf_static, also for late subscribers."""

    def __init__(self, node: Node, qos: QoSProfile | int | None = None) -> None:
        if qos is None:
            qos = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self.pub_tf = node.create_publisher(TFMessage, '/tf_static', qos)
        self._transforms: dict[str, TransformStamped] = {}

    def sendTransform(self, transform: TransformStamped | list[TransformStamped]) -> None:
        """Publish one or several transforms, plus those sent before for other children."""
        self._transforms.update({t.child_frame_id: t for t in as_list(transform)})
        # A late subscriber gets only the last message, so it must contain all transforms.
        self.pub_tf.publish(TFMessage(transforms=list(self._transforms.values())))
