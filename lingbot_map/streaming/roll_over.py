"""
Roll-over: replace the full memory by a new window, for streams without end (spec section 14.3).

The last `overlap` frames that the current window keeps are the first of the next one. The next
window is built in its own small memory while these frames arrive: the oldest run there as its
scale batch, in one extra forward pass, and each later one in one extra pass. At the first frame
after the current window is full, the next window is aligned to it over the shared frames and
replaces it.
"""

from dataclasses import dataclass
import math

from lingbot_map.geometry import decode_pose, unproject
from lingbot_map.models.memory import StreamMemory
from lingbot_map.models.windows import align, Outputs, Similarity, warp, Window
from lingbot_map.streaming.runner import FrameRunner
import torch
from torch import Tensor

# Windows with a larger median distance between the overlap's points, relative to depth, do not
# agree. The demo model has 0.03 to 0.08 on rendered rooms.
MAX_RESIDUAL = 0.15
_GRID_STRIDE = 8  # [px] between the points that are compared


@dataclass(frozen=True)
class Seam:
    """
    Alignment of a window to the previous one.

    `residual` is the median distance between the positions of the same point in both windows,
    relative to its depth, over the overlap; NaN without valid depth.
    """

    move: Similarity  # window's world frame -> map
    scale_step: float  # units of the previous window per unit of this one
    residual: float

    @property
    def consistent(self) -> bool:
        return self.residual <= MAX_RESIDUAL


class NextWindow:
    """
    Builds the window after the current one, in memory that is allocated once.

    Besides the cache, the device holds the images of the incomplete scale batch, and poses and
    depths of both windows for each frame of the overlap.
    """

    def __init__(self, model, height: int, width: int, scale_frames: int, overlap: int):
        self.overlap = overlap
        self.scale_frames = min(scale_frames, overlap)
        self.memory: StreamMemory = model.new_memory(height, width, overlap)
        self.runner = FrameRunner(model, self.memory, self.scale_frames)
        self.reset()

    def reset(self) -> None:
        """Forget all added frames."""
        self.memory.reset()
        self._images: list[Tensor] = []
        self._current: list[Outputs] = []
        self._next: list[Outputs] = []

    def warm_up(self, image: Tensor) -> None:
        """Reset, then run a whole overlap and its alignment; its frames stay until `reset`."""
        self.reset()
        self._run(image[None].repeat(self.scale_frames, 1, 1, 1))
        for _ in range(self.scale_frames, self.overlap):
            self._run(image[None])
        self._current = self._next
        self.join(Similarity.identity())

    def add(self, image: Tensor, outputs: Outputs) -> None:
        """
        Add the next of the last `overlap` frames that the current window keeps.

        `image` (3, h, w) uint8; `outputs` (1, 1, ...) are those of the current window.
        """
        self._current.append(_copied(outputs))
        self._images.append(image)
        if self.memory.kept or len(self._images) == self.scale_frames:
            images, self._images = torch.stack(self._images), []
            self._run(images)

    @property
    def complete(self) -> bool:
        """Whether the next window can take over."""
        return self.memory.kept == self.overlap

    @property
    def last_pose_enc(self) -> Tensor:
        """Pose encoding (9,) of the newest frame in the next window's world frame."""
        return self._next[-1]['pose_enc'][0, -1]

    def join(self, current_move: Similarity) -> Seam | None:
        """
        Align the next window to the map; requires `complete`.

        `current_move` maps the current window's world frame to the map. Returns None if a pose in
        the next window is not finite. Without valid depth the scale is that of `current_move`.
        """
        current, following = _window(self._current), _window(self._next)
        if not following.outputs['pose_enc'].isfinite().all():
            return None
        current = warp(current, current_move)
        move = align(current, following, fallback_scale=current_move.scale)
        residual = _residual(current, warp(following, move))
        return Seam(move, move.scale / current_move.scale, residual)

    def _run(self, images: Tensor) -> None:
        self.memory.write(len(images), keep=True)
        outputs = self.runner(images, self.scale_frames)
        self.memory.commit()
        self._next.append(_copied(outputs))


def _copied(outputs: Outputs) -> Outputs:
    return {key: outputs[key].clone() for key in ('pose_enc', 'depth')}


def _window(parts: list[Outputs]) -> Window:
    outputs = {key: torch.cat([part[key] for part in parts], 1) for key in parts[0]}
    outputs['is_keyframe'] = torch.ones_like(outputs['pose_enc'][..., 0], dtype=torch.bool)
    return Window(0, outputs)


def _residual(current: Window, following: Window) -> float:
    """Return the residual of `Seam` for two windows in the map frame."""
    points, depth = _map_points(current)
    distance = (points - _map_points(following)[0]).norm(dim=-1) / depth
    distance = distance[distance.isfinite()]
    return float(distance.median()) if len(distance) else math.nan


def _map_points(window: Window) -> tuple[Tensor, Tensor]:
    """Return a grid of points (S, h, w, 3) in the map frame and their z-depth (S, h, w)."""
    depth = window.outputs['depth'][0, ..., 0]
    T_map_cam, K = decode_pose(window.outputs['pose_enc'][0], *depth.shape[1:])
    points = torch.einsum('sij,shwj->shwi', T_map_cam[:, :3, :3],
                          unproject(depth, K, _GRID_STRIDE))  # fmt: skip
    return points + T_map_cam[:, None, None, :3, 3], depth[:, ::_GRID_STRIDE, ::_GRID_STRIDE]
