"""Where the robot was, by its own odometry."""

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
_JUMP_NS = 1_000_000_000  # stamps that go back by more are of another pass
_ANYWHERE = 1e12  # m; no robot is further away
_MAX_GAP_NS = 500_000_000  # between two messages that are interpolated


class OdometryInput:
    """Keeps what came on `odom` in the last minute; usable from any thread."""

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
        """Return the stamp of the newest message; 0: none has come."""
        with self._lock:
            return self._stamps_ns[-1] if self._stamps_ns else 0

    def receive(self, message: Odometry) -> None:
        """
        Take a message, unless it is a little older than one before, or holds no pose.

        After one that is much older, a new pass has begun.
        """
        stamp_ns = to_ns(message.header.stamp)
        p, q = message.pose.pose.position, message.pose.pose.orientation
        row = np.array([p.x, p.y, p.z, q.x, q.y, q.z, q.w])
        if not np.abs(row).max() < _ANYWHERE or not row[3:].any():  # also false for NaN
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
            if outdated > len(self._rows) // 2:  # seldom: it moves all that stay
                del self._stamps_ns[:outdated], self._rows[:outdated]

    def at(self, stamp_ns: int) -> np.ndarray | None:
        """Return T_odom_base (4, 4) at a time between two messages, or None."""
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
