"""
Endless streams: the window that takes over when the memory is full (spec section 14.3).

The last `overlap` frames that the serving window keeps open the next one. The next window is built
in a small memory of its own while these frames arrive: the oldest of them run there as its scale
batch, in one extra forward pass, and each later one in a further pass of its own. When the
serving window is full and another frame comes, the next one is aligned with it over these frames
and moves into its place.
"""

from dataclasses import dataclass
import math

from lingbot_map.geometry import decode_pose, unproject
from lingbot_map.models.memory import StreamMemory
from lingbot_map.models.windows import align, Outputs, Similarity, warp, Window
from lingbot_map.streaming.runner import FrameRunner
import torch
from torch import Tensor

# Two windows that place the overlap's points this far apart, relative to depth, do not agree. The
# demo model's windows of rendered rooms are 0.03 to 0.08 apart.
MAX_RESIDUAL = 0.15
_GRID_STRIDE = 8  # pixels between the points that are compared


@dataclass(frozen=True)
class Seam:
    """
    How a window was joined to the one before.

    `residual` is the median distance between the places that both give to a point of the overlap,
    relative to its depth; NaN if there is no valid depth.
    """

    move: Similarity  # from the window's world frame to the map
    scale_step: float  # network units of the window before in one of this window
    residual: float

    @property
    def consistent(self) -> bool:
        return self.residual <= MAX_RESIDUAL


class NextWindow:
    """
    Builds the window that follows the serving one; sized and allocated once.

    On the device it holds, beside the memory, the images of the unfinished scale batch and, for
    every frame of the overlap, pose and depth of both windows.
    """

    def __init__(self, model, height: int, width: int, scale_frames: int, overlap: int):
        self.overlap = overlap
        self.scale_frames = min(scale_frames, overlap)
        self.memory: StreamMemory = model.new_memory(height, width, overlap)
        self.runner = FrameRunner(model, self.memory, self.scale_frames)
        self.reset()

    def reset(self) -> None:
        """Forget everything that `add` brought."""
        self.memory.reset()
        self._images: list[Tensor] = []
        self._serving: list[Outputs] = []
        self._next: list[Outputs] = []

    def warm_up(self, image: Tensor) -> None:
        """Forget everything and go through a whole overlap; its frames stay until reset."""
        self.reset()
        self._run(image[None].repeat(self.scale_frames, 1, 1, 1))
        for _ in range(self.scale_frames, self.overlap):
            self._run(image[None])
        self._serving = self._next
        self.join(Similarity.identity())

    def add(self, image: Tensor, outputs: Outputs) -> None:
        """
        Take one of the last `overlap` frames that the serving window keeps, in order.

        `image` (3, h, w) uint8; `outputs` (1, 1, ...) are those of the serving window.
        """
        self._serving.append(_copied(outputs))
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

    def join(self, serving_move: Similarity) -> Seam | None:
        """
        Return where the next window lies in the map; all frames of the overlap must be there.

        `serving_move` does the same for the serving window. None if a pose in the next window is
        not finite: its memory is spoilt. Without valid depth the scale stays.
        """
        serving, following = _window(self._serving), _window(self._next)
        if not following.outputs['pose_enc'].isfinite().all():
            return None
        serving = warp(serving, serving_move)
        move = align(serving, following, fallback_scale=serving_move.scale)
        residual = _residual(serving, warp(following, move))
        return Seam(move, move.scale / serving_move.scale, residual)

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


def _residual(serving: Window, following: Window) -> float:
    """Return how far two windows in the map frame place the same points apart; see `Seam`."""
    points, depth = _map_points(serving)
    distance = (points - _map_points(following)[0]).norm(dim=-1) / depth
    distance = distance[distance.isfinite()]
    return float(distance.median()) if len(distance) else math.nan


def _map_points(window: Window) -> tuple[Tensor, Tensor]:
    """Return points (S, h, w, 3) in the map frame and their z-depth (S, h, w), on a grid."""
    depth = window.outputs['depth'][0, ..., 0]
    T_map_cam, K = decode_pose(window.outputs['pose_enc'][0], *depth.shape[1:])
    points = torch.einsum('sij,shwj->shwi', T_map_cam[:, :3, :3],
                          unproject(depth, K, _GRID_STRIDE))  # fmt: skip
    return points + T_map_cam[:, None, None, :3, 3], depth[:, ::_GRID_STRIDE, ::_GRID_STRIDE]
