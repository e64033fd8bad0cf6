"""Poses of the camera and the robot in the map, depending on tf_mode."""

from __future__ import annotations

from dataclasses import dataclass

from lingbot_map.geometry import invert
from lingbot_map.images.view import camera_rotation
from lingbot_map.mapping.map_frame import ContinuousPoses, MapFrame, MappedFrame, Pose
from lingbot_map.streaming.frame import FrameResult
from lingbot_map_ros.output.frames import FrameTree, NoTransform
from lingbot_map_ros.parameters import NodeParams
import numpy as np

ROBOT_MODES = ('map_to_base', 'map_to_odom')


@dataclass(frozen=True)
class Placement:
    """A frame in the map, and the pose that odometry, ~/pose and TF report for it."""

    frame: MappedFrame
    body: Pose  # the robot in ROBOT_MODES if its extrinsics are known, else the camera
    body_frame: str
    missing_extrinsics: str = ''  # why `body` is the camera in ROBOT_MODES, or ''
    is_scaled: bool = True  # False while the scale is being estimated


class Placer:
    """
    Places the images of one map, all of them from `camera` (a frame id).

    If the extrinsics `base_frame` -> `camera` are known when the map starts, the robot starts at
    the origin of the map and the axes are those of the robot. Otherwise the first camera does, its
    axes are those of the upright first camera (REP-103), and `body` is always the camera.
    """

    def __init__(self, params: NodeParams, tree: FrameTree, camera: str, scale: float):
        self.camera = camera
        self.missing_extrinsics = ''
        self._params, self._tree = params, tree
        T_base_cam = self._find_extrinsics()
        self._body_frame, self._T_cam_body = camera, None
        if T_base_cam is not None and params.tf_mode in ROBOT_MODES:
            self._body_frame, self._T_cam_body = params.base_frame, invert(T_base_cam)
        self._frame = MapFrame(scale, camera_rotation(params.image_rotation), T_base_cam)
        self._track = ContinuousPoses()

    def _find_extrinsics(self) -> np.ndarray | None:
        params = self._params
        if not params.base_frame:
            return None
        try:
            return self._tree.extrinsics(params.base_frame, self.camera)
        except NoTransform as error:
            if params.tf_mode in ROBOT_MODES:
                self.missing_extrinsics = str(error)
            return None

    @property
    def scale(self) -> float:
        """Map units per network unit."""
        return self._frame.scale

    @scale.setter
    def scale(self, scale: float) -> None:
        self._frame.scale = scale

    @property
    def origin(self) -> np.ndarray:
        """The fixed point (3,) of a change of scale, in the map frame."""
        return self._frame.origin

    def is_outdated(self) -> bool:
        """Return whether the extrinsics were missing when the map started and are known now."""
        if not self.missing_extrinsics:
            return False
        try:
            self._tree.extrinsics(self._params.base_frame, self.camera)
        except NoTransform:
            return False
        return True

    def place(self, result: FrameResult, is_scaled: bool) -> Placement:
        """Return the placement of a result; raise FloatingPointError if it is not finite."""
        frame = self._frame.place(result)
        body = frame.camera
        if self._T_cam_body is not None:
            body = self._track.pose(frame.camera.T_map_body @ self._T_cam_body)
        return Placement(frame, body, self._body_frame, self.missing_extrinsics, is_scaled)
