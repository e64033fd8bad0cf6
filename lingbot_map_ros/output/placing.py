"""Where the camera and its robot are in the map, by the rules of tf_mode."""

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
    """Where things were when an image was taken."""

    frame: MappedFrame
    body: Pose  # what odometry, pose and TF speak of: the robot in ROBOT_MODES, else the camera
    body_frame: str
    missing_extrinsics: str = ''  # why the body is not the robot, although it should be
    is_scaled: bool = True  # False while the scale is still being estimated


class Placer:
    """
    Places the images of one map, all of them from `camera`.

    When the camera's mount in `base_frame` is known, the map is level with the robot, which starts
    at its origin; else it is level with the first camera, and speaks of the camera alone.
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
        """The point (3,) of the map that a change of scale leaves in place."""
        return self._frame.origin

    def is_outdated(self) -> bool:
        """Tell whether a mount that was missing when the map began is known now."""
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
