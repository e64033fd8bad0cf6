"""Publishes a recording and collects the node's output."""

from __future__ import annotations

from array import array
import threading
import time

from diagnostic_msgs.msg import DiagnosticArray
from lingbot_map.errors import UserError
from lingbot_map.geometry import quaternion_to_matrix, rigid
from lingbot_map.mapping.points import POINT_DTYPE
from lingbot_map_ros.frame import to_ns, to_stamp
from lingbot_map_ros.node import LingbotMapNode
from lingbot_map_ros.output.frames import FrameTree, NoTransform
from nav_msgs.msg import Odometry, Path
import numpy as np
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from rosgraph_msgs.msg import Clock as ClockMessage
from sensor_msgs.msg import Image, PointCloud2
from std_msgs.msg import Header
from std_srvs.srv import Trigger
from tf2_msgs.msg import TFMessage
import torch

_DEPTH = 100
_LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
_POLL_S = 0.2
_CLOCK_PERIOD_S = 0.025  # of /clock, as in ros2 bag play
_LAST_POSES_S = 5.0  # for poses in transit when the node has finished


class PlayerError(UserError):
    """The replay cannot continue; the text is one line with the reason."""


class Player(Node):
    """
    Publishes images for the node `target` and collects its outputs, all over DDS.

    Needs its own executor. `sent` and `received` map stamps [ns] of images and of their odometry
    to time.monotonic().
    """

    def __init__(self, target: LingbotMapNode, frame_id: str):
        # Remappings on the command line (such as __node) are for the target.
        super().__init__('lingbot_map_player', use_global_arguments=False)
        self.sent: dict[int, float] = {}
        self.received: dict[int, float] = {}
        self.transforms: set[int] = set()  # stamps of transforms from the map
        self.clouds = self.cloud_points = self.path_poses = 0
        self.node_counts: dict[str, int] = {}  # images_* and dropped.*, from /diagnostics
        self._target = target
        self._frame_id = frame_id
        self._rows: dict[int, list[float]] = {}  # stamp -> position, quaternion xyzw
        self._bodies: dict[int, str] = {}  # stamp -> child frame id of odometry
        self._map_frame = target.get_parameter('map_frame').value
        self._is_rescaled = target.get_parameter('scale_source').value == 'odometry'
        self._tree = FrameTree(self, self._map_frame, only_static=True)
        self._acknowledged: set[int] = set()
        self._changed = threading.Condition()
        topic = target.resolve_topic_name
        self._image_pub = self.create_publisher(Image, topic('image'), _DEPTH)
        for kind, name, callback, qos in (
            (Odometry, '~/odometry', self._on_odometry, _DEPTH),
            (Header, '~/processed', self._on_processed, _DEPTH),
            (TFMessage, '/tf', self._on_tf, _DEPTH),
            (PointCloud2, '~/points', self._on_points, _DEPTH),
            (Path, '~/path', self._on_path, _LATCHED),
            (DiagnosticArray, '/diagnostics', self._on_diagnostics, _DEPTH),
        ):
            self.create_subscription(kind, topic(name), callback, qos)
        self._flush_client = self.create_client(Trigger, target.resolve_service_name('~/flush'))

    def check_alone(self) -> None:
        """Raise PlayerError if another process publishes images or odometry."""
        for name in ('image', '~/odometry'):
            topic = self._target.resolve_topic_name(name)
            if self.count_publishers(topic) > 1:
                raise PlayerError(
                    f'another process publishes on {topic}: set another '
                    'ROS_DOMAIN_ID, or remap with --ros-args -r __ns:=/replay'
                )

    def wait_for_node(self) -> None:
        """Wait until player and node are connected; earlier messages can be lost."""
        topic = self._target.resolve_topic_name
        outputs = [topic(name) for name in ('~/odometry', '~/processed')]
        self._wait(
            lambda: (
                self._image_pub.get_subscription_count()
                and self._target.count_publishers(topic('image'))
                and all(self.count_publishers(name) for name in outputs)
                and all(self._target.count_subscribers(name) for name in outputs)
            )
        )

    def send(self, stamp_ns: int, rgb: np.ndarray) -> None:
        """Publish an image (H, W, 3) uint8 as rgb8."""
        height, width = rgb.shape[:2]
        message = Image(
            header=Header(stamp=to_stamp(stamp_ns), frame_id=self._frame_id),
            height=height,
            width=width,
            encoding='rgb8',
            step=3 * width,
        )
        data = array('B')  # the setter checks each byte of other types
        data.frombytes(np.ascontiguousarray(rgb).data)
        message.data = data
        self.sent[stamp_ns] = time.monotonic()
        self._image_pub.publish(message)

    def start_clock(self, now_ns: int, rate: float) -> None:
        """Publish /clock from now on, starting at `now_ns` with `rate` times real time."""
        publisher = self.create_publisher(ClockMessage, '/clock', _DEPTH)
        start_s = time.monotonic()

        def tick() -> None:
            elapsed_ns = round((time.monotonic() - start_s) * rate * 1e9)
            publisher.publish(ClockMessage(clock=to_stamp(now_ns + elapsed_ns)))

        # A steady clock: the timer must not depend on the time that it publishes.
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self.create_timer(_CLOCK_PERIOD_S, tick, clock=steady)

    def wait_for_processed(self, in_flight: int) -> None:
        """Wait until at most `in_flight` images are not processed."""
        self._wait(lambda: len(self.sent) - len(self._acknowledged) <= in_flight)

    def flush(self) -> None:
        """Make the node process all waiting images, and wait for all its outputs."""
        answered = self._flush_client.call_async(Trigger.Request())
        answered.add_done_callback(lambda _: self._notify())
        self._wait(answered.done)
        if not answered.result().success:
            raise PlayerError(f'flush failed: {answered.result().message}')
        self.node_counts = {}  # later diagnostics include the flushed images
        self._wait(lambda: self.node_counts.get('images_waiting') == 0)
        with self._changed:
            self._changed.wait_for(
                lambda: len(self.received) >= self.node_counts['images_out'], _LAST_POSES_S
            )

    def read_map(self) -> np.ndarray:
        """Return the last published map of the node, points (N,) POINT_DTYPE."""
        clouds = []
        self.create_subscription(
            PointCloud2,
            self._target.resolve_topic_name('~/map'),
            lambda message: (clouds.append(message), self._notify()),
            _LATCHED,
        )
        self._wait(lambda: clouds)
        return np.frombuffer(clouds[0].data, POINT_DTYPE)

    def trajectory(self) -> tuple[list[int], np.ndarray]:
        """
        Return ascending stamps [ns] and T_map_cam (N, 4, 4) of all received poses.

        Raises PlayerError if the extrinsics of the camera are unknown.
        """
        stamps = sorted(self._rows)
        rows = torch.tensor([self._rows[stamp] for stamp in stamps], dtype=torch.float64)
        rows = rows.reshape(-1, 7)
        T_map_body = rigid(quaternion_to_matrix(rows[:, 3:]), rows[:, :3]).numpy()
        extrinsics = {body: self._extrinsics(body) for body in set(self._bodies.values())}
        T_body_cam = [extrinsics[self._bodies[stamp]] for stamp in stamps]
        T_map_cam = T_map_body @ np.array(T_body_cam).reshape(-1, 4, 4)
        if self._is_rescaled:  # poses before the scale was found have another unit
            trajectory = self._target.pipeline.outputs.current.trajectory
            kept = dict(zip(*trajectory.export(), strict=True))
            T_map_cam = np.array([kept.get(s, T) for s, T in zip(stamps, T_map_cam, strict=True)])
        return stamps, T_map_cam.reshape(-1, 4, 4)

    def _extrinsics(self, body: str) -> np.ndarray:
        """Return T_body_cam (4, 4); in some tf modes odometry is that of the robot."""
        if body == self._frame_id:
            return np.eye(4)
        try:
            return self._tree.extrinsics(body, self._frame_id)
        except NoTransform as error:
            raise PlayerError(f'the trajectory of the camera is unknown: {error}') from error

    def _wait(self, is_done) -> None:
        with self._changed:
            while not self._changed.wait_for(is_done, _POLL_S):
                if self._target.leaving.is_set():
                    raise PlayerError('the node has given up, see its log')

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _on_processed(self, header: Header) -> None:
        with self._changed:
            self._acknowledged.add(to_ns(header.stamp))
            self._changed.notify_all()

    def _on_odometry(self, message: Odometry) -> None:
        stamp_ns = to_ns(message.header.stamp)
        p, q = message.pose.pose.position, message.pose.pose.orientation
        with self._changed:
            self.received[stamp_ns] = time.monotonic()
            self._rows[stamp_ns] = [p.x, p.y, p.z, q.x, q.y, q.z, q.w]
            self._bodies[stamp_ns] = message.child_frame_id
            self._changed.notify_all()

    def _on_tf(self, message: TFMessage) -> None:
        self.transforms |= {
            to_ns(transform.header.stamp)
            for transform in message.transforms
            if transform.header.frame_id == self._map_frame
        }

    def _on_points(self, message: PointCloud2) -> None:
        self.clouds += 1
        self.cloud_points += message.width * message.height

    def _on_path(self, message: Path) -> None:
        self.path_poses = len(message.poses)

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        name = self._target.get_fully_qualified_name().lstrip('/')
        for status in message.status:
            if status.name == name:
                with self._changed:
                    self.node_counts = {
                        pair.key: int(pair.value)
                        for pair in status.values
                        if pair.key.startswith(('images_', 'dropped.'))
                    }
                    self._changed.notify_all()
