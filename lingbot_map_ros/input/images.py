"""Decode image messages, and choose the view (calibration, mask, rotation) of each map."""

from __future__ import annotations

from lingbot_map.errors import UserError
from lingbot_map.images.camera import Camera, camera_of, CameraInfoError
from lingbot_map.images.decoding import compressed_to_rgb, to_rgb
from lingbot_map.images.mask import load_mask
from lingbot_map.images.view import View
from lingbot_map.settings import ParameterError
from lingbot_map_ros.input.camera_info import calibration, CameraInfoStore
from lingbot_map_ros.parameters import NodeParams
import numpy as np
from sensor_msgs.msg import CameraInfo, CompressedImage, Image


class ImageInput:
    """
    Decodes images and chooses the view of each map; used by the worker.

    Raises ParameterError if the mask cannot be used.
    """

    def __init__(self, params: NodeParams, infos: CameraInfoStore, logger):
        self._status = f'not received on {infos.topic}'
        self._params, self._infos, self._logger = params, infos, logger
        self._key: tuple | None = None
        self._view: View | None = None
        try:
            self._mask = load_mask(params.image_mask)
        except UserError as error:
            raise ParameterError(f"parameter 'image_mask': {error}") from error

    @property
    def camera_status(self) -> str:
        """How camera_info is used, for diagnostics."""
        return 'received, used from the next map on' if self._infos.has_changed else self._status

    def ready(self, timeout_s: float) -> bool:
        """Wait for camera_info up to `timeout_s`; return whether a map can start now."""
        return self._infos.wait(timeout_s)

    @staticmethod
    def decode(message: Image | CompressedImage) -> np.ndarray:
        """Decode a message to RGB (H, W, 3) uint8; raise UnsupportedImage if it is invalid."""
        if isinstance(message, CompressedImage):
            return compressed_to_rgb(message)
        return to_rgb(message)

    def view(self, size: tuple[int, int], frame_id: str) -> View:
        """
        Return the view of a new map for images of `size` (width, height).

        Raises UserError if the mask does not fit.
        """
        info = self._infos.for_new_map()
        key = size, frame_id, calibration(info)
        if key != self._key:  # computing undistortion maps is slow
            valid = None if self._mask is None else self._mask.valid(*size)
            camera = self._camera(info, size)
            self._compare_frames(info, frame_id)
            self._view = View(
                size, camera, valid, self._params.image_rotation, self._params.use_camera_info
            )
            self._key = key
        return self._view

    def _camera(self, info: CameraInfo | None, size: tuple[int, int]) -> Camera | None:
        if info is None:
            self._status = f'not received on {self._infos.topic}'
            if self._params.use_camera_info:
                self._logger.warning(
                    f'use_camera_info is set, but nothing was received on {self._infos.topic}: '
                    'using the focal lengths predicted by the network'
                )
            return None
        try:
            camera = camera_of(info, self._params.image_rectified)
            if camera.size != size:
                raise CameraInfoError(
                    f'it is for images of {_by(camera.size)}, but these are {_by(size)}'
                )
        except CameraInfoError as error:
            self._status = f'not used: {error}'
            self._logger.warning(f'camera_info is not used: {error}')
            return None
        self._status = 'used' if camera.maps is None else f'used, {info.distortion_model}'
        if camera.maps is not None:
            self._logger.info(
                f'images are rectified ({info.distortion_model}) before the network, all outputs '
                "are of the rectified camera; set the parameter 'image_rectified' if the "
                'images are already rectified'
            )
        return camera

    def _compare_frames(self, info: CameraInfo | None, frame_id: str) -> None:
        theirs = '' if info is None else info.header.frame_id
        if theirs and theirs.lstrip('/') != frame_id.lstrip('/'):
            self._logger.warning(
                f"camera_info has the frame '{theirs}' and the images have '{frame_id}': if that "
                f'is another camera, remap {self._infos.topic}'
            )


def _by(size: tuple[int, int]) -> str:
    return f'{size[0]}x{size[1]}'
