"""CameraHead: iterative regression of pose and field of view (spec section 9)."""

from collections.abc import Callable
from functools import partial

from lingbot_map.layers.attention import LayerNorm
from lingbot_map.layers.block import Block, Mlp
from lingbot_map.layers.rope import rope_3d, Rotary
import torch
from torch import nn, Tensor
from torch.nn import functional as F

CameraAttend = Callable[[int, int, Tensor, Tensor, Tensor], Tensor]
POSE_DIM = 9  # tx ty tz, qx qy qz qw, fov_h fov_w


class CameraHead(nn.Module):
    """Refine a pose encoding in `iterations` steps; one camera token per frame."""

    def __init__(
        self,
        dim: int,
        depth: int,
        num_heads: int,
        iterations: int,
        mlp_ratio: float = 4.0,
        rope_theta: float | None = None,
    ):
        super().__init__()
        self.iterations = iterations
        self.head_dim = dim // num_heads
        self.rope_theta = rope_theta  # None: no temporal encoding
        self.token_norm = LayerNorm(dim, eps=1e-5)
        self.trunk = nn.ModuleList(Block(dim, num_heads, mlp_ratio) for _ in range(depth))
        self.trunk_norm = LayerNorm(dim, eps=1e-5)
        self.empty_pose_tokens = nn.Parameter(torch.zeros(1, 1, POSE_DIM))
        self.embed_pose = nn.Linear(POSE_DIM, dim)
        self.poseLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 3 * dim))
        self.pose_branch = Mlp(dim, dim // 2, POSE_DIM)

    def forward(self, tokens: Tensor, index: Tensor, attend: CameraAttend) -> list[Tensor]:
        """
        Return the pose encoding (B, S, 9) after each iteration.

        `tokens` (B, S, dim) float32; `index` (S,) temporal positions;
        `attend(iteration, block, q, k, v)` computes attention across frames.
        """
        z = self.token_norm(tokens)
        rotary = self.rotary(index)
        raw, outputs = None, []
        for iteration in range(self.iterations):
            pose = self.empty_pose_tokens.expand(*z.shape[:2], -1) if raw is None else raw
            y = self.modulate(z, pose)
            for depth, block in enumerate(self.trunk):
                y = block(y, rotary, partial(attend, iteration, depth))
            delta = self.pose_branch(self.trunk_norm(y))
            raw = delta if raw is None else raw + delta
            outputs.append(torch.cat((raw[..., :7], F.relu(raw[..., 7:])), -1))
        return outputs

    def modulate(self, z: Tensor, pose: Tensor) -> Tensor:
        """Condition tokens on the current pose (adaptive layer norm, eps 1e-6)."""
        shift, scale, gate = self.poseLN_modulation(self.embed_pose(pose)).chunk(3, -1)
        return gate * (F.layer_norm(z, z.shape[-1:], eps=1e-6) * (1 + scale) + shift) + z

    def rotary(self, index: Tensor) -> Rotary | None:
        """Return the encoding of positions (index, 0, 0), or None without temporal encoding."""
        if self.rope_theta is None:
            return None
        positions = F.pad(index[:, None], (0, 2))
        return rope_3d(positions, self.head_dim, self.rope_theta)


def block_causal(frames: int, block: int, scale_frames: int) -> Tensor:
    """Return the camera head's mask (S, S) for a non-streaming call (spec section 9)."""
    number = torch.arange(frames)
    seen = number[None] < (number[:, None] // block + 1) * block
    seen[:scale_frames, :scale_frames] = True
    return seen
