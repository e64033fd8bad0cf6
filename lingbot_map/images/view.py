"""
View: from the camera's picture to the one that the network sees, and its results back.

On the way there a picture is rectified, masked and turned upright. Results come back in the
rectified camera's own frame and pixels; masked pixels have no depth (NaN).
"""

from dataclasses import replace

import cv2
from lingbot_map.images.camera import Camera
from lingbot_map.images.turning import turn_back, turn_intrinsics, turn_picture, turn_size
from lingbot_map.streaming.frame import FrameResult
from lingbot_map.streaming.preprocess import PixelMap
import numpy as np
import torch

GREY = (124, 116, 104)  # the mean that the network subtracts (spec section 3): nothing to see


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
