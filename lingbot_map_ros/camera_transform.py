"""The transform map -> camera, sent only if nobody else says where the camera is."""

from __future__ import annotations

from lingbot_map.map_frame import Pose
from lingbot_map_ros.conversions import transform
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.qos import DurabilityPolicy, QoSProfile
from std_msgs.msg import Header
from tf2_msgs.msg import TFMessage
from tf2_ros import TransformBroadcaster

_DEPTH = 100


class CameraTransform:
    """
    Broadcasts the camera's pose on /tf.

    A frame with two parents breaks the whole tree. So this listens to the transforms of others
    until its first broadcast, and never begins when one of them places the camera elsewhere than
    in the map; `trouble` says so then.
    """

    def __init__(self, node):
        self.trouble = ''
        self._node = node
        self._broadcaster = TransformBroadcaster(node)
        self._parents: dict[str, str] = {}
        group = MutuallyExclusiveCallbackGroup()
        static = QoSProfile(depth=_DEPTH, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._listeners = [
            node.create_subscription(TFMessage, topic, self._on_tf, qos, callback_group=group)
            for topic, qos in (('/tf', _DEPTH), ('/tf_static', static))
        ]

    def send(self, header: Header, camera: str, pose: Pose) -> None:
        """Broadcast the pose of the frame `camera` in the frame of `header`."""
        if self._listeners and not self._may_begin(header.frame_id, camera):
            return
        self._broadcaster.sendTransform(transform(header, camera, pose))

    def close(self) -> None:
        self._stop_listening()
        self._node.destroy_publisher(self._broadcaster.pub_tf)

    def _may_begin(self, map_frame: str, camera: str) -> bool:
        parent = self._parents.get(camera, map_frame)
        if parent == map_frame:
            self._stop_listening()
            self.trouble = ''
            return True
        if not self.trouble:
            self.trouble = (
                f"no TF is published: '{camera}' has the parent '{parent}' already and cannot "
                f"have '{map_frame}' too; set the parameter 'tf_mode' to 'off', or stop who "
                'publishes the other'
            )
            self._node.get_logger().error(self.trouble)
        return False

    def _stop_listening(self) -> None:
        while self._listeners:
            self._node.destroy_subscription(self._listeners.pop())

    def _on_tf(self, message: TFMessage) -> None:
        for other in message.transforms:
            self._parents[other.child_frame_id] = other.header.frame_id
