"""Convert poses, points and images to ROS messages."""

from __future__ import annotations

from collections.abc import Iterable

from cv_bridge import CvBridge
from geometry_msgs.msg import Point, PoseStamped, Quaternion, TransformStamped, Vector3
from geometry_msgs.msg import Pose as PoseMessage
from lingbot_map.mapping.map_frame import Pose
from lingbot_map.mapping.pose_quality import UNKNOWN_VARIANCE
from nav_msgs.msg import Odometry, Path
import numpy as np
from sensor_msgs.msg import CameraInfo, Image, PointCloud2, PointField
from std_msgs.msg import Header

_BRIDGE = CvBridge()


def pose_message(pose: Pose) -> PoseMessage:
    x, y, z = pose.T_map_body[:3, 3].tolist()
    return PoseMessage(position=Point(x=x, y=y, z=z), orientation=_quaternion(pose))


def pose_stamped(header: Header, pose: Pose) -> PoseStamped:
    return PoseStamped(header=header, pose=pose_message(pose))


def transform(header: Header, child_frame_id: str, pose: Pose) -> TransformStamped:
    """Return the transform from `child_frame_id` to the header's frame."""
    message = TransformStamped(header=header, child_frame_id=child_frame_id)
    x, y, z = pose.T_map_body[:3, 3].tolist()
    message.transform.translation = Vector3(x=x, y=y, z=z)
    message.transform.rotation = _quaternion(pose)
    return message


def odometry(header: Header, child_frame_id: str, pose: Pose, covariance: np.ndarray) -> Odometry:
    """
    Return the pose with its covariance (6, 6) as odometry.

    The twist is not estimated: its variances are UNKNOWN_VARIANCE.
    """
    message = Odometry(header=header, child_frame_id=child_frame_id)
    message.pose.pose = pose_message(pose)
    message.pose.covariance = covariance.ravel()
    message.twist.covariance = np.diag(np.full(6, UNKNOWN_VARIANCE)).ravel()
    return message


def path(header: Header, poses: Iterable[PoseStamped]) -> Path:
    return Path(header=header, poses=list(poses))


def cloud(header: Header, points: np.ndarray) -> PointCloud2:
    """Return points (N,) POINT_DTYPE as an unorganized cloud; N may be 0."""
    message = PointCloud2(
        header=header,
        height=1,
        width=len(points),
        is_bigendian=False,
        is_dense=True,
        point_step=points.itemsize,
        row_step=points.nbytes,
    )
    message.fields = [
        # PCL and RViz expect packed colours in a float field named rgb.
        PointField(
            name=name, offset=points.dtype.fields[name][1], datatype=PointField.FLOAT32, count=1
        )
        for name in points.dtype.names
    ]
    # Fill in place: setting the property copies, or even checks each byte, which takes seconds.
    message.data.frombytes(np.ascontiguousarray(points).view(np.uint8).data)
    return message


def float_image(header: Header, values: np.ndarray) -> Image:
    """Return an array (H, W) float32 as a 32FC1 image."""
    return _BRIDGE.cv2_to_imgmsg(np.ascontiguousarray(values, np.float32), '32FC1', header)


def camera_info(header: Header, K: np.ndarray, size: tuple[int, int]) -> CameraInfo:
    """Return the intrinsics (3, 3) [px] of an undistorted camera of `size` (width, height)."""
    message = CameraInfo(header=header, width=size[0], height=size[1])
    message.distortion_model = 'plumb_bob'
    message.d = [0.0] * 5
    message.k = K.ravel()
    message.r = np.eye(3).ravel()
    message.p = np.column_stack((K, np.zeros(3))).ravel()
    return message


def _quaternion(pose: Pose) -> Quaternion:
    x, y, z, w = pose.q_xyzw.tolist()
    return Quaternion(x=x, y=y, z=z, w=w)
