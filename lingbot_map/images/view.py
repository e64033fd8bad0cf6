"""
Prepare camera images for the network, and transform its results back to the camera.

Images are rectified, masked and rotated upright. Results get the depth of masked pixels removed
and are rotated back.
"""

from dataclasses import replace

import cv2
from lingbot_map.images.camera import Camera
from lingbot_map.streaming.frame import FrameResult
from lingbot_map.streaming.preprocess import PixelMap
import numpy as np
import torch

ROTATIONS = {  # degrees clockwise -> OpenCV's code
    0: None,
    90: cv2.ROTATE_90_CLOCKWISE,
    180: cv2.ROTATE_180,
    270: cv2.ROTATE_90_COUNTERCLOCKWISE,
}
_AXES = {  # degrees -> the camera's x and y axes in the rotated image
    0: ((1, 0), (0, 1)),
    90: ((0, 1), (-1, 0)),
    180: ((-1, 0), (0, -1)),
    270: ((0, -1), (1, 0)),
}
GREY = (124, 116, 104)  # of masked pixels: the mean that the network subtracts (spec section 3)


class View:
    """
    Prepares images of one `size` (width, height) and restores their results; one view per map.

    `camera`: has the same size, None if unknown. `valid` (H, W) bool: raw pixels that are not
    masked. `degrees`: clockwise rotation, a key of ROTATIONS. `replace_intrinsics`: results get
    the camera's intrinsics instead of the predicted ones.
    """

    def __init__(
        self,
        size: tuple[int, int],
        camera: Camera | None = None,
        valid: np.ndarray | None = None,
        degrees: int = 0,
        replace_intrinsics: bool = False,
    ):
        self.size, self.upright_size = size, rotated_size(size, degrees)
        self._camera, self._degrees = camera, degrees
        self._K = None
        if replace_intrinsics and camera is not None:
            self._K = rotated_intrinsics(camera.K, degrees, camera.size)
        valid = _rectified(valid, camera)
        self._valid = None if valid is None else rotate_image(valid, degrees)
        self._grey = None if valid is None else np.full((*valid.shape, 3), GREY, np.uint8)
        self._rectified_valid = valid
        self._network_valid: tuple[PixelMap, torch.Tensor] | None = None

    def prepare(self, image: np.ndarray) -> np.ndarray:
        """Rectify, mask and rotate a raw image (H, W, 3) uint8; the result is contiguous."""
        if self._camera is not None:
            image = self._camera.rectify(image, GREY)
        if self._rectified_valid is not None:
            image = cv2.copyTo(image, self._rectified_valid, self._grey.copy())
        return rotate_image(image, self._degrees)

    def restore(self, result: FrameResult) -> FrameResult:
        """Transform the result of a prepared image to the rectified camera."""
        if self._K is not None:
            result = replace(
                result, intrinsics=self._K, network_intrinsics=result.mapping.to_network(self._K)
            )
        if self._valid is not None:
            valid = self._valid_on_network(result.mapping, result.depth.device)
            result = replace(result, depth=result.depth.masked_fill(~valid, torch.nan))
        return rotate_back(result, self._degrees)

    def _valid_on_network(self, mapping: PixelMap, device: torch.device) -> torch.Tensor:
        """Return (h, w) bool: network pixels that contain no masked pixel."""
        if self._network_valid is None or self._network_valid[0] != mapping:
            width, height = mapping.network_size
            full = (width, round(mapping.original_size[1] * mapping.scale_y))
            part = cv2.resize(self._valid, full, interpolation=cv2.INTER_AREA)
            whole = part[mapping.crop_y : mapping.crop_y + height] == 255
            self._network_valid = mapping, torch.from_numpy(whole).to(device)
        return self._network_valid[1]


def _rectified(valid: np.ndarray | None, camera: Camera | None) -> np.ndarray | None:
    """Return 255 for valid rectified pixels, else 0, (H, W) uint8; None if all are valid."""
    if valid is None:
        if camera is None:
            return None
        valid = np.ones(camera.size[::-1], bool)
    valid = valid.astype(np.uint8) * 255
    if camera is not None:
        valid = camera.rectify(valid, (0,))
    return None if valid.min() == 255 else (valid == 255) * np.uint8(255)


def rotate_image(image: np.ndarray, degrees: int) -> np.ndarray:
    """Rotate an image (H, W) or (H, W, C) clockwise; `degrees` is a key of ROTATIONS."""
    return image if degrees == 0 else cv2.rotate(image, ROTATIONS[degrees])


def rotated_size(size: tuple[int, int], degrees: int) -> tuple[int, int]:
    """Return (width, height) of a rotated image."""
    return size[::-1] if degrees % 180 else size


def camera_rotation(degrees: int) -> np.ndarray:
    """Return R (3, 3) from the camera's optical frame to that of the rotated image."""
    R = np.eye(3)
    R[:2, :2] = np.transpose(_AXES[degrees])
    return R


def rotated_intrinsics(K: np.ndarray, degrees: int, size: tuple[int, int]) -> np.ndarray:
    """Return intrinsics (3, 3) of the rotated image; K and `size` are before the rotation."""
    return _pixel_rotation(degrees, size) @ K @ camera_rotation(degrees).T


def rotate_back(result: FrameResult, degrees: int) -> FrameResult:
    """Transform the result of a rotated image to the original image and camera frame."""
    if degrees == 0:
        return result
    R = camera_rotation(degrees)
    T_rotated_cam = np.eye(4)
    T_rotated_cam[:3, :3] = R
    network_size = rotated_size(result.mapping.network_size, degrees)
    original_size = rotated_size(result.mapping.original_size, degrees)
    return replace(
        result,
        T_world_cam=result.T_world_cam @ T_rotated_cam,
        intrinsics=np.linalg.inv(_pixel_rotation(degrees, original_size)) @ result.intrinsics @ R,
        network_intrinsics=(
            np.linalg.inv(_pixel_rotation(degrees, network_size)) @ result.network_intrinsics @ R
        ),
        depth=_rotate_tensor_back(result.depth, degrees),
        confidence=_rotate_tensor_back(result.confidence, degrees),
        rgb=_rotate_tensor_back(result.rgb, degrees),
        mapping=_rotate_mapping_back(result.mapping, degrees, network_size, original_size),
    )


def _pixel_rotation(degrees: int, size: tuple[int, int]) -> np.ndarray:
    """Return the matrix (3, 3) from pixels of an image of `size` to pixels of the rotated one."""
    A = camera_rotation(degrees)
    corners = A[:2, :2] @ np.array([[0, size[0] - 1], [0, size[1] - 1]])
    A[:2, 2] = -corners.min(axis=1)
    return A


def _rotate_tensor_back(values: torch.Tensor, degrees: int) -> torch.Tensor:
    return torch.rot90(values, degrees // 90, (0, 1)).contiguous()


def _rotate_mapping_back(
    mapping: PixelMap, degrees: int, network_size: tuple[int, int], original_size: tuple[int, int]
) -> PixelMap:
    to_original = (
        np.linalg.inv(_pixel_rotation(degrees, original_size))
        @ mapping.to_original(np.eye(3))
        @ _pixel_rotation(degrees, network_size)
    )
    scale_x, scale_y = 1 / to_original[0, 0], 1 / to_original[1, 1]
    crop_x, crop_y = to_original[0, 2] * scale_x, to_original[1, 2] * scale_y
    return PixelMap(scale_x, scale_y, crop_x, crop_y, network_size, original_size)
