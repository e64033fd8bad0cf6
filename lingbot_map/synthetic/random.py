"""Random numbers that depend only on seed and position, bit-identical on every device."""

import functools
import math

import torch

_STREAM = 0x632BE5AB
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_CELL_I = 0x9E3779B1 - 2**32
_CELL_J = 0x85EBCA77 - 2**32


def uniforms(
    seeds: torch.Tensor, shapes: tuple[tuple[int, tuple[int, ...]], ...]
) -> dict[int, torch.Tensor]:
    """
    Return float64 numbers (B, *shape) in [0, 1) per stream, for int64 seeds (B,).

    shapes contains (stream, shape) pairs. A number depends only on seed, stream and position.
    Computes splitmix64 for all streams at once, since launches dominate the time on a GPU.
    """
    sizes = [math.prod(shape) for _, shape in shapes]
    streams, counters = _positions(shapes, seeds.device)
    start = _mix64(_mix64(seeds)[:, None] + streams)
    bits = _mix64(start + counters)
    numbers = (_shift64(bits, 11).double() * 2.0**-53).split(sizes, dim=1)
    return {
        stream: part.reshape(-1, *shape)
        for (stream, shape), part in zip(shapes, numbers, strict=True)
    }


@functools.cache
def constant(values: tuple, device: torch.device) -> torch.Tensor:
    """Return the values as a cached float64 tensor on the device."""
    return torch.tensor(values, dtype=torch.float64, device=device)


def between(draw: torch.Tensor, ranges: tuple[tuple[float, float], ...]) -> torch.Tensor:
    """Map numbers (..., n) in [0, 1) to the n ranges (low, high)."""
    low, high = constant(ranges, draw.device).unbind(-1)
    return low + (high - low) * draw


def hash32(x: torch.Tensor) -> torch.Tensor:
    """Return int32 hashes of int32 numbers ('lowbias32', C. Wellons)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def hash_cell(i: torch.Tensor, j: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return int32 hashes of the int32 cells (i, j), for the pattern with the int32 key."""
    return hash32(i * _CELL_I + j * _CELL_J + key)


def hash_fraction(hashed: torch.Tensor, part: int) -> torch.Tensor:
    """Return float32 numbers in [0, 1] from ten bits of each hash; part is 0, 1 or 2."""
    return ((hashed >> (10 * part)) & 1023).float() * (1.0 / 1023.0)


@functools.cache
def _positions(shapes, device):
    sizes = [math.prod(shape) for _, shape in shapes]
    streams = torch.tensor([stream * _STREAM for stream, _ in shapes])
    counters = torch.cat([(torch.arange(size) + 1) * _GOLDEN for size in sizes])
    return streams.repeat_interleave(torch.tensor(sizes)).to(device), counters.to(device)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift64(x, 30)) * _MIX_1
    x = (x ^ _shift64(x, 27)) * _MIX_2
    return x ^ _shift64(x, 31)


def _shift64(x: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts int64 arithmetically; the mask clears the copies of the sign bit.
    return (x >> bits) & ((1 << (64 - bits)) - 1)
