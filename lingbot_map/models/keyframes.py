"""Which frames stay in memory: every n-th, or those the camera moved for (spec section 15)."""

from lingbot_map.config import StreamConfig
from lingbot_map.geometry import decode_pose, invert, unproject
import torch
from torch import Tensor

GRID_STRIDE = 8  # pixels between the points whose displacement is measured
_NEAR = 1e-6  # depths up to this are no points


class Keyframes:
    """
    Decides frame by frame, after the scale batch, what is kept.

    Call `start` after the scale batch. Then for every frame `keeps_early` before it runs, `keeps`
    once its outputs are there, and `advance` when the decision has been carried out. A
    `flow_threshold` above 0 [px] takes the place of `interval`: the frame runs uncommitted and is
    kept if it is the first, if the mean flow against the last keyframe exceeds the threshold, or
    if it is the `max_non_keyframe_gap`-th since. A model without depth head keeps every frame.
    """

    def __init__(
        self, interval: int = 1, flow_threshold: float = 0.0, max_non_keyframe_gap: int = 30
    ):
        self.interval = interval
        self.flow_threshold = flow_threshold
        self.max_non_keyframe_gap = max_non_keyframe_gap
        self.flow: float | None = None  # of the newest frame that `keeps` measured [px]
        self.start(None)

    @property
    def by_flow(self) -> bool:
        return self.flow_threshold > 0

    def start(self, pose_enc: Tensor | None) -> None:
        """Begin after a scale batch whose last frame has the pose encoding `pose_enc` (9,)."""
        self._frames = self._since_keyframe = 0
        self.set_reference(pose_enc)

    def set_reference(self, pose_enc: Tensor | None) -> None:
        """Replace the last keyframe's pose encoding (9,), when the world frame changes."""
        self._reference = None if pose_enc is None else pose_enc.clone()

    def keeps_early(self) -> bool:
        """Return the `keep` of `StreamMemory.write`: by flow, a frame is not kept at first."""
        return not self.by_flow and self._frames % max(self.interval, 1) == 0

    def keeps(self, outputs: dict[str, Tensor]) -> bool:
        """Return whether to commit a frame, given the network's outputs (1, 1, ...) for it."""
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
        """Count a frame; a kept one becomes the last keyframe."""
        self._frames += 1
        self._since_keyframe = 0 if kept else self._since_keyframe + 1
        if kept and self.by_flow and 'pose_enc' in outputs:
            self.set_reference(outputs['pose_enc'][0, -1])


def keyframes_for(config: StreamConfig) -> Keyframes:
    """Return what decides by the `keyframe_policy` of `config`."""
    if config.keyframe_policy == 'flow':
        return Keyframes(1, config.flow_threshold, config.max_non_keyframe_gap)
    if config.keyframe_policy == 'auto':
        return Keyframes(
            interval_for(config.expected_frames, config.num_scale_frames, config.max_keyframes)
        )
    return Keyframes(config.keyframe_interval)


def mean_flow(pose_enc: Tensor, depth: Tensor, reference: Tensor) -> Tensor:
    """
    Return how far the points of a frame are displaced in a reference camera, on average [px].

    `pose_enc` and `reference` (9,) are the encoded poses of the frame and of the reference camera,
    `depth` (H, W) the frame's z-depth. Points of every 8th row and column count if they lie before
    both cameras; 0 if none does.
    """
    T_world_cam, K = decode_pose(torch.stack((pose_enc, reference)), *depth.shape)
    points = unproject(depth, K[0], GRID_STRIDE)
    T_reference_cam = invert(T_world_cam[1]) @ T_world_cam[0]
    points = points @ T_reference_cam[:3, :3].T + T_reference_cam[:3, 3]
    seen = points / points[..., 2:].clamp_min(_NEAR)
    unmoved = unproject(torch.ones_like(depth), K[1], GRID_STRIDE)
    # Both lie on the plane z = 1 of the reference camera: its focal lengths make pixels of them.
    shift = (seen - unmoved) @ K[1].T
    valid = (depth[::GRID_STRIDE, ::GRID_STRIDE] > _NEAR) & (points[..., 2] > _NEAR)
    flow = torch.where(valid, shift[..., :2].norm(dim=-1), 0.0)
    return flow.sum() / valid.sum().clamp_min(1)


def interval_for(frames: int, scale_frames: int, max_keyframes: int) -> int:
    """Return the smallest interval that keeps at most `max_keyframes` of a run of `frames`."""
    return max(-(-(frames - scale_frames) // (max_keyframes - scale_frames)), 1)
