"""Select keyframes: every n-th frame, or frames with enough flow (spec section 15)."""

from lingbot_map.geometry import decode_pose, invert, unproject
from lingbot_map.settings import StreamConfig
import torch
from torch import Tensor

GRID_STRIDE = 8  # [px] between the sampled points
_NEAR = 1e-6  # smallest valid depth


class Keyframes:
    """
    Decides for each frame after the scale batch whether it is a keyframe.

    Call `start` after the scale batch. For each frame call `keeps_early` before the forward pass,
    `keeps` with its outputs, and `advance` after the commit or undo.

    With `flow_threshold` 0 every `interval`-th frame is kept. With a threshold above 0 [px],
    `interval` is ignored and a frame is kept if it is the first, if the mean flow since the last
    keyframe exceeds the threshold, or if it is the `max_non_keyframe_gap`-th since then. A model
    without depth head then keeps every frame.
    """

    def __init__(
        self, interval: int = 1, flow_threshold: float = 0.0, max_non_keyframe_gap: int = 30
    ):
        self.interval = interval
        self.flow_threshold = flow_threshold
        self.max_non_keyframe_gap = max_non_keyframe_gap
        self.flow: float | None = None  # [px], of the newest frame passed to `keeps`
        self.start(None)

    @property
    def by_flow(self) -> bool:
        return self.flow_threshold > 0

    def start(self, pose_enc: Tensor | None) -> None:
        """Start a sequence; `pose_enc` (9,) is that of the last frame of the scale batch."""
        self._frames = self._since_keyframe = 0
        self.set_reference(pose_enc)

    def set_reference(self, pose_enc: Tensor | None) -> None:
        """Set the pose encoding (9,) of the last keyframe, e.g. when the world frame changes."""
        self._reference = None if pose_enc is None else pose_enc.clone()

    def keeps_early(self) -> bool:
        """Return `keep` for `StreamMemory.write`; False if the flow decides later."""
        return not self.by_flow and self._frames % max(self.interval, 1) == 0

    def keeps(self, outputs: dict[str, Tensor]) -> bool:
        """Return whether to keep a frame, given the network's outputs (1, 1, ...) for it."""
        if not self.by_flow:
            return self.keeps_early()
        if 'depth' not in outputs:
            return True
        flow = mean_flow(outputs['pose_enc'][0, -1], outputs['depth'][0, -1, ..., 0],
                         self._reference)  # fmt: skip
        self.flow = float(flow)
        return (
            self._frames == 0
            or self.flow > self.flow_threshold
            or self._since_keyframe + 1 >= self.max_non_keyframe_gap
        )

    def advance(self, kept: bool, outputs: dict[str, Tensor]) -> None:
        """Count a frame; if kept, make it the last keyframe."""
        self._frames += 1
        self._since_keyframe = 0 if kept else self._since_keyframe + 1
        if kept and self.by_flow and 'pose_enc' in outputs:
            self.set_reference(outputs['pose_enc'][0, -1])


def keyframes_for(config: StreamConfig) -> Keyframes:
    """Return the Keyframes for the `keyframe_policy` of `config`."""
    if config.keyframe_policy == 'flow':
        return Keyframes(1, config.flow_threshold, config.max_non_keyframe_gap)
    return Keyframes(config.keyframe_interval)


def mean_flow(pose_enc: Tensor, depth: Tensor, reference: Tensor) -> Tensor:
    """
    Return the mean optical flow from a frame to a reference camera [px].

    `pose_enc` and `reference` (9,) are the pose encodings of the frame and of the reference
    camera; `depth` (H, W) is the frame's z-depth. Uses the points of every 8th row and column that
    are in front of both cameras; 0 if there are none.
    """
    T_world_cam, K = decode_pose(torch.stack((pose_enc, reference)), *depth.shape)
    points = unproject(depth, K[0], GRID_STRIDE)
    T_reference_cam = invert(T_world_cam[1]) @ T_world_cam[0]
    points = points @ T_reference_cam[:3, :3].T + T_reference_cam[:3, 3]
    seen = points / points[..., 2:].clamp_min(_NEAR)
    unmoved = unproject(torch.ones_like(depth), K[1], GRID_STRIDE)
    # Both are on the plane z = 1 of the reference camera; K scales their difference to pixels.
    shift = (seen - unmoved) @ K[1].T
    valid = (depth[::GRID_STRIDE, ::GRID_STRIDE] > _NEAR) & (points[..., 2] > _NEAR)
    flow = torch.where(valid, shift[..., :2].norm(dim=-1), 0.0)
    return flow.sum() / valid.sum().clamp_min(1)


def interval_for(frames: int, scale_frames: int, max_keyframes: int) -> int:
    """Return the smallest interval at which `frames` frames give at most `max_keyframes`."""
    return max(-(-(frames - scale_frames) // (max_keyframes - scale_frames)), 1)
