"""All publishers: the worker publishes poses at once, the publisher thread all other outputs."""

from __future__ import annotations

from dataclasses import dataclass
import threading
import time

from builtin_interfaces.msg import Time
from geometry_msgs.msg import PoseStamped
from lingbot_map.mapping.map_frame import MappedFrame
from lingbot_map.mapping.map_store import MapStore
from lingbot_map.mapping.points import PointFilter
from lingbot_map.mapping.pose_quality import pose_covariance, Scene
from lingbot_map_ros.frame import Dropped, Frame, INACTIVE, RESET
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

# The poses of a scale batch are published at once and must fit, even with a slow reader.
_POSE_DEPTH = 100
_CLOUD_DEPTH = 5


@dataclass(frozen=True)
class DepthOutput:
    """Depth in map units and confidence, each if subscribed, and their intrinsics [px]."""

    size: tuple[int, int]  # width, height
    K: np.ndarray  # (3, 3)
    depth: np.ndarray | None  # (height, width)
    confidence: np.ndarray | None  # (height, width)


class PublishedMap:
    """
    Path and points of one map, guarded by `lock`.

    A thread that needs the lock of Outputs too must take that one first.
    """

    def __init__(self, number: int, params: NodeParams):
        self.number = number
        self.started_s = time.monotonic()
        self.lock = threading.Lock()
        self.trajectory = Trajectory(params.path.max_size)
        self.points = MapStore(params.map.voxel_size, params.map.max_points)
        self.points_stamp = Time()  # of the newest image whose points are in the map
        # An empty map is only published to replace an earlier one.
        self.path_changed = self.points_changed = number > 0

    def insert(self, stamp: Time, points: np.ndarray) -> None:
        """Add points (N,) POINT_DTYPE of the image with this stamp."""
        with self.lock:
            self.points.insert(points)
            self.points_stamp, self.points_changed = stamp, True

    def rescale(self, ratio: float, origin: np.ndarray) -> None:
        """Scale path and points by `ratio` about the point `origin` (3,)."""
        with self.lock:
            self.trajectory.rescale(ratio, origin)
            self.points.rescale(ratio, origin)
            self.path_changed = self.points_changed = True


class Outputs:
    """
    All publishers, from configure to cleanup.

    `current` is the map that is published; it changes under `lock`. All messages of a map are
    published under `lock` and only if it is still `current`, so none of an old map follow a reset.
    """

    def __init__(self, node, params: NodeParams, tree: FrameTree, first: PublishedMap):
        self.params = params
        self.lock = threading.RLock()
        self.active = False
        self.current = first
        self._path_sent = self._map_sent = False
        self._node, self._tree = node, tree
        self._create_publishers()
        self._thread = PublisherThread(
            params.queue == 'lossless', node.get_logger(), lambda: self.connected
        )
        self._thread.repeat(lambda: self.params.path.publish_rate, self._publish_path)
        self._thread.repeat(lambda: self.params.map.publish_rate, self._publish_map)
        self._thread.start()

    def _create_publishers(self) -> None:
        self._publishers = []
        self.transform = create_transform(self._node, self._tree, self.params, self)
        self._odometry_pub = self._publisher(Odometry, '~/odometry', _POSE_DEPTH)
        self._pose_pub = self._publisher(PoseStamped, '~/pose', _POSE_DEPTH)
        self._processed_pub = self._publisher(Header, '~/processed', _POSE_DEPTH)
        self._path_pub = self._publisher(Path, '~/path', _latched())
        self._map_pub = self._publisher(PointCloud2, '~/map', _latched())
        depth = _CLOUD_DEPTH
        if self.params.queue == 'lossless':  # all clouds of a scale batch must arrive
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
        """Whether ROS is running; the process may shut it down before the node is closed."""
        return self._node.context.ok()

    @property
    def errors(self) -> int:
        """Number of failures to publish a cloud, path, map or depth image."""
        return self._thread.errors

    def stop_thread(self, timeout_s: float) -> None:
        self._thread.stop(timeout_s)

    def destroy(self) -> None:
        for publisher in self._publishers:
            self._node.destroy_publisher(publisher)
        if self.transform is not None:
            self.transform.close()

    def acknowledge(self, header: Header) -> None:
        """Publish on ~/processed that the image with this header was processed or dropped."""
        try:
            self._processed_pub.publish(header)
        except rclpy_implementation.RCLError:
            if self.connected:
                raise

    def rescale(self, published: PublishedMap, ratio: float, origin: np.ndarray) -> None:
        """Scale path and points of a map, which a reset may have replaced, about `origin` (3,)."""
        self._thread.drain()  # queued clouds have the old scale
        published.rescale(ratio, origin)

    def publish_pose(self, frame: Frame, placement: Placement, scene: Scene) -> None:
        """
        Publish TF, odometry and pose.

        :raises Dropped: the frame belongs to an old map, or the node is inactive.
        """
        header = frame.header(self.params.map_frame)
        odometry = conversions.odometry(
            header, placement.body_frame, placement.body, pose_covariance(scene)
        )
        stamped = conversions.pose_stamped(header, placement.body)
        with self.lock:
            if frame.session is not self.current:
                raise Dropped(RESET)
            if not self.active:
                raise Dropped(INACTIVE)
            if self.transform is not None:
                self.transform.send(frame, placement)
            self._odometry_pub.publish(odometry)
            self._pose_pub.publish(stamped)
            with self.current.lock:
                self.current.trajectory.append(stamped, placement.frame.camera)
                self.current.path_changed = True

    def publish_dense(self, frame: Frame, mapped: MappedFrame) -> None:
        """Copy points and depth to the host if they are subscribed or mapped, and queue them."""
        wants_points = self._wants_points(mapped.is_keyframe)
        wants_map = mapped.is_keyframe and self.params.map.voxel_size > 0
        if wants_points or wants_map:
            points = self._point_filter()(mapped)
            if wants_points:
                self.hand_points(frame, points)
            if wants_map:
                self.hand_map(frame, points)
        self._publish_depth_if_wanted(frame, mapped)

    def _point_filter(self) -> PointFilter:
        params = self.params.points
        return PointFilter(
            params.min_confidence,
            params.max_depth,
            params.stride,
            params.keep_percentile,
            params.edge_threshold,
        )

    def _publish_depth_if_wanted(self, frame: Frame, mapped: MappedFrame) -> None:
        depth = confidence = None
        if self._depth_pub.get_subscription_count() > 0:
            depth = mapped.depth.cpu().numpy()
        if self._confidence_pub.get_subscription_count() > 0:
            confidence = mapped.confidence.cpu().numpy()
        info_wanted = self._depth_info_pub.get_subscription_count() > 0
        if depth is not None or confidence is not None or info_wanted:
            size = tuple(mapped.depth.shape[::-1])
            self.hand_depth(frame, DepthOutput(size, mapped.network_intrinsics, depth, confidence))

    def _wants_points(self, is_keyframe: bool) -> bool:
        return (
            is_keyframe or self.params.points.every_frame
        ) and self._points_pub.get_subscription_count() > 0

    def hand_points(self, frame: Frame, points: np.ndarray) -> None:
        """Queue points (N,) in the map frame as the cloud of the frame."""
        self._thread.hand(
            'points',
            lambda: self._send(
                self._points_pub,
                frame.session,
                conversions.cloud(frame.header(self.params.map_frame), points),
            ),
        )

    def hand_map(self, frame: Frame, points: np.ndarray) -> None:
        """Queue points (N,) in the map frame for the map of the frame."""
        self._thread.hand('map', lambda: frame.session.insert(frame.stamp, points))

    def hand_depth(self, frame: Frame, output: DepthOutput) -> None:
        self._thread.hand('depth', lambda: self._publish_depth(frame, output))

    def flush(self) -> None:
        """Publish all queued outputs, then path and map (latched for later subscribers)."""
        self._thread.hand('flush path', lambda: self._publish_path(always=True))
        self._thread.hand('flush map', lambda: self._publish_map(always=True))
        self._thread.drain()

    def _send(self, publisher, of_map: PublishedMap, message) -> bool:
        """Publish a message of a map if it is current and the node active; return whether."""
        data = serialize_message(message)  # slow, so not under the lock
        with self.lock:
            is_wanted = of_map is self.current and self.active
            if is_wanted:
                publisher.publish(data)
        return is_wanted

    def _publish_depth(self, frame: Frame, output: DepthOutput) -> None:
        header = frame.header(frame.frame_id)
        for publisher, values in (
            (self._depth_pub, output.depth),
            (self._confidence_pub, output.confidence),
        ):
            if values is not None:
                self._send(publisher, frame.session, conversions.float_image(header, values))
        info = conversions.camera_info(header, output.K, output.size)
        self._send(self._depth_info_pub, frame.session, info)

    def _publish_path(self, always: bool = False) -> None:
        published = self.current
        with published.lock:
            poses = list(published.trajectory.newest)
            # After a reset the empty path replaces the latched path of the old map.
            wanted = (
                always
                or self._path_pub.get_subscription_count() > 0
                or (self._path_sent and not poses)
            )
            if not (wanted and self.active and (always or published.path_changed)):
                return
            published.path_changed, self._path_sent = False, True
        header = Header(frame_id=self.params.map_frame)
        if poses:
            header.stamp = poses[-1].header.stamp
        if not self._send(self._path_pub, published, conversions.path(header, poses)):
            published.path_changed = True  # deactivated meanwhile: publish it once active again

    def _publish_map(self, always: bool = False) -> None:
        published = self.current
        with published.lock:
            wanted = (
                always
                or self._map_pub.get_subscription_count() > 0
                or (self._map_sent and not len(published.points))
            )
            if not (wanted and self.active and (always or published.points_changed)):
                return
            points = published.points.snapshot()
            published.points_changed, self._map_sent = False, True
        header = Header(frame_id=self.params.map_frame)
        if len(points):
            header.stamp = published.points_stamp
        if not self._send(self._map_pub, published, conversions.cloud(header, points)):
            published.points_changed = True


def _latched() -> QoSProfile:
    """Return a new profile for each publisher, since rclpy writes QoS overrides into it."""
    return QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
