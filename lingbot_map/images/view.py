"""Cameras mounted sideways: pictures turned upright, and what is seen in them turned back."""

from dataclasses import replace

import cv2
from lingbot_map.images.camera import Camera
from lingbot_map.streaming.frame import FrameResult
from lingbot_map.streaming.preprocess import PixelMap
import numpy as np
import torch

TURNS = {  # degrees clockwise, and what OpenCV calls them
    0: None,
    90: cv2.ROTATE_90_CLOCKWISE,
    180: cv2.ROTATE_180,
    270: cv2.ROTATE_90_COUNTERCLOCKWISE,
}
_AXES = {  # where the camera's x and y axes point in the turned picture
    0: ((1, 0), (0, 1)),
    90: ((0, 1), (-1, 0)),
    180: ((-1, 0), (0, -1)),
    270: ((0, -1), (1, 0)),
}
GREY = (124, 116, 104)  # the mean that the network subtracts (spec section 3): nothing to see


def turn_picture(picture: np.ndarray, degrees: int) -> np.ndarray:
    """Return a picture (H, W) or (H, W, C), turned clockwise by one of TURNS."""
    return picture if degrees == 0 else cv2.rotate(picture, TURNS[degrees])


def turn_size(size: tuple[int, int], degrees: int) -> tuple[int, int]:
    """Return (width, height) of a turned picture."""
    return size[::-1] if degrees % 180 else size


def turn_rotation(degrees: int) -> np.ndarray:
    """Return R (3, 3) from the camera's optical axes to those of the turned picture."""
    R = np.eye(3)
    R[:2, :2] = np.transpose(_AXES[degrees])
    return R


def turn_intrinsics(K: np.ndarray, degrees: int, size: tuple[int, int]) -> np.ndarray:
    """Return intrinsics (3, 3) of the turned picture; K is of pictures of `size` before it."""
    return _pixel_turn(degrees, size) @ K @ turn_rotation(degrees).T


def turn_back(result: FrameResult, degrees: int) -> FrameResult:
    """Return the result of a turned picture as one of the camera's own picture and frame."""
    if degrees == 0:
        return result
    R = turn_rotation(degrees)
    T_turned_cam = np.eye(4)
    T_turned_cam[:3, :3] = R
    network_size = turn_size(result.mapping.network_size, degrees)
    original_size = turn_size(result.mapping.original_size, degrees)
    return replace(
        result,
        T_world_cam=result.T_world_cam @ T_turned_cam,
        intrinsics=np.linalg.inv(_pixel_turn(degrees, original_size)) @ result.intrinsics @ R,
        network_intrinsics=(
            np.linalg.inv(_pixel_turn(degrees, network_size)) @ result.network_intrinsics @ R
        ),
        depth=_turn_tensor_back(result.depth, degrees),
        confidence=_turn_tensor_back(result.confidence, degrees),
        rgb=_turn_tensor_back(result.rgb, degrees),
        mapping=_turn_mapping_back(result.mapping, degrees, network_size, original_size),
    )


def _pixel_turn(degrees: int, size: tuple[int, int]) -> np.ndarray:
    """Return the matrix (3, 3) from pixels of a picture of `size` to those of the turned one."""
    A = turn_rotation(degrees)
    corners = A[:2, :2] @ np.array([[0, size[0] - 1], [0, size[1] - 1]])
    A[:2, 2] = -corners.min(axis=1)
    return A


def _turn_tensor_back(values: torch.Tensor, degrees: int) -> torch.Tensor:
    return torch.rot90(values, degrees // 90, (0, 1)).contiguous()


def _turn_mapping_back(
    mapping: PixelMap, degrees: int, network_size: tuple[int, int], original_size: tuple[int, int]
) -> PixelMap:
    to_original = (
        np.linalg.inv(_pixel_turn(degrees, original_size))
        @ mapping.to_original(np.eye(3))
        @ _pixel_turn(degrees, network_size)
    )
    scale_x, scale_y = 1 / to_original[0, 0], 1 / to_original[1, 1]
    crop_x, crop_y = to_original[0, 2] * scale_x, to_original[1, 2] * scale_y
    return PixelMap(scale_x, scale_y, crop_x, crop_y, network_size, original_size)


class View:
    """
    Pictures of one `size` (width, height); those of a map and its results go through one view.

    `camera`: of the same size, None if it is not known. `seen` (H, W) bool: raw pixels that are
    not masked. `degrees`: see `turn_picture`.
    `replace_intrinsics`: results get the camera's intrinsics instead of the predicted ones.
    """

    def __init__(
        self,
        size: tuple[int, int],
        camera: Camera | None = None,
        seen: np.ndarray | None = None,
        degrees: int = 0,
        replace_intrinsics: bool = False,
    ):
        self.size, self.upright_size = size, turn_size(size, degrees)
        self._camera, self._degrees = camera, degrees
        self._K = None
        if replace_intrinsics and camera is not None:
            self._K = turn_intrinsics(camera.K, degrees, camera.size)
        seen = _rectified(seen, camera)
        self._seen = None if seen is None else turn_picture(seen, degrees)
        self._grey = None if seen is None else np.full((*seen.shape, 3), GREY, np.uint8)
        self._rectified_seen = seen
        self._network_seen: tuple[PixelMap, torch.Tensor] | None = None

    def prepare(self, picture: np.ndarray) -> np.ndarray:
        """Return what the network shall see of a picture (H, W, 3) uint8, contiguous."""
        if self._camera is not None:
            picture = self._camera.rectify(picture, GREY)
        if self._rectified_seen is not None:
            picture = cv2.copyTo(picture, self._rectified_seen, self._grey.copy())
        return turn_picture(picture, self._degrees)

    def restore(self, result: FrameResult) -> FrameResult:
        """Return the result of a prepared picture as one of the rectified camera."""
        if self._K is not None:
            result = replace(
                result, intrinsics=self._K, network_intrinsics=result.mapping.to_network(self._K)
            )
        if self._seen is not None:
            seen = self._on_network(result.mapping, result.depth.device)
            result = replace(result, depth=result.depth.masked_fill(~seen, torch.nan))
        return turn_back(result, self._degrees)

    def _on_network(self, mapping: PixelMap, device: torch.device) -> torch.Tensor:
        """Return (h, w) bool of the network's pixels that no masked pixel has a part in."""
        if self._network_seen is None or self._network_seen[0] != mapping:
            width, height = mapping.network_size
            full = (width, round(mapping.original_size[1] * mapping.scale_y))
            part = cv2.resize(self._seen, full, interpolation=cv2.INTER_AREA)
            whole = part[mapping.crop_y : mapping.crop_y + height] == 255
            self._network_seen = mapping, torch.from_numpy(whole).to(device)
        return self._network_seen[1]


def _rectified(seen: np.ndarray | None, camera: Camera | None) -> np.ndarray | None:
    """Return 255 for rectified pixels that the camera saw unmasked, else 0; None: all are."""
    if seen is None:
        if camera is None:
            return None
        seen = np.ones(camera.size[::-1], bool)
    seen = seen.astype(np.uint8) * 255
    if camera is not None:
        seen = camera.rectify(seen, (0,))
    return None if seen.min() == 255 else (seen == 255) * np.uint8(255)
