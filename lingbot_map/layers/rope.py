"""
Rotary position encodings of queries and keys (spec section 7).

A `Rotary` holds the cosines and sines for a token sequence; `rotate` applies them. Angles are
computed from the positions on demand, so no table limits the sequence length.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """Cosines and sines (..., N, pairs), float32; `interleaved`: channels 2j and 2j + 1 pair."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


def grid_positions(rows: int, cols: int, device: torch.device | None = None) -> Tensor:
    """Return (rows * cols, 2) integer positions (y, x) of patches in row-major order."""
    y, x = torch.meshgrid(
        torch.arange(rows, device=device), torch.arange(cols, device=device), indexing='ij'
    )
    return torch.stack((y, x), -1).reshape(-1, 2)


def rope_2d(positions: Tensor, head_dim: int, theta: float = 100.0) -> Rotary:
    """
    Return the encoding of (N, 2) positions (y, x), half of the channels per axis.

    In each half, channel i pairs with channel i + head_dim / 4 (spec section 7.1).
    """
    half = head_dim // 2
    exponent = torch.arange(0, half, 2, device=positions.device, dtype=torch.float32) / half
    angles = positions.float()[..., None] * theta**-exponent
    return Rotary(angles.cos(), angles.sin(), interleaved=False)


def rope_3d(positions: Tensor, head_dim: int, theta: float = 10000.0) -> Rotary:
    """
    Return the encoding of (..., 3) positions (t, y, x); channels are split 20:22:22 of 64.

    Channels 2j and 2j + 1 pair; angles are computed in float64 (spec section 7.2).
    """
    spatial = 2 * (head_dim * 11 // 64)
    angles = [
        positions[..., axis, None].double() * _frequencies(budget, theta, positions.device)
        for axis, budget in enumerate((head_dim - 2 * spatial, spatial, spatial))
    ]
    angles = torch.cat(angles, -1)
    return Rotary(angles.cos().float(), angles.sin().float(), interleaved=True)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the channel pairs of queries or keys (..., N, head_dim)."""
    if rotary.interleaved:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        a, b = x.unflatten(-1, (2, 2, -1)).unbind(-2)
    cos, sin = rotary.cos, rotary.sin
    rotated = (a * cos - b * sin, a * sin + b * cos)
    if rotary.interleaved:
        return torch.stack(rotated, -1).flatten(-2)
    return torch.stack(rotated, -2).flatten(-3)


def _frequencies(budget: int, theta: float, device: torch.device) -> Tensor:
    exponent = torch.arange(0, budget, 2, device=device, dtype=torch.float64) / budget
    return theta**-exponent
