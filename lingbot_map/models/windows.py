"""
Align overlapping windows of a long sequence to the first window (spec section 14).

The network starts anew in each window, so each window has its own world frame and scale.
"""

from dataclasses import dataclass

from lingbot_map.geometry import matrix_to_quaternion, quaternion_to_matrix, rigid
import torch
from torch import Tensor

Outputs = dict[str, Tensor]  # of the network, by name
MIN_SCALE, MAX_SCALE = 1e-3, 1e3


@dataclass(frozen=True)
class Similarity:
    """Similarity transform between world frames: p -> scale * R @ p + t; float64 on the CPU."""

    scale: float
    R: Tensor  # (3, 3)
    t: Tensor  # (3,)

    @classmethod
    def identity(cls) -> 'Similarity':
        eye = torch.eye(4, dtype=torch.float64)
        return cls(1.0, eye[:3, :3], eye[:3, 3])

    @classmethod
    def between(cls, T_to_cam: Tensor, T_from_cam: Tensor, scale: float) -> 'Similarity':
        """Return the similarity that maps the second pose (4, 4) of a camera to the first."""
        R = T_to_cam[:3, :3] @ T_from_cam[:3, :3].T
        return cls(scale, R, T_to_cam[:3, 3] - scale * (R @ T_from_cam[:3, 3]))

    def move(self, T: Tensor) -> Tensor:
        """Transform camera-to-world poses (..., 4, 4) float64; scale applies to translations."""
        return rigid(self.R @ T[..., :3, :3], self.scale * (T[..., :3, 3] @ self.R.T) + self.t)


@dataclass(frozen=True)
class WindowLayout:
    """Division of a sequence into windows; all lengths in frames."""

    scale_frames: int  # at the start of every window
    length: int
    overlap: int

    def windows(self, frames: int) -> list[range]:
        """Return the windows of a sequence; each starts `overlap` before the previous one ends."""
        step = self.length - self.overlap
        count = 1 + -(-(frames - self.length) // step)
        return [range(i * step, min(i * step + self.length, frames)) for i in range(max(count, 1))]


@dataclass(frozen=True)
class Window:
    """Outputs of the network for frames `start`, `start` + 1, ... of a sequence."""

    start: int
    outputs: Outputs  # (1, frames, ...), `is_keyframe` among them

    @property
    def stop(self) -> int:
        return self.start + self.outputs['is_keyframe'].shape[1]


def lay_out(
    frames: int,
    scale_frames: int,
    window_size: int,
    overlap_size: int | None = None,
    overlap_keyframes: int | None = None,
    keyframe_interval: int = 1,
) -> WindowLayout:
    """
    Return a layout of windows that keep `window_size` frames each, scale frames included.

    The overlap is `overlap_size` frames or `overlap_keyframes` keyframes (at least the scale
    batch); the default is the length of the scale batch.

    :raises ValueError: a negative overlap, or one as long as a window.
    """
    scale_frames = min(scale_frames, frames)
    interval = max(keyframe_interval, 1)
    overlap = scale_frames if overlap_size is None else overlap_size
    if overlap_keyframes is not None:
        overlap = max(scale_frames, overlap_keyframes * interval)
    if min(overlap, overlap_keyframes or 0) < 0:
        raise ValueError(
            f'overlap_size is {overlap_size} and overlap_keyframes {overlap_keyframes}; '
            'neither can be negative'
        )
    overlap = min(overlap, frames - 1)
    length = min(scale_frames + max(window_size - scale_frames, 0) * interval, frames)
    if overlap >= length:
        raise ValueError(
            f'windows of {length} frames (window_size {window_size}) do not advance with an '
            f'overlap of {overlap}; raise window_size or lower the overlap'
        )
    return WindowLayout(scale_frames, length, overlap)


def stitch(windows: list[Window]) -> Outputs:
    """
    Return the outputs of a sequence, (1, S, ...), in the world frame of the first window.

    Each window is aligned to the previous one over their shared frames, whose outputs are taken
    from the later window. Two or more windows add `chunk_scales` (1, N) and `chunk_transforms`
    (1, N, 4, 4), rotation and translation only. A single window is returned unchanged.
    """
    if len(windows) == 1:
        return windows[0].outputs
    moves, moved = [], []
    for window in windows:
        moves.append(align(moved[-1], window) if moved else Similarity.identity())
        moved.append(warp(window, moves[-1]))
    ends = [*(window.start for window in windows[1:]), windows[-1].stop]
    stitched = {
        key: torch.cat(
            [w.outputs[key][:, : end - w.start] for w, end in zip(moved, ends, strict=True)], 1
        )
        for key in windows[0].outputs
    }
    pose_enc = stitched['pose_enc']
    return {
        **stitched,
        'chunk_scales': pose_enc.new_tensor([[move.scale for move in moves]]),
        'chunk_transforms': torch.stack([rigid(m.R, m.t) for m in moves]).to(pose_enc)[None],
    }


def align(previous: Window, current: Window, fallback_scale: float = 1.0) -> Similarity:
    """
    Return the similarity from the current window's world frame to that of the previous one.

    Rotation and translation come from the last frame that is a keyframe in both windows. The scale
    comes from the depths of all such frames, or is `fallback_scale` if no pixel is valid. Without
    such a frame the first shared frame is used for both; without a shared frame the result is the
    identity.
    """
    first = current.start - previous.start
    shared = min(previous.stop, current.stop) - current.start
    if shared <= 0:
        return Similarity.identity()
    before = {key: value[:, first : first + shared] for key, value in previous.outputs.items()}
    after = {key: value[:, :shared] for key, value in current.outputs.items()}
    both = (before['is_keyframe'] & after['is_keyframe'])[0]
    pairs = both.nonzero()[:, 0].tolist() or [0]
    scale = None
    if 'depth' in after:
        scale = depth_scale(before['depth'][0, pairs], after['depth'][0, pairs])
    T_to_cam, T_from_cam = (_poses(x['pose_enc'][0, pairs[-1]]) for x in (before, after))
    return Similarity.between(T_to_cam, T_from_cam, fallback_scale if scale is None else scale)


def depth_scale(depth_to: Tensor, depth_from: Tensor) -> float | None:
    """
    Return the median of `depth_to / depth_from`, clamped to [1e-3, 1e3]; None: no valid pixel.

    For an even number of pixels it is the lower of the two middle values.
    """
    valid = depth_to.isfinite() & depth_from.isfinite()
    valid &= depth_from.abs() > torch.finfo(torch.float32).eps
    if not valid.any():
        return None
    scale = float((depth_to[valid] / depth_from[valid]).median())
    return min(max(scale, MIN_SCALE), MAX_SCALE)


def warp(window: Window, move: Similarity) -> Window:
    """Transform a window to another world frame; fields of view and confidences are unchanged."""
    outputs = dict(window.outputs)
    pose_enc = outputs['pose_enc']
    T = move.move(_poses(pose_enc))
    moved = torch.cat((T[..., :3, 3], matrix_to_quaternion(T[..., :3, :3])), -1)
    outputs['pose_enc'] = torch.cat((moved.to(pose_enc), pose_enc[..., 7:]), -1)
    for key in outputs.keys() & {'depth', 'cam_points'}:
        outputs[key] = move.scale * outputs[key]
    if 'world_points' in outputs:
        points = outputs['world_points']
        outputs['world_points'] = (move.scale * (points @ move.R.T.to(points))
                                   + move.t.to(points))  # fmt: skip
    return Window(window.start, outputs)


def _poses(pose_enc: Tensor) -> Tensor:
    pose_enc = pose_enc.cpu().double()
    return rigid(quaternion_to_matrix(pose_enc[..., 3:7]), pose_enc[..., :3])
