"""Training losses: poses, fields of view, and depth with confidence."""

from dataclasses import dataclass

from lingbot_map.geometry import encode_pose, invert, quaternion_to_matrix
from lingbot_map.synthetic.rendering import Clip
import torch
from torch import Tensor
from torch.nn import functional as F

RELATIVE_OFFSETS = (1, 4, 12)  # [frames] between two poses for relative errors
ROTATION_WEIGHT = 2.0  # per radian, relative to the weighted translation error
FOV_WEIGHT = 1.0
CONFIDENCE_REWARD = 0.2
ITERATION_DECAY = 0.6  # weight of an earlier camera iteration relative to the next
SMALL = 1e-6


@dataclass(frozen=True)
class Targets:
    """Targets in the first camera's frame; unit of length: mean depth of the first frame."""

    R: Tensor  # (B, S, 3, 3)
    t: Tensor  # (B, S, 3)
    fov: Tensor  # (B, S, 2), vertical and horizontal [rad]
    log_depth: Tensor  # (B, S, H, W)
    weight: Tensor  # (B, 1) 4 / path length: translation errors count relative to the path


def make_targets(clip: Clip) -> Targets:
    """Return the targets for rendered clips."""
    unit = clip.depth[:, 0].mean((-1, -2))[:, None]
    T = invert(clip.T_world_cam[:, :1].double()) @ clip.T_world_cam.double()
    encoded = encode_pose(T, clip.K.double(), *clip.depth.shape[-2:]).float()
    t = (T[..., :3, 3] / unit[..., None].double()).float()
    path = t.diff(dim=1).norm(dim=-1).sum(1, keepdim=True)
    return Targets(
        T[..., :3, :3].float(),
        t,
        encoded[..., 7:],
        (clip.depth / unit[..., None, None]).log(),
        4 / path.clamp_min(0.2),
    )


def pose_loss(pose_enc_list: list[Tensor], target: Targets) -> Tensor:
    """Return the loss of the pose encodings (B, S, 9) of all iterations; the last weighs most."""
    total = target.t.new_zeros(())
    for age, pose_enc in enumerate(reversed(pose_enc_list)):
        total = total + ITERATION_DECAY**age * _pose_error(pose_enc, target)
    return total


def depth_loss(log_depth: Tensor, confidence: Tensor, truth: Tensor) -> Tensor:
    """Return the loss of log depth (B, S, H, W), weighted by confidence, and of its gradient."""
    error = (log_depth - truth).abs()
    weighted = (confidence * error - CONFIDENCE_REWARD * confidence.log()).mean()
    slope = sum((log_depth.diff(dim=dim) - truth.diff(dim=dim)).abs().mean() for dim in (-1, -2))
    return weighted + error.mean() + slope


def _pose_error(pose_enc: Tensor, target: Targets) -> Tensor:
    R, t, q = quaternion_to_matrix(pose_enc[..., 3:7]), pose_enc[..., :3], pose_enc[..., 3:7]
    error = _rigid_error(R, t, target.R, target.t, target.weight)
    for offset in RELATIVE_OFFSETS:
        if offset < R.shape[1]:
            error = error + _rigid_error(
                *_relative(R, t, offset), *_relative(target.R, target.t, offset), target.weight
            )
    fov = F.l1_loss(pose_enc[..., 7:], target.fov)
    length = (q.square().sum(-1) - 1).square().mean()
    return error + FOV_WEIGHT * fov + 0.01 * length


def _relative(R: Tensor, t: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Return the poses of frames k + offset relative to frames k."""
    inverse = R[:, :-offset].mT
    step = (t[:, offset:] - t[:, :-offset])[..., None]
    return inverse @ R[:, offset:], (inverse @ step)[..., 0]


def _rigid_error(R: Tensor, t: Tensor, R_true: Tensor, t_true: Tensor, weight: Tensor) -> Tensor:
    # |R - R'| is sqrt(2) times the angle if that is small; it has no sign ambiguity.
    angle = ((R - R_true).square().sum((-1, -2)) / 2 + SMALL).sqrt()
    distance = ((t - t_true).square().sum(-1) + SMALL).sqrt()
    return (weight * distance).mean() + ROTATION_WEIGHT * angle.mean()


def log_of(depth: Tensor) -> Tensor:
    """Return the log (B, S, H, W) of the head's depth (B, S, H, W, 1)."""
    return torch.log(depth[..., 0].clamp_min(SMALL))
