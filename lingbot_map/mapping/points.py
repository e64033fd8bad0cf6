"""
Convert the depth of a frame to coloured map points, filtered and packed on the device.

A packed point is a 20-byte record (POINT_DTYPE) with the layout of PointCloud2 messages and PCD
files, so writing either only copies bytes.
"""

from dataclasses import dataclass
import math

from lingbot_map.geometry import unproject
from lingbot_map.mapping.map_frame import MappedFrame
import numpy as np
import torch
from torch.nn import functional

POINT_DTYPE = np.dtype(
    [
        ('x', '<f4'),
        ('y', '<f4'),
        ('z', '<f4'),
        ('rgb', '<u4'),  # 0x00RRGGBB, the ROS and PCL packing
        ('confidence', '<f4'),
    ]
)

_MIN_DEPTH = 1e-8  # of a valid depth, spec section 12


@dataclass(frozen=True)
class PointFilter:
    """Select the pixels of a frame that become map points."""

    min_confidence: float = 0.0  # absolute; network confidence is >= 1, so 0 keeps all
    max_depth: float = 0.0  # map units; 0 = no limit
    stride: int = 1  # take every n-th row and column
    keep_percentile: float = 100.0  # percent of the valid pixels, most confident first
    edge_threshold: float = 0.0  # maximum depth range around a pixel / its depth; 0 = no limit

    def __post_init__(self):
        if not self.min_confidence >= 0:
            raise ValueError(f'min_confidence is {self.min_confidence}: set it to 0 or more')
        if not self.max_depth >= 0:
            raise ValueError(f'max_depth is {self.max_depth}: set it to 0 (no limit) or more')
        if self.stride < 1:
            raise ValueError(f'stride is {self.stride}: set it to 1 or more')
        if not 0 <= self.keep_percentile <= 100:
            raise ValueError(f'keep_percentile is {self.keep_percentile}: set it to 0 .. 100')
        if not self.edge_threshold >= 0:
            raise ValueError(
                f'edge_threshold is {self.edge_threshold}: set it to 0 (no limit) or more'
            )

    def __call__(self, frame: MappedFrame) -> np.ndarray:
        """
        Return the kept points (N,) POINT_DTYPE in the map frame, in row-major pixel order.

        Pixels with NaN, infinite or non-positive depth, or NaN confidence, are always removed.
        `keep_percentile` is applied last; pixels of equal confidence are all kept or all removed.
        Copies from the device once.
        """
        s = self.stride
        depth, confidence = frame.depth[::s, ::s], frame.confidence[::s, ::s]
        kept = self._kept(depth, confidence)
        if self.edge_threshold > 0:
            kept &= ~_edges(frame.depth, self.edge_threshold)[::s, ::s]
        if self.keep_percentile < 100:
            kept &= confidence >= _least_of_best(confidence[kept], self.keep_percentile)
        points = _to_map(depth, _strided(frame.network_intrinsics, s), frame.camera.T_map_body)
        packed = torch.cat(
            (
                points.view(torch.int32),
                _pack_rgb(frame.rgb[::s, ::s])[..., None],
                confidence[..., None].contiguous().view(torch.int32),
            ),
            dim=2,
        )
        return _to_host(packed[kept]).numpy().view(POINT_DTYPE).reshape(-1)

    def _kept(self, depth: torch.Tensor, confidence: torch.Tensor) -> torch.Tensor:
        kept = torch.isfinite(depth) & (depth > _MIN_DEPTH) & (confidence >= self.min_confidence)
        if self.max_depth > 0:
            kept &= depth <= self.max_depth
        return kept


def _edges(depth: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return (H, W) bool: the range of valid depths in 3x3 pixels exceeds `threshold` * depth."""
    valid = torch.isfinite(depth) & (depth > _MIN_DEPTH)

    def largest(values: torch.Tensor) -> torch.Tensor:
        values = torch.where(valid, values, -torch.inf)
        return functional.max_pool2d(values[None], kernel_size=3, stride=1, padding=1)[0]

    return largest(depth) + largest(-depth) > threshold * depth


def _least_of_best(confidence: torch.Tensor, percent: float) -> float | torch.Tensor:
    """Return the lowest confidence of the best `percent` of (N,), or infinity if there is none."""
    count = math.ceil(len(confidence) * percent / 100)
    if count == 0:
        return torch.inf
    # sort, since kthvalue has no deterministic CUDA kernel
    return confidence.sort().values[len(confidence) - count]


def _strided(K: np.ndarray, stride: int) -> np.ndarray:
    """Return the intrinsics of an image subsampled by `stride`."""
    K = K.copy()
    K[:2] /= stride
    return K


def _to_map(depth: torch.Tensor, K: np.ndarray, T_map_cam: np.ndarray) -> torch.Tensor:
    """Unproject z-depth (H, W) to map points (H, W, 3) float32."""
    T = torch.as_tensor(T_map_cam, dtype=depth.dtype, device=depth.device)
    camera = unproject(depth, torch.as_tensor(K, dtype=depth.dtype, device=depth.device))
    return camera @ T[:3, :3].T + T[:3, 3]


def _to_host(points: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, page-locked if it comes from CUDA (faster)."""
    if points.device.type != 'cuda':
        return points
    copy = torch.empty(points.shape, dtype=points.dtype, pin_memory=True)
    copy.copy_(points, non_blocking=True)
    torch.cuda.current_stream(points.device).synchronize()
    return copy


def _pack_rgb(rgb: torch.Tensor) -> torch.Tensor:
    """Pack uint8 colours (..., 3) to 0x00RRGGBB int32 (...)."""
    red, green, blue = rgb.to(torch.int32).unbind(-1)
    return red << 16 | green << 8 | blue
