"""From the network's world to the map frame: REP-103 axes, level with the first camera."""

from dataclasses import dataclass

from lingbot_map.geometry import invert, matrix_to_quaternion, R_REP103_OPTICAL
import numpy as np
import torch


@dataclass(frozen=True)
class Pose:
    """Pose of a camera's optical frame in the map frame."""

    T_map_cam: np.ndarray  # (4, 4) float64, map units
    q_xyzw: np.ndarray  # (4,) float64, unit length, the rotation of T_map_cam


class MapFrame:
    """
    Places the network's poses of one map.

    The first camera is the origin, x is where it looks, y its left, z its up; `scale` is map units
    per network unit. That up is the camera's, not gravity's. For a camera mounted sideways
    `R_upright_cam` (3, 3) leads from its optical axes to those of an upright one there.
    """

    def __init__(self, scale: float, R_upright_cam: np.ndarray | None = None):
        self._scale = scale
        self._T_map_first = np.eye(4)
        self._T_map_first[:3, :3] = R_REP103_OPTICAL
        if R_upright_cam is not None:
            self._T_map_first[:3, :3] = R_REP103_OPTICAL @ R_upright_cam
        self._T_map_world: np.ndarray | None = None
        self._previous_q = np.array([0.0, 0.0, 0.0, 1.0])

    def place(self, T_world_cam: np.ndarray) -> Pose:
        """
        Return the pose of a camera-to-world transform (4, 4) in optical axes.

        FloatingPointError: the transform holds NaN or infinity; it changes nothing here.
        """
        if not np.isfinite(T_world_cam).all():
            raise FloatingPointError('the pose holds NaN or infinity')
        if self._T_map_world is None:
            self._T_map_world = self._T_map_first @ invert(T_world_cam)
        T_map_cam = self._T_map_world @ T_world_cam
        T_map_cam[:3, 3] *= self._scale
        q_xyzw = unit_quaternion(T_map_cam[:3, :3])
        if q_xyzw @ self._previous_q < 0:  # q and -q are one rotation: take the one nearby
            q_xyzw = -q_xyzw
        self._previous_q = q_xyzw
        return Pose(T_map_cam, q_xyzw)


def unit_quaternion(R: np.ndarray) -> np.ndarray:
    """Return the unit quaternion xyzw (4,) of a rotation (3, 3), also of one a little off."""
    q_xyzw = matrix_to_quaternion(torch.from_numpy(np.array(R, np.float64))).numpy()
    return q_xyzw / np.linalg.norm(q_xyzw)
