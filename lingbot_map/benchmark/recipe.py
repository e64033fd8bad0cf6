"""
Reproducible weights, computed from the state-dict key: for models without a checkpoint.

Reference data and benchmarks need weights that anyone can reproduce, at a scale where no layer
saturates or vanishes. Element i of the tensor with key K is a 24-bit number from a 64-bit mixer
(seeded with the SHA-256 of salt + K), with a scale and offset that depend on the key.
"""

from concurrent.futures import ThreadPoolExecutor
import hashlib
import math
import os

import numpy as np
import torch

# Values per work item; the 64-bit scratch array (512 KiB) fits in the cache of a core.
CHUNK = 1 << 16


def scale_and_offset(key: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return (a, b); the tensor's values are a * u + b with u uniform in [-1, 1)."""
    *parents, last = key.split('.')
    is_norm = bool(parents) and 'norm' in parents[-1]
    if key.endswith('pose_branch.fc2.bias'):
        return 0.1, 0.4
    if key.endswith('pose_branch.fc2.weight'):
        return 0.2 * _unit_gain(key, shape), 0.0
    if key.endswith('output_conv2.2.bias'):
        return 0.1, 0.0
    if last == 'gamma':
        return 0.15, 0.3
    if is_norm and last == 'weight':
        return 0.3, 1.0
    if last == 'bias':
        return 0.2, 0.0
    if last == 'weight':
        return _unit_gain(key, shape), 0.0
    return 1.0, 0.0


def _unit_gain(key: str, shape: tuple[int, ...]) -> float:
    """Return the half-width of the uniform distribution that preserves the input variance."""
    transposed = '.resize_layers.0.' in key or '.resize_layers.1.' in key
    fan = shape[0] if transposed else math.prod(shape[1:])
    return math.sqrt(3 / fan)


def fill_values(key: str, values: np.ndarray, salt: str = '') -> None:
    """Fill a C-contiguous float32 array with the values of the tensor `key`."""
    scale, offset = scale_and_offset(key, values.shape)
    seed = int.from_bytes(hashlib.sha256((salt + key).encode()).digest()[:8], 'little')
    flat = values.reshape(-1)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        starts = range(0, flat.size, CHUNK)
        for _ in pool.map(lambda s: _fill_chunk(flat, s, seed, scale, offset), starts):
            pass


def _fill_chunk(flat: np.ndarray, start: int, seed: int, scale: float, offset: float) -> None:
    out = flat[start : start + CHUNK]
    z = np.arange(start + 1, start + 1 + out.size, dtype=np.uint64)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(seed)
    shifted = np.empty_like(z)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        np.right_shift(z, np.uint64(shift), out=shifted)
        z ^= shifted
        z *= np.uint64(factor)
    z >>= np.uint64(40)
    out[:] = z  # 24 bits: exact in float32
    out -= np.float32(2**23)
    out *= np.float32(2**-23)
    out *= np.float32(scale)
    out += np.float32(offset)


@torch.no_grad()
def fill_model(model: torch.nn.Module, salt: str = '', through_float16: bool = False) -> None:
    """
    Overwrite all weights of the model, for any device and dtype.

    Weights on the meta device become float32 tensors on the CPU, so a large model is never in
    memory twice. `through_float16` rounds the values to float16, as small reference models are
    stored.
    """
    created = {}
    for key, weight in model.state_dict().items():
        values = torch.empty(weight.shape)
        fill_values(key, values.numpy(), salt)
        if through_float16:
            values = values.half().float()
        if weight.is_meta:
            created[key] = values
        else:
            weight.copy_(values)
    model.load_state_dict(created, strict=False, assign=True)
