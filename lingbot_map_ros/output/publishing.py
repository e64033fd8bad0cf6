"""What goes out: poses at once from the worker, the rest from the publisher thread."""

from __future__ import annotations

from dataclasses import dataclass
import threading

from builtin_interfaces.msg import Time
from geometry_msgs.msg import PoseStamped
from lingbot_map.mapping.map_store import MapStore
from lingbot_map_ros.frame import Dropped, Frame, INACTIVE, RESET
from lingbot_map_ros.input.odometry import OdometryInput
from lingbot_map_ros.output import conversions
from lingbot_map_ros.output.frames import FrameTree
from lingbot_map_ros.output.placing import Placement
from lingbot_map_ros.output.publisher_thread import PublisherThread
from lingbot_map_ros.output.tf_modes import create_transform
from lingbot_map_ros.output.trajectory import Trajectory
from lingbot_map_ros.parameters import NodeParams
from nav_msgs.msg import Odometry, Path
import numpy as np
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.qos import DurabilityPolicy, QoSProfile
from rclpy.qos_overriding_options import QoSOverridingOptions
from rclpy.serialization import serialize_message
from sensor_msgs.msg import CameraInfo, Image, PointCloud2
from std_msgs.msg import Header

# A scale batch comes out at once: its poses must fit, also for a reader that is slow for a moment.
_POSE_DEPTH = 100
_CLOUD_DEPTH = 5


@dataclass(frozen=True)
class DepthOutput:
    """Depth in map units and confidence, as far as wanted, and the intrinsics of their pixels."""

    size: tuple[int, int]  # width, height
    K: np.ndarray  # (3, 3)
    depth: np.ndarray | None  # (height, width)
    confidence: np.ndarray | None  # (height, width)


class Outputs:
    """
    All publishers, from configure to cleanup.

    `epoch` numbers the maps. Every publication is made under `lock` after comparing the epoch of
    its frame, so nothing of an old map is sent once `start_new_map` has returned.
    """

    def __init__(self, node, params: NodeParams):
        self.params = params
        self.lock = threading.RLock()
        self.epoch = 0
        self.active = False
        self.trajectory = Trajectory(params.path.max_size)
        self.map_lock = threading.Lock()
        self.map = MapStore(params.map.voxel_size, params.map.max_points)
        self._path_changed = self._path_sent = False
        self._map_changed = self._map_sent = False
        self._map_stamp = Time()
        self._node = node
        self.tree = FrameTree(node, params.map_frame, only_static=params.tf_mode == 'off')
        uses_odometry = params.scale_source == 'odometry'
        self.odometry_input = OdometryInput(node) if uses_odometry else None
        self._create_publishers()
        self._thread = PublisherThread(
            params.queue == 'lossless', node.get_logger(), lambda: self.connected
        )
        self._thread.repeat(lambda: self.params.path.publish_rate, self._publish_path)
        self._thread.repeat(lambda: self.params.map.publish_rate, self._publish_map)
        self._thread.start()

    def _create_publishers(self) -> None:
        self._publishers = []
        self.transform = create_transform(self._node, self.tree, self.params, self)
        self._odometry_pub = self._publisher(Odometry, '~/odometry', _POSE_DEPTH)
        self._pose_pub = self._publisher(PoseStamped, '~/pose', _POSE_DEPTH)
        self._processed_pub = self._publisher(Header, '~/processed', _POSE_DEPTH)
        self._path_pub = self._publisher(Path, '~/path', _latched())
        self._map_pub = self._publisher(PointCloud2, '~/map', _latched())
        depth = _CLOUD_DEPTH
        if self.params.queue == 'lossless':  # also the clouds of a whole scale batch arrive
            depth = max(depth, 2 * self.params.num_scale_frames)
        self._points_pub = self._publisher(PointCloud2, '~/points', depth)
        self._depth_pub = self._publisher(Image, '~/depth', depth)
        self._confidence_pub = self._publisher(Image, '~/confidence', depth)
        self._depth_info_pub = self._publisher(CameraInfo, '~/depth/camera_info', depth)

    def _publisher(self, message_type, topic: str, qos: QoSProfile | int):
        publisher = self._node.create_publisher(
            message_type,
            topic,
            qos,
            qos_overriding_options=QoSOverridingOptions.with_default_policies(),
        )
        self._publishers.append(publisher)
        return publisher

    @property
    def connected(self) -> bool:
        """Whether ROS is there; a process may shut it down around the node."""
        return self._node.context.ok()

    @property
    def errors(self) -> int:
        """How often publishing a cloud, path, map or depth has failed."""
        return self._thread.errors

    def stop_thread(self, timeout_s: float) -> None:
        self._thread.stop(timeout_s)

    def destroy(self) -> None:
        for publisher in self._publishers:
            self._node.destroy_publisher(publisher)
        if self.transform is not None:
            self.transform.close()
        if self.odometry_input is not None:
            self.odometry_input.close()
        self.tree.close()

    def start_new_map(self) -> int:
        """Forget path and map; return the number of the new epoch."""
        with self.lock, self.map_lock:  # in this order everywhere
            self.tree.forget_rivals()
            if self.transform is not None:
                self.transform.forget()
            self.epoch += 1
            self.trajectory.clear()
            self.map.clear()
            self._path_changed = self._map_changed = True
            return self.epoch

    def acknowledge(self, header: Header) -> None:
        """Say that the image with this header is finished with, whatever became of it."""
        try:
            self._processed_pub.publish(header)
        except rclpy_implementation.RCLError:
            if self.connected:
                raise

    def rescale(self, ratio: float, origin: np.ndarray) -> None:
        """Stretch path and map by `ratio`, away from the point `origin` (3,)."""
        self._thread.drain()  # what waits has the old scale
        with self.lock, self.map_lock:
            self.trajectory.rescale(ratio, origin)
            self.map.rescale(ratio, origin)
            self._path_changed = self._map_changed = True

    def publish_pose(self, frame: Frame, placement: Placement, covariance: np.ndarray) -> None:
        """
        Send TF, odometry and pose, whose covariance is (6, 6).

        Raise Dropped for an old map or an inactive node.
        """
        header = frame.header(self.params.map_frame)
        odometry = conversions.odometry(header, placement.body_frame, placement.body, covariance)
        stamped = conversions.pose_stamped(header, placement.body)
        with self.lock:
            if frame.epoch != self.epoch:
                raise Dropped(RESET)
            if not self.active:
                raise Dropped(INACTIVE)
            if self.transform is not None:
                self.transform.send(frame.stamp_ns, placement)
            self._odometry_pub.publish(odometry)
            self._pose_pub.publish(stamped)
            self.trajectory.append(stamped, placement.camera)
            self._path_changed = True

    def wants_points(self, is_keyframe: bool) -> bool:
        return (
            is_keyframe or self.params.points.every_frame
        ) and self._points_pub.get_subscription_count() > 0

    def wants_map(self, is_keyframe: bool) -> bool:
        return is_keyframe and self.params.map.voxel_size > 0

    def wants_depth(self) -> bool:
        return self._depth_pub.get_subscription_count() > 0

    def wants_confidence(self) -> bool:
        return self._confidence_pub.get_subscription_count() > 0

    def wants_depth_info(self) -> bool:
        return self._depth_info_pub.get_subscription_count() > 0

    def hand_points(self, frame: Frame, points: np.ndarray) -> None:
        """Have points (N,) in the map frame published as the frame's cloud."""
        self._thread.hand(
            'points',
            lambda: self._send(
                self._points_pub,
                frame.epoch,
                conversions.cloud(frame.header(self.params.map_frame), points),
            ),
        )

    def hand_map(self, frame: Frame, points: np.ndarray) -> None:
        """Have points (N,) in the map frame added to the map."""
        self._thread.hand('map', lambda: self._insert(frame, points))

    def hand_depth(self, frame: Frame, output: DepthOutput) -> None:
        self._thread.hand('depth', lambda: self._publish_depth(frame, output))

    def flush(self) -> None:
        """Send what waits, and the path and the map also to those who subscribe later."""
        self._thread.hand('flush path', lambda: self._publish_path(always=True))
        self._thread.hand('flush map', lambda: self._publish_map(always=True))
        self._thread.drain()

    def _send(self, publisher, epoch: int, message) -> None:
        data = serialize_message(message)  # the slow part, outside of the lock
        with self.lock:
            if epoch == self.epoch and self.active:
                publisher.publish(data)

    def _publish_depth(self, frame: Frame, output: DepthOutput) -> None:
        header = frame.header(frame.frame_id)
        for publisher, values in (
            (self._depth_pub, output.depth),
            (self._confidence_pub, output.confidence),
        ):
            if values is not None:
                self._send(publisher, frame.epoch, conversions.float_image(header, values))
        info = conversions.camera_info(header, output.K, output.size)
        self._send(self._depth_info_pub, frame.epoch, info)

    def _insert(self, frame: Frame, points: np.ndarray) -> None:
        with self.map_lock:
            if frame.epoch != self.epoch:
                return
            self.map.insert(points)
            self._map_stamp = frame.stamp
            self._map_changed = True

    def _publish_path(self, always: bool = False) -> None:
        with self.lock:
            poses = list(self.trajectory.newest)
            # An emptied path replaces the latched one, or late subscribers would see the old map.
            wanted = (
                always
                or self._path_pub.get_subscription_count() > 0
                or (self._path_sent and not poses)
            )
            if not (wanted and self.active and (always or self._path_changed)):
                return
            self._path_changed, self._path_sent, epoch = False, True, self.epoch
        header = Header(frame_id=self.params.map_frame)
        if poses:
            header.stamp = poses[-1].header.stamp
        self._send(self._path_pub, epoch, conversions.path(header, poses))

    def _publish_map(self, always: bool = False) -> None:
        with self.map_lock:
            epoch = self.epoch
            wanted = (
                always
                or self._map_pub.get_subscription_count() > 0
                or (self._map_sent and not len(self.map))
            )
            if not (wanted and self.active and (always or self._map_changed)):
                return
            points = self.map.snapshot()
            self._map_changed, self._map_sent = False, True
        header = Header(frame_id=self.params.map_frame)
        if len(points):
            header.stamp = self._map_stamp
        self._send(self._map_pub, epoch, conversions.cloud(header, points))


def _latched() -> QoSProfile:
    """Return a profile of its own for each publisher: overrides are written into it."""
    return QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
