"""Transform network results to the map frame: map units and REP-103 axes."""

from dataclasses import dataclass

from lingbot_map.geometry import (
    invert,
    matrix_to_quaternion,
    quaternion_to_matrix,
    R_REP103_OPTICAL,
)
from lingbot_map.streaming.frame import FrameResult
import numpy as np
import torch


@dataclass(frozen=True)
class Pose:
    """Pose in the map frame of a body: the camera's optical frame, or the robot's base frame."""

    T_map_body: np.ndarray  # (4, 4) float64, map units
    q_xyzw: np.ndarray  # (4,) float64, unit length, the rotation of T_map_body


@dataclass(frozen=True, eq=False)
class MappedFrame:
    """The results for one image in map units; tensors are on the engine's device."""

    tag: object  # passed by the caller with the image
    is_keyframe: bool
    camera: Pose  # of the camera's optical frame
    intrinsics: np.ndarray  # (3, 3) float64, pixels of the original image
    network_intrinsics: np.ndarray  # (3, 3) float64, pixels of depth, confidence and rgb
    depth: torch.Tensor  # (h, w) float32 z-depth
    confidence: torch.Tensor  # (h, w) float32, at least 1
    rgb: torch.Tensor  # (h, w, 3) uint8


class ContinuousPoses:
    """Converts the poses of one body, with quaternions whose sign does not jump."""

    def __init__(self):
        self._previous_q = np.array([0.0, 0.0, 0.0, 1.0])

    def pose(self, T_map_body: np.ndarray) -> Pose:
        q_xyzw = unit_quaternion(T_map_body[:3, :3])
        if q_xyzw @ self._previous_q < 0:  # q and -q are the same rotation: take the nearer one
            q_xyzw = -q_xyzw
        self._previous_q = q_xyzw
        return Pose(T_map_body, q_xyzw)


class MapFrame:
    """
    Transforms the network's results of one map. Scale and map frame are applied only here.

    `T_map_first` (4, 4) is the pose of the first camera. By default the camera is at the origin,
    with x forward, y left and z up (REP-103); up is the camera's, not that of gravity. If the
    camera is mounted sideways, `R_upright_cam` (3, 3) rotates its optical axes to upright ones.
    `scale` is in map units per network unit.
    """

    def __init__(
        self,
        scale: float,
        R_upright_cam: np.ndarray | None = None,
        T_map_first: np.ndarray | None = None,
    ):
        self.scale = scale
        if T_map_first is None:
            T_map_first = np.eye(4)
            T_map_first[:3, :3] = R_REP103_OPTICAL
            if R_upright_cam is not None:
                T_map_first[:3, :3] = R_REP103_OPTICAL @ R_upright_cam
        self._T_map_first = T_map_first
        self._T_first_world: np.ndarray | None = None
        self._track = ContinuousPoses()

    @property
    def origin(self) -> np.ndarray:
        """The position (3,) of the first camera, fixed under a change of scale."""
        return self._T_map_first[:3, 3]

    def place(self, result: FrameResult) -> MappedFrame:
        """
        Return a result of the network in map units.

        :raises FloatingPointError: pose or intrinsics are not finite.
        """
        if not np.isfinite(result.network_intrinsics).all():
            raise FloatingPointError('the intrinsics contain NaN or infinity')
        return MappedFrame(
            result.tag,
            result.is_keyframe,
            self.pose(result.T_world_cam),
            result.intrinsics,
            result.network_intrinsics,
            result.depth if self.scale == 1.0 else result.depth * self.scale,
            result.confidence,
            result.rgb,
        )

    def pose(self, T_world_cam: np.ndarray) -> Pose:
        """
        Return the pose of a camera-to-world transform (4, 4) in optical axes.

        :raises FloatingPointError: the transform contains NaN or infinity.
        """
        if not np.isfinite(T_world_cam).all():
            raise FloatingPointError('the pose contains NaN or infinity')
        T_world_cam = _orthonormal(T_world_cam)
        if self._T_first_world is None:
            self._T_first_world = invert(T_world_cam)
        T_first_cam = self._T_first_world @ T_world_cam
        T_first_cam[:3, 3] *= self.scale
        return self._track.pose(self._T_map_first @ T_first_cam)


def unit_quaternion(R: np.ndarray) -> np.ndarray:
    """Return the unit quaternion xyzw (4,) of a rotation (3, 3), even if slightly inexact."""
    q_xyzw = matrix_to_quaternion(torch.from_numpy(np.array(R, np.float64))).numpy()
    return q_xyzw / np.linalg.norm(q_xyzw)


def rotation_matrix(q_xyzw: np.ndarray) -> np.ndarray:
    """Return the rotation (3, 3) of a quaternion xyzw (4,) of any length."""
    return quaternion_to_matrix(torch.from_numpy(np.array(q_xyzw, np.float64))).numpy()


def _orthonormal(T: np.ndarray) -> np.ndarray:
    """Return a transform (4, 4) with an exact rotation; half precision makes it inexact."""
    T = np.array(T, np.float64)
    T[:3, :3] = rotation_matrix(unit_quaternion(T[:3, :3]))
    return T
