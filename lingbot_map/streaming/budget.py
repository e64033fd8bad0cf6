"""
What a stream takes of the memory of its device, computed before the first frame.

Weights, cached keys and values, and the next window are exact. What the network needs while it
runs follows a formula whose factors `Calibration` holds.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
import logging
from math import prod

from lingbot_map.config import MODEL_PRESETS, StreamConfig
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.models.memory import MemoryShape
from lingbot_map.streaming.checkpoint import set_heads_dtype, set_trunk_dtype
from lingbot_map.streaming.preprocess import crop_map
import torch

GB = 1e9
_FLOAT32 = 4  # bytes
# Modes in which graphs keep the memory of their passes, beside that of passes without a graph.
_GRAPH_MODES = ('cuda-graph', 'reduce-overhead', 'max-autotune')
LOGGER = logging.getLogger(__name__)
_WINDOW_STEP = 8  # keyframes; also the least that a window is shrunk to
_USABLE = 0.95  # of the free memory: the rest is left to fragmentation and to other programs
Fits = Callable[[StreamConfig], bool]


@dataclass(frozen=True)
class Calibration:
    """
    How much memory a pass of the network needs, beside weights and caches.

    The factors count the tensors of an eager pass that are alive at its peak; test_memory_budget
    counts them again, without a device. `workspace` is what the peak measured on CUDA
    (`pytest -m cuda test/library/test_memory_budget.py` prints it) has beyond all that: work space of
    matrix products and convolutions, and rounding by the allocator.
    """

    trunk_values: float = 13.0  # in the trunk's precision, per token and channel, in a block
    trunk_floats: float = 3.0  # float32, per token and channel, in a block
    head_floats_per_feature: float = 1.11  # per pixel and feature of the frames decoded together
    head_floats: float = 64.0  # per pixel of the same frames
    head_floats_once: float = 0.5  # per pixel and feature, however many frames
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
    next_window: int  # what a roll-over prepares: caches, images and depths of the overlap
    working: int  # while the network runs

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        parts = (self.weights, self.cache, self.camera_cache, self.next_window, self.working)
        return sum(parts)

    def rows(self) -> list[tuple[str, int]]:
        """Return what the total consists of, with names."""
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
    Return the preset `name` without any memory behind its weights, to be asked for sizes only.

    `heads_dtype` is one of config.HEADS_DTYPES, `compile_mode` as `compiling.resolve` says.
    """
    with torch.device('meta'):
        model = GCTStream.from_config(MODEL_PRESETS[name])
    set_trunk_dtype(model, dtype)
    set_heads_dtype(model, heads_dtype)
    model.compile_mode = compile_mode
    return model


def predict(model: GCTStream, config: StreamConfig, height: int, width: int) -> MemoryBudget:
    """
    Return what a StreamEngine with `model` needs for images of `height` x `width`.

    The weights of `model` may be on any device, also on 'meta'.

    :raises ValueError: an image too wide for the network, or a width of it that is not whole.
    """
    patch = model.patch_size
    if config.image_width % patch:
        raise ValueError(
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
    """Return the sizes of keys and values of trunk and camera head in a StreamMemory."""
    trunk, camera = prod(shape.trunk_buffer), prod(shape.camera_buffer)
    return 2 * trunk * dtype.itemsize, 2 * camera * _FLOAT32


def _next_window_bytes(
    model: GCTStream, config: StreamConfig, patches: int, dtype: torch.dtype
) -> int:
    """Return what a `NextWindow` holds at most; nothing without roll-over."""
    if config.on_limit != 'roll_over':
        return 0
    overlap, pixels = config.overlap_keyframes, patches * model.patch_size**2
    images = 3 * pixels * min(config.num_scale_frames, overlap)
    depths = 2 * overlap * pixels * _FLOAT32
    return sum(_cache_bytes(_shape(model, config, patches, overlap), dtype)) + images + depths


def _working_bytes(model: GCTStream, frames: int, patches: int) -> float:
    """Return what the pass over the scale batch, the largest, needs at its peak."""
    pass_bytes = _pass_bytes(model, frames, patches)
    kept_by_graphs = pass_bytes if model.compile_mode in _GRAPH_MODES else 0
    return pass_bytes + kept_by_graphs + CALIBRATION.workspace


def _pass_bytes(model: GCTStream, frames: int, patches: int) -> float:
    c, trunk, head = CALIBRATION, model.aggregator, model.depth_head
    channels = (patches + trunk.patch_start_idx) * trunk.camera_token.shape[-1]
    selected = frames * channels * 2 * len(trunk.selected_layers) * _FLOAT32
    trunk_bytes = c.trunk_values * trunk.dtype.itemsize + c.trunk_floats * _FLOAT32
    pixels, features = patches * model.patch_size**2, head.scratch.output_conv1.in_channels
    # The heads count as float32 also where they run in bfloat16: their last layers never do.
    together = 1 if model.compile_mode == 'cuda-graph' else min(frames, head.frames_per_chunk)
    floats = together * (c.head_floats_per_feature * features + c.head_floats)
    decoding = pixels * (floats + c.head_floats_once * features) * _FLOAT32
    images = frames * pixels * c.image_floats * _FLOAT32
    return selected + max(frames * channels * trunk_bytes, decoding) + images


class MemoryLimitError(ValueError):
    """Say in one line how much memory is needed, how much there is, and what would fit."""


@dataclass(frozen=True)
class MemoryLimit:
    """What a stream may take."""

    size: float  # bytes
    source: str  # what sets it

    def __str__(self) -> str:
        size = self.size / GB
        return f'the limit is {size:{".2f" if size > 0.1 else ".2g"}} GB ({self.source})'


def memory_limit(gigabytes: float, device: torch.device) -> MemoryLimit | None:
    """
    Return the limit of `gigabytes` (1e9 bytes), or with 0 most of what is free on `device`.

    Memory that torch has reserved is free for the next stream. None: a CPU without limit.
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
    Return what a stream with images of `height` x `width` needs.

    :raises MemoryLimitError: that is more than `limit`.
    """
    budget = predict(model, config, height, width)
    if limit is not None and budget.total > limit.size:
        raise MemoryLimitError(
            f'{budget}; but {limit}: {_remedy(model, config, height, width, limit)}'
        )
    return budget


def settle(
    model: GCTStream,
    config: StreamConfig,
    height: int,
    width: int,
    limit: MemoryLimit | None,
    may_shrink: bool,
) -> StreamConfig:
    """
    Return the settings to stream images of `height` x `width` with, and log what they need.

    They are those of `config`, or with `may_shrink` those that `fit` makes of them.

    :raises MemoryLimitError: they need more than `limit`.
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
    Return `config`, shrunk as far as it must be for images of `height` x `width`.

    In this order, each only if those before do not suffice: `max_keyframes` down to what a full
    window or a roll-over needs; `sliding_window` in steps of 8 down to 8; `image_width` in whole
    patches down to its half. Then `max_keyframes` up again as far as there is room. None if even
    the smallest of all is too large.
    """
    fits = _fits(model, height, width, limit)
    shrunk = _shrink(config, model.patch_size, fits)
    if not fits(shrunk):
        return None
    keyframes = range(shrunk.max_keyframes, config.max_keyframes + 1)
    return _largest(shrunk, 'max_keyframes', keyframes, fits)


def _shrink(config: StreamConfig, patch: int, fits: Fits) -> StreamConfig:
    """Return `config` shrunk as `fit` does until it fits, or the smallest settings."""
    width, keyframes = config.image_width, config.max_keyframes
    least = min(_least_keyframes(config), keyframes)
    windows = range(config.sliding_window, _WINDOW_STEP - 1, -_WINDOW_STEP)[::-1]
    widths = range(-(-width // (2 * patch)) * patch, width + 1, patch)
    shrunk = _largest(config, 'max_keyframes', range(least, keyframes + 1), fits)
    shrunk = _largest(shrunk, 'sliding_window', windows, fits)
    return _largest(shrunk, 'image_width', widths, fits)


def changes(before: StreamConfig, after: StreamConfig) -> str:
    """Return the settings of `after` that differ from those of `before`, as text."""
    names = [item.name for item in fields(StreamConfig)]
    differ = [name for name in names if getattr(before, name) != getattr(after, name)]
    return ', '.join(f'{name} {getattr(after, name)}' for name in differ)


def _remedy(
    model: GCTStream, config: StreamConfig, height: int, width: int, limit: MemoryLimit
) -> str:
    """
    Return which settings would fit: the largest window, else what `fit` makes of them.

    Where not even those do, it is how much they need.
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
    """Return how many keyframes fill the window, or are needed to roll over if that is more."""
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
