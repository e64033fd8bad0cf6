"""
Predict the device memory of a stream before its first frame.

Weights, cached keys and values, and the next window are exact. The working memory of the network
follows a formula with the factors in `Calibration`.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
import logging
from math import prod

from lingbot_map.config import MODEL_PRESETS
from lingbot_map.errors import UserError
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.models.memory import MemoryShape
from lingbot_map.settings import StreamConfig
from lingbot_map.streaming.checkpoint import set_heads_dtype, set_trunk_dtype
from lingbot_map.streaming.preprocess import crop_map
import torch

GB = 1e9
_FLOAT32 = 4  # bytes
# In these modes CUDA graphs keep the memory of their passes; passes without a graph need more.
_GRAPH_MODES = ('cuda-graph', 'reduce-overhead', 'max-autotune')
LOGGER = logging.getLogger(__name__)
_WINDOW_STEP = 8  # keyframes; also the smallest window that `fit` chooses
_USABLE = 0.95  # share of the free memory; the rest is for fragmentation and other programs
Fits = Callable[[StreamConfig], bool]


@dataclass(frozen=True)
class Calibration:
    """
    Memory of one pass of the network, without weights and caches.

    The factors count the live tensors at the peak of an eager pass; test_memory_budget counts them
    again, without a device. `workspace` is the rest of the peak measured on CUDA: workspace of
    matrix products and convolutions, and rounding by the allocator. To print the measured peak:
    `pytest -m cuda test/library/test_memory_budget.py`.
    """

    trunk_values: float = 13.0  # in the trunk's precision, per token and channel, in a block
    trunk_floats: float = 3.0  # float32, per token and channel, in a block
    head_floats_per_feature: float = 1.11  # per pixel and feature of the frames decoded together
    head_floats: float = 64.0  # per pixel of the same frames
    head_floats_once: float = 0.5  # per pixel and feature, for any number of frames
    image_floats: float = 6.0  # per pixel of all frames: inputs and outputs
    workspace: float = 0.07e9  # bytes


CALIBRATION = Calibration()


@dataclass(frozen=True)
class MemoryBudget:
    """Sizes in bytes; `size` is (width, height) of the network's input [px]."""

    size: tuple[int, int]
    tokens: int  # per frame
    weights: int
    cache: int  # keys and values of the trunk
    camera_cache: int  # those of the camera head
    next_window: int  # caches, images and depths of the overlap, prepared for a roll-over
    working: int  # of a running pass

    @property
    def total(self) -> int:
        """Peak memory [bytes]."""
        parts = (self.weights, self.cache, self.camera_cache, self.next_window, self.working)
        return sum(parts)

    def rows(self) -> list[tuple[str, int]]:
        """Return the name and the size [bytes] of each part of the total."""
        return [
            ('weights', self.weights),
            ('key-value cache', self.cache),
            ("camera head's cache", self.camera_cache),
            ('next window', self.next_window),
            ('working memory', self.working),
        ]

    def __str__(self) -> str:
        parts = ', '.join(f'{name} {size / GB:.2f}' for name, size in self.rows())
        width, height = self.size
        return (
            f'{width}x{height} pixels ({self.tokens} tokens per frame) need '
            f'{self.total / GB:.2f} GB: {parts}'
        )


def blank_model(
    name: str, dtype: torch.dtype, heads_dtype: str = 'tf32', compile_mode: str = 'off'
) -> GCTStream:
    """
    Return the preset `name` on the meta device, for `predict`; its weights take no memory.

    `heads_dtype` is one of config.HEADS_DTYPES, `compile_mode` a result of `compiling.resolve`.
    """
    with torch.device('meta'):
        model = GCTStream.from_config(MODEL_PRESETS[name])
    set_trunk_dtype(model, dtype)
    set_heads_dtype(model, heads_dtype)
    model.compile_mode = compile_mode
    return model


def predict(model: GCTStream, config: StreamConfig, height: int, width: int) -> MemoryBudget:
    """
    Return the memory that a StreamEngine with `model` needs for images of `height` x `width` [px].

    The weights of `model` may be on any device, also on 'meta'.

    :raises UserError: the image is too wide for the network, or `image_width` is no multiple of
        the patch size.
    """
    patch = model.patch_size
    if config.image_width % patch:
        raise UserError(
            f"'image_width' is {config.image_width}; "
            f'it must be a multiple of the patch size {patch}'
        )
    size = crop_map(width, height, config.image_width, patch).network_size
    patches = (size[0] // patch) * (size[1] // patch)
    dtype = model.aggregator.dtype
    shape = _shape(model, config, patches, config.max_keyframes)
    cache, camera_cache = _cache_bytes(shape, dtype)
    return MemoryBudget(
        size=size,
        tokens=patches + shape.specials,
        weights=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        cache=cache,
        camera_cache=camera_cache,
        next_window=_next_window_bytes(model, config, patches, dtype),
        working=round(_working_bytes(model, config.num_scale_frames, patches)),
    )


def _shape(model: GCTStream, config: StreamConfig, patches: int, keyframes: int) -> MemoryShape:
    return replace(
        model.memory_shape(patches, keyframes),
        anchors=config.num_scale_frames,
        window=config.sliding_window,
    )


def _cache_bytes(shape: MemoryShape, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of keys and values in a StreamMemory: of the trunk, of the camera head."""
    trunk, camera = prod(shape.trunk_buffer), prod(shape.camera_buffer)
    return 2 * trunk * dtype.itemsize, 2 * camera * _FLOAT32


def _next_window_bytes(
    model: GCTStream, config: StreamConfig, patches: int, dtype: torch.dtype
) -> int:
    """Return the bytes of a full `NextWindow`; 0 without roll-over."""
    if config.on_limit != 'roll_over':
        return 0
    overlap, pixels = config.overlap_keyframes, patches * model.patch_size**2
    images = 3 * pixels * min(config.num_scale_frames, overlap)
    depths = 2 * overlap * pixels * _FLOAT32
    return sum(_cache_bytes(_shape(model, config, patches, overlap), dtype)) + images + depths


def _working_bytes(model: GCTStream, frames: int, patches: int) -> float:
    """Return the peak of the pass over the scale batch, which is the largest pass [bytes]."""
    pass_bytes = _pass_bytes(model, frames, patches)
    kept_by_graphs = pass_bytes if model.compile_mode in _GRAPH_MODES else 0
    return pass_bytes + kept_by_graphs + CALIBRATION.workspace


def _pass_bytes(model: GCTStream, frames: int, patches: int) -> float:
    c, trunk, head = CALIBRATION, model.aggregator, model.depth_head
    channels = (patches + trunk.patch_start_idx) * trunk.camera_token.shape[-1]
    selected = frames * channels * 2 * len(trunk.selected_layers) * _FLOAT32
    trunk_bytes = c.trunk_values * trunk.dtype.itemsize + c.trunk_floats * _FLOAT32
    pixels, features = patches * model.patch_size**2, head.scratch.output_conv1.in_channels
    # Counted as float32 also for bfloat16 heads, since their last layers always run in float32.
    together = 1 if model.compile_mode == 'cuda-graph' else min(frames, head.frames_per_chunk)
    floats = together * (c.head_floats_per_feature * features + c.head_floats)
    decoding = pixels * (floats + c.head_floats_once * features) * _FLOAT32
    images = frames * pixels * c.image_floats * _FLOAT32
    return selected + max(frames * channels * trunk_bytes, decoding) + images


class MemoryLimitError(UserError):
    """A stream needs too much memory; the message names need, limit and settings that fit."""


@dataclass(frozen=True)
class MemoryLimit:
    """Memory that a stream may use."""

    size: float  # bytes
    source: str  # the parameter or device that sets it

    def __str__(self) -> str:
        size = self.size / GB
        return f'the limit is {size:{".2f" if size > 0.1 else ".2g"}} GB ({self.source})'


def memory_limit(gigabytes: float, device: torch.device) -> MemoryLimit | None:
    """
    Return the limit of `gigabytes` (1e9 bytes), or for 0 most of the free memory of `device`.

    Memory reserved by torch counts as free, since the next stream can use it. None: no limit, on a
    CPU.
    """
    if gigabytes:
        return MemoryLimit(gigabytes * GB, 'gpu_memory_limit')
    if device.type != 'cuda':
        return None
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device)
    return MemoryLimit(_USABLE * free, f'{_USABLE:.0%} of what is free on {device}')


def check_memory(
    model: GCTStream, config: StreamConfig, height: int, width: int, limit: MemoryLimit | None
) -> MemoryBudget:
    """
    Return the memory that a stream with images of `height` x `width` [px] needs.

    :raises MemoryLimitError: it is more than `limit`.
    """
    budget = predict(model, config, height, width)
    if limit is not None and budget.total > limit.size:
        raise MemoryLimitError(
            f'{budget}; but {limit}: {_remedy(model, config, height, width, limit)}'
        )
    return budget


def apply_limit(
    model: GCTStream,
    config: StreamConfig,
    height: int,
    width: int,
    limit: MemoryLimit | None,
    may_shrink: bool,
) -> StreamConfig:
    """
    Return settings within `limit` for images of `height` x `width` [px], and log their memory.

    These are `config`, or with `may_shrink` the result of `fit`.

    :raises MemoryLimitError: no such settings.
    """
    if may_shrink and limit is not None:
        shrunk = fit(model, config, height, width, limit) or config
        if shrunk != config:
            LOGGER.warning('%s: going on with %s', limit, changes(config, shrunk))
        config = shrunk
    budget = check_memory(model, config, height, width, limit)
    LOGGER.info('%s%s', budget, f'; {limit}' if limit else '')
    return config


def fit(
    model: GCTStream, config: StreamConfig, height: int, width: int, limit: MemoryLimit
) -> StreamConfig | None:
    """
    Return `config`, reduced as little as possible to fit images of `height` x `width` [px].

    Reduces in this order, each only if the ones before do not suffice: `max_keyframes` down to
    what a full window or a roll-over needs; `sliding_window` in steps of 8 down to 8;
    `image_width` in whole patches down to half. Then raises `max_keyframes` again as far as it
    fits. None: even the smallest settings do not fit.
    """
    fits = _fits(model, height, width, limit)
    shrunk = _shrink(config, model.patch_size, fits)
    if not fits(shrunk):
        return None
    keyframes = range(shrunk.max_keyframes, config.max_keyframes + 1)
    return _largest(shrunk, 'max_keyframes', keyframes, fits)


def _shrink(config: StreamConfig, patch: int, fits: Fits) -> StreamConfig:
    """Return `config` reduced in the order of `fit` until it fits, or the smallest settings."""
    width, keyframes = config.image_width, config.max_keyframes
    least = min(_least_keyframes(config), keyframes)
    windows = range(config.sliding_window, _WINDOW_STEP - 1, -_WINDOW_STEP)[::-1]
    widths = range(-(-width // (2 * patch)) * patch, width + 1, patch)
    shrunk = _largest(config, 'max_keyframes', range(least, keyframes + 1), fits)
    shrunk = _largest(shrunk, 'sliding_window', windows, fits)
    return _largest(shrunk, 'image_width', widths, fits)


def changes(before: StreamConfig, after: StreamConfig) -> str:
    """Return the settings of `after` that differ from `before`, as text."""
    names = [item.name for item in fields(StreamConfig)]
    differ = [name for name in names if getattr(before, name) != getattr(after, name)]
    return ', '.join(f'{name} {getattr(after, name)}' for name in differ)


def _remedy(
    model: GCTStream, config: StreamConfig, height: int, width: int, limit: MemoryLimit
) -> str:
    """
    Return which settings would fit: the largest window, else the result of `fit`.

    If nothing fits, return how much the smallest settings need.
    """
    fits = _fits(model, height, width, limit)
    best = _largest(config, 'sliding_window', range(config.sliding_window + 1), fits)
    if not fits(best):
        best = fit(model, config, height, width, limit)
    if best is None:
        least = _shrink(config, model.patch_size, lambda _: False)
        return (
            f'even the smallest settings (sliding_window {least.sliding_window}, max_keyframes '
            f'{least.max_keyframes}, image_width {least.image_width}) need '
            f'{predict(model, least, height, width).total / GB:.2f} GB'
        )
    return f'{changes(config, best)} would fit'


def _fits(model: GCTStream, height: int, width: int, limit: MemoryLimit) -> Fits:
    return lambda config: predict(model, config, height, width).total <= limit.size


def _least_keyframes(config: StreamConfig) -> int:
    """Return how many keyframes a full window or, if more, a roll-over needs."""
    full = config.num_scale_frames + max(config.sliding_window, 1)
    if config.on_limit != 'roll_over':
        return full
    overlap = config.overlap_keyframes
    return max(full, overlap + max(overlap, config.num_scale_frames))


def _largest(config: StreamConfig, name: str, values: Sequence[int], fits: Fits) -> StreamConfig:
    """Return `config` with the largest of ascending values that fits, or the smallest."""
    if not values:
        return config

    def too_large(value: int) -> bool:
        return not fits(replace(config, **{name: value}))

    count = bisect_right(values, False, key=too_large)
    return replace(config, **{name: values[max(count - 1, 0)]})
