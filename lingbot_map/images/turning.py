"""Cameras mounted sideways: pictures turned upright, and what is seen in them turned back."""

from dataclasses import replace

import cv2
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
