"""Residual block of the patch encoder, the trunk and the camera head (spec section 2)."""

from lingbot_map.layers.attention import Attend, attend_fully, Attention, LayerNorm, project
from lingbot_map.layers.rope import Rotary
import torch
from torch import nn, Tensor
from torch.nn import functional as F


class LayerScale(nn.Module):
    """Scale channels by learned factors."""

    def __init__(self, dim: int, value: float = 1.0):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Mlp(nn.Module):
    """Two linear layers with an exact GELU between them."""

    def __init__(self, dim: int, hidden: int, out: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(project(self.fc1, x)))


class Block(nn.Module):
    """
    Pre-norm attention and MLP with LayerScale.

    `attn_pre`, `attn.proj` and `ffn_residual` are separate so that each can be compiled without
    the attention over the cache (spec section 16). `attn_post` is everything after attention.
    """

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float, eps: float = 1e-5, qk_norm: bool = False
    ):
        super().__init__()
        self.norm1 = LayerNorm(dim, eps=eps)
        self.attn = Attention(dim, num_heads, qk_norm)
        self.ls1 = LayerScale(dim)
        self.norm2 = LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), dim)
        self.ls2 = LayerScale(dim)

    def forward(
        self, x: Tensor, rotary: Rotary | None = None, attend: Attend = attend_fully
    ) -> Tensor:
        """Return tokens (B, N, dim); `attend` computes attention from queries, keys, values."""
        q, k, v = self.attn_pre(x, rotary)
        return self.attn_post(x, attend(q, k, v))

    def attn_pre(self, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys, values after norm, projection, q/k norm and rotary encoding."""
        return self.attn.heads(self.norm1(x), rotary)

    def attn_post(self, x: Tensor, attended: Tensor) -> Tensor:
        """Project `attended`, add it to x (B, N, dim) and apply the MLP."""
        return self.ffn_residual(x + self.ls1(self.attn.merge(attended)))

    def ffn_residual(self, x: Tensor) -> Tensor:
        """Return x + LayerScale(MLP(norm(x)))."""
        return x + self.ls2(self.mlp(self.norm2(x)))
