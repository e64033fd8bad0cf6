"""The poses of a map: all of them for saving, the newest ones for ~/path."""

from __future__ import annotations

from array import array
from collections import deque

from geometry_msgs.msg import Point, PoseStamped
from geometry_msgs.msg import Pose as PoseMessage
from lingbot_map.mapping.map_frame import Pose
from lingbot_map_ros.frame import to_ns
import numpy as np


class Trajectory:
    """Stores all camera poses, 104 bytes each, and the newest `max_size` as messages."""

    def __init__(self, max_size: int):
        self.newest: deque[PoseStamped] = deque(maxlen=max_size)
        self._stamps_ns = array('q')
        self._rows = array('d')  # the upper three rows of each T_map_cam

    def __len__(self) -> int:
        return len(self._stamps_ns)

    def append(self, message: PoseStamped, pose: Pose) -> None:
        self.newest.append(message)
        self._stamps_ns.append(to_ns(message.header.stamp))
        self._rows.frombytes(pose.T_map_body[:3].tobytes())

    def rescale(self, ratio: float, origin: np.ndarray) -> None:
        """Scale the camera positions by `ratio` about the point `origin` (3,)."""
        rows = np.array(self._rows).reshape(-1, 3, 4)
        moves = (ratio - 1) * (rows[:, :, 3] - origin)
        rows[:, :, 3] += moves
        self._rows = array('d', rows.tobytes())
        moves = moves[len(moves) - len(self.newest) :]
        # The body of the messages (camera or robot) moves by as much as the camera; its rotation
        # is unchanged. New messages, since the publisher thread may be using the old ones.
        moved = [_moved(message, move) for message, move in zip(self.newest, moves, strict=True)]
        self.newest = deque(moved, self.newest.maxlen)

    def export(self) -> tuple[list[int], list[np.ndarray]]:
        """Return stamps [ns] and poses (4, 4) of all frames."""
        T = np.tile(np.eye(4), (len(self), 1, 1))
        T[:, :3] = np.array(self._rows).reshape(-1, 3, 4)
        return list(self._stamps_ns), list(T)


def _moved(message: PoseStamped, move: np.ndarray) -> PoseStamped:
    p = message.pose.position
    x, y, z = (np.array([p.x, p.y, p.z]) + move).tolist()
    pose = PoseMessage(position=Point(x=x, y=y, z=z), orientation=message.pose.orientation)
    return PoseStamped(header=message.header, pose=pose)
