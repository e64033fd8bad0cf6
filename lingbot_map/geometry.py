"""
Rotations, pose encoding, intrinsics and unprojection (spec section 12).

`T_a_b` maps points from frame b to frame a. Camera axes: x right, y down, z forward (OpenCV).
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

# Rotates optical axes (x right, y down, z forward) to REP-103 axes (x forward, y left, z up).
R_REP103_OPTICAL = np.array([[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])
MIN_FOV, MAX_FOV = 1e-3, np.pi - 1e-3  # [rad]; the head may return 0: infinite focal length


def quaternion_to_matrix(q_xyzw: Tensor) -> Tensor:
    """Return rotations (..., 3, 3) of quaternions of any norm; norm 0 gives the identity."""
    norm = q_xyzw.square().sum(-1, keepdim=True)
    identity = torch.zeros_like(q_xyzw)
    identity[..., 3] = 1
    q_xyzw = torch.where(norm > 0, q_xyzw, identity)
    x, y, z, w = q_xyzw.unbind(-1)
    s = 2 / q_xyzw.square().sum(-1)
    return torch.stack(
        (
            1 - s * (y * y + z * z),
            s * (x * y - z * w),
            s * (x * z + y * w),
            s * (x * y + z * w),
            1 - s * (x * x + z * z),
            s * (y * z - x * w),
            s * (x * z - y * w),
            s * (y * z + x * w),
            1 - s * (x * x + y * y),
        ),
        -1,
    ).unflatten(-1, (3, 3))


def matrix_to_quaternion(R: Tensor) -> Tensor:
    """Return unit quaternions xyzw with w >= 0 of rotations (..., 3, 3)."""
    r = R.flatten(-2).unbind(-1)
    xx, yy, zz = r[0], r[4], r[8]
    doubled = (
        torch.stack((1 + xx - yy - zz, 1 - xx + yy - zz, 1 - xx - yy + zz, 1 + xx + yy + zz), -1)
        .clamp_min(0)
        .sqrt()
    )  # |2x| |2y| |2z| |2w|
    x2, y2, z2, w2 = doubled.square().unbind(-1)
    xy, xz, yz = r[1] + r[3], r[2] + r[6], r[5] + r[7]
    wx, wy, wz = r[7] - r[5], r[2] - r[6], r[3] - r[1]
    candidates = torch.stack(
        (
            torch.stack((x2, xy, xz, wx), -1),
            torch.stack((xy, y2, yz, wy), -1),
            torch.stack((xz, yz, z2, wz), -1),
            torch.stack((wx, wy, wz, w2), -1),
        ),
        -2,
    )
    candidates = candidates / (2 * doubled.clamp_min(0.1)[..., None])
    best = doubled.argmax(-1)[..., None, None].expand(*doubled.shape[:-1], 1, 4)
    q = candidates.gather(-2, best).squeeze(-2)
    return torch.where(q[..., 3:] < 0, -q, q)


def decode_pose(pose_enc: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """
    Return T_world_cam (..., 4, 4) and intrinsics (..., 3, 3) in pixels.

    Fields of view are clamped to the inside of (0, pi); a zero quaternion gives no rotation.
    """
    fov_y, fov_x = pose_enc[..., 7:].clamp(MIN_FOV, MAX_FOV).unbind(-1)
    K = pose_enc.new_zeros(*pose_enc.shape[:-1], 3, 3)
    K[..., 0, 0], K[..., 0, 2] = width / 2 / torch.tan(fov_x / 2), width / 2
    K[..., 1, 1], K[..., 1, 2] = height / 2 / torch.tan(fov_y / 2), height / 2
    K[..., 2, 2] = 1
    return rigid(quaternion_to_matrix(pose_enc[..., 3:7]), pose_enc[..., :3]), K


def encode_pose(T_world_cam: Tensor, K: Tensor, height: int, width: int) -> Tensor:
    """Return the pose encoding (..., 9) of camera-to-world poses and intrinsics in pixels."""
    fov_y = 2 * torch.atan(height / 2 / K[..., 1, 1])
    fov_x = 2 * torch.atan(width / 2 / K[..., 0, 0])
    quaternion = matrix_to_quaternion(T_world_cam[..., :3, :3])
    fov = torch.stack((fov_y, fov_x), -1)
    return torch.cat((T_world_cam[..., :3, 3], quaternion, fov), -1)


def rigid(R: Tensor, t: Tensor) -> Tensor:
    """Return transforms (..., 4, 4) from rotations (..., 3, 3) and translations (..., 3)."""
    T = F.pad(torch.cat((R, t[..., None]), -1), (0, 0, 0, 1))
    T[..., 3, 3] = 1
    return T


def unproject(depth: Tensor, K: Tensor, stride: int = 1) -> Tensor:
    """
    Unproject z-depth (..., H, W) to camera points (..., H, W, 3), same unit; K (..., 3, 3) [px].

    Only every `stride`-th row and column is used.
    """
    height, width = depth.shape[-2:]
    v, u = torch.meshgrid(
        torch.arange(0, height, stride, device=depth.device),
        torch.arange(0, width, stride, device=depth.device),
        indexing='ij',
    )
    depth = depth[..., ::stride, ::stride]
    K = K[..., None, None, :, :].to(depth.dtype)
    x = (u - K[..., 0, 2]) / K[..., 0, 0]
    y = (v - K[..., 1, 2]) / K[..., 1, 1]
    return torch.stack((x * depth, y * depth, depth), -1)


def invert(T: np.ndarray) -> np.ndarray:
    """Return the inverse of rigid transforms (..., 4, 4), numpy or torch."""
    if isinstance(T, Tensor):
        R_inverse = T[..., :3, :3].transpose(-1, -2)
        return rigid(R_inverse, -(R_inverse @ T[..., :3, 3:])[..., 0])
    R_inverse = np.swapaxes(T[..., :3, :3], -1, -2)
    inverse = np.zeros_like(T)
    inverse[..., :3, :3] = R_inverse
    inverse[..., :3, 3] = -np.einsum('...ij,...j->...i', R_inverse, T[..., :3, 3])
    inverse[..., 3, 3] = 1
    return inverse
