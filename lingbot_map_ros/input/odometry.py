"""Receive the robot's odometry, and interpolate its pose at a time."""

from __future__ import annotations

from bisect import bisect_left
import threading

from lingbot_map.mapping.map_frame import rotation_matrix
from lingbot_map_ros.frame import to_ns
from nav_msgs.msg import Odometry
import numpy as np
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.qos_overriding_options import QoSOverridingOptions

TOPIC = 'odom'
_DEPTH = 50
_KEPT_NS = 60_000_000_000
_JUMP_NS = 1_000_000_000  # stamps that go back by more start a new run (bag restarted)
_MAX_COORDINATE = 1e12  # [m]; anything larger is not a position
_MAX_GAP_NS = 500_000_000  # between two messages for interpolation


class OdometryInput:
    """Keeps the odometry of the last minute. Thread-safe."""

    def __init__(self, node):
        self._node = node
        self._lock = threading.Lock()
        self.child_frame = ''
        self._stamps_ns: list[int] = []
        self._rows: list[np.ndarray] = []  # position, quaternion xyzw
        self._subscription = node.create_subscription(
            Odometry,
            TOPIC,
            self.receive,
            QoSProfile(depth=_DEPTH, reliability=ReliabilityPolicy.BEST_EFFORT),
            callback_group=MutuallyExclusiveCallbackGroup(),
            qos_overriding_options=QoSOverridingOptions.with_default_policies(),
        )
        self.topic = self._subscription.topic_name

    def close(self) -> None:
        self._node.destroy_subscription(self._subscription)

    @property
    def newest_ns(self) -> int:
        """Stamp of the newest message [ns]; 0 if there is none."""
        with self._lock:
            return self._stamps_ns[-1] if self._stamps_ns else 0

    def receive(self, message: Odometry) -> None:
        """
        Store a message with a valid pose.

        A message that is at most 1 s older than the newest is ignored; an older one means that
        time has jumped back, and clears the previous messages.
        """
        stamp_ns = to_ns(message.header.stamp)
        p, q = message.pose.pose.position, message.pose.pose.orientation
        row = np.array([p.x, p.y, p.z, q.x, q.y, q.z, q.w])
        if not np.abs(row).max() < _MAX_COORDINATE or not row[3:].any():  # also false for NaN
            return
        with self._lock:
            if self._stamps_ns and stamp_ns <= self._stamps_ns[-1]:
                if self._stamps_ns[-1] - stamp_ns <= _JUMP_NS:
                    return
                self._stamps_ns, self._rows = [], []
            self.child_frame = message.child_frame_id.lstrip('/')
            self._stamps_ns.append(stamp_ns)
            self._rows.append(row)
            outdated = bisect_left(self._stamps_ns, stamp_ns - _KEPT_NS)
            if outdated > len(self._rows) // 2:  # rarely, since it moves the rest
                del self._stamps_ns[:outdated], self._rows[:outdated]

    def at(self, stamp_ns: int) -> np.ndarray | None:
        """Interpolate T_odom_base (4, 4); None outside of the messages or in a gap over 0.5 s."""
        with self._lock:
            i = bisect_left(self._stamps_ns, stamp_ns)
            if i == len(self._stamps_ns) or (i == 0 and self._stamps_ns[0] != stamp_ns):
                return None
            if self._stamps_ns[i] == stamp_ns:
                return _matrix(self._rows[i])
            begin_ns, end_ns = self._stamps_ns[i - 1], self._stamps_ns[i]
            before, after = self._rows[i - 1], self._rows[i]
        if end_ns - begin_ns > _MAX_GAP_NS:
            return None
        after = after.copy()
        after[3:] *= np.copysign(1.0, before[3:] @ after[3:])
        ratio = (stamp_ns - begin_ns) / (end_ns - begin_ns)
        return _matrix((1 - ratio) * before + ratio * after)


def _matrix(row: np.ndarray) -> np.ndarray:
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = rotation_matrix(row[3:]), row[:3]
    return T
