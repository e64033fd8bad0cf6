"""Multi-head self-attention with a fused projection; the caller applies the mask."""

from collections.abc import Callable

from lingbot_map.layers.rope import Rotary, rotate
import torch
from torch import nn, Tensor
from torch.nn import functional as F

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class LayerNorm(nn.LayerNorm):
    """Layer norm in float32; returns float32 for any input precision."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps)


def project(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply `layer` in the precision of its weights."""
    return layer(x.to(layer.weight.dtype))


class Attention(nn.Module):
    """Projections of an attention layer; has learned q and k norms only with `qk_norm`."""

    def __init__(self, dim: int, num_heads: int, qk_norm: bool = False):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = LayerNorm(dim // num_heads, eps=1e-5) if qk_norm else nn.Identity()
        self.k_norm = LayerNorm(dim // num_heads, eps=1e-5) if qk_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim)

    def heads(self, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys, values (B, heads, N, head_dim) of tokens (B, N, dim)."""
        qkv = project(self.qkv, x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        return q.to(v.dtype), k.to(v.dtype), v

    def merge(self, x: Tensor) -> Tensor:
        """Return projected tokens (B, N, dim) of attended heads (B, heads, N, head_dim)."""
        return project(self.proj, x.transpose(1, 2).flatten(2))


def attend_fully(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from every query to every key."""
    return F.scaled_dot_product_attention(q, k, v)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend from query i to key j where the boolean mask (N, M) is true."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def init_linear(module: nn.Module) -> None:
    """Initialise `module` if it is linear: truncated normal weights (std 0.02), zero bias."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def parameter_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of the first parameter of `module` with two or more dimensions."""
    return next(p.dtype for p in module.parameters() if p.dim() > 1)
