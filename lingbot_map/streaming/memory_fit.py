"""Whether a stream fits into the memory of its device, and which settings would."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
import logging

from lingbot_map.config import StreamConfig
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.streaming.budget import GB, MemoryBudget, predict
import torch

LOGGER = logging.getLogger(__name__)
_WINDOW_STEP = 8  # keyframes; also the least that a window is shrunk to
_USABLE = 0.95  # of the free memory: the rest is left to fragmentation and to other programs
Fits = Callable[[StreamConfig], bool]


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
