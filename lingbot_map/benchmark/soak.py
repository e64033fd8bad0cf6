"""Soak test: thousands of frames with roll-over, to detect growing time or memory."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
import gc
import os
from pathlib import Path

from lingbot_map.benchmark.setup import build, noise, Setup
from lingbot_map.benchmark.speed import Log, Push, stream
from lingbot_map.streaming.compiling import compilations
from lingbot_map.streaming.engine import StreamEngine
import numpy as np
import torch
from torch import Tensor

_PARTS = 10
_COLUMNS = {  # columns with slopes -> name and unit
    'forward_ms': ('network', 'ms'),
    'wall_ms': ('total', 'ms'),
    'tensors_mb': ('tensors', 'MB'),
    'resident_mb': ('resident', 'MB'),
}


@dataclass(frozen=True)
class Part:
    """A tenth of the frames; memory is measured at its end."""

    last_frame: int  # index since the start
    is_full: bool  # full window or after a roll-over, for all frames
    forward_ms: float  # median, network only
    wall_ms: float  # median, with the work on the next window
    worst_ms: float  # maximum of the same
    tensors_mb: float  # tensors on the device, 1e6 bytes
    resident_mb: float  # host memory of the process, 1e6 bytes
    window: int  # number of roll-overs so far


@dataclass(frozen=True)
class Soak:
    """Results of a soak test."""

    parts: list[Part]
    recompiles: int  # since READY

    @property
    def full(self) -> list[Part]:
        return [part for part in self.parts if part.is_full]

    def slope(self, name: str) -> float:
        """Return the growth of a value per 1000 frames; needs at least two full parts."""
        frames = [part.last_frame / 1000 for part in self.full]
        return float(np.polyfit(frames, [getattr(part, name) for part in self.full], 1)[0])

    def growth(self, name: str) -> float:
        """Return the ratio of a value in the last and the first full part."""
        return getattr(self.full[-1], name) / getattr(self.full[0], name)


def soak(setup: Setup, weights: dict[str, Tensor], frames: int, log: Log) -> Soak:
    """Run noise through an engine and measure time and memory in ten parts."""
    log('loading and warming up')
    ready = build(setup, weights)
    compiled, engine, parts = compilations(), ready.engine, []
    images, full = noise(setup, frames), setup.num_scale_frames + setup.sliding_window
    while not engine.push(next(images)):
        pass
    pushes = stream(engine, images, setup.device)
    for count in _sizes(frames - setup.num_scale_frames):
        is_full = engine.window > 0 or engine.held_keyframes >= full
        part = [next(pushes) for _ in range(count)]
        parts.append(_part(part, is_full, engine, setup.device))
        log(f'{engine.frames} of {frames} frames, {parts[-1].wall_ms:.1f} ms')
    return Soak(parts, compilations() - compiled)


def soak_lines(found: Soak) -> list[str]:
    """Return the table and the slopes of its columns."""
    titles = ('network [ms]', 'total [ms]', 'worst [ms]', 'tensors [MB]', 'resident [MB]')
    head = f'{"frame":>8}' + ''.join(f'{title:>15}' for title in (*titles, 'window'))
    rows = [
        f'{part.last_frame:8d}{part.forward_ms:15.2f}{part.wall_ms:15.2f}{part.worst_ms:15.2f}'
        f'{part.tensors_mb:15.2f}{part.resident_mb:15.1f}{part.window:15d}'
        for part in found.parts
    ]
    return [head, *rows, f'compilations since READY: {found.recompiles}', *_slope_lines(found)]


def soak_values(found: Soak) -> dict[str, object]:
    """Return the table and the slopes for JSON."""
    values = {'parts': [asdict(part) for part in found.parts], 'recompiles': found.recompiles}
    if len(found.full) < 2:
        return values
    return values | {
        'slope_per_1000_frames': {key: found.slope(key) for key in _COLUMNS},
        'last_over_first': {key: found.growth(key) for key in _COLUMNS},
    }


def held_bytes(device: torch.device) -> int:
    """Return the size of all tensors of this process on the device [bytes]."""
    gc.collect()
    if device.type == 'cuda':
        return torch.cuda.memory_allocated(device)
    storages = {
        storage.data_ptr(): storage.nbytes()
        for each in gc.get_objects()
        # No subclasses: those of the compiler have no memory, and say that they are on the CPU.
        if type(each) in (Tensor, torch.nn.Parameter) and each.device.type == 'cpu'
        for storage in (each.untyped_storage(),)
    }
    return sum(storages.values())


def resident_bytes() -> int:
    """Return the resident host memory of this process [bytes]."""
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    return pages * os.sysconf('SC_PAGE_SIZE')


def _slope_lines(found: Soak) -> list[str]:
    if len(found.full) < 2:
        return ['too few frames with a full window to compute slopes']
    return [
        'with a full window:',
        *(
            f'  {name:10}{found.slope(key):+12.4f} {unit} per 1000 frames, last / first '
            f'{found.growth(key):.4f}'
            for key, (name, unit) in _COLUMNS.items()
        ),
    ]


def _sizes(count: int) -> Iterator[int]:
    """Yield the number of frames in each part of `count` frames; no part is empty."""
    ends = sorted({round(count * i / _PARTS) for i in range(1, _PARTS + 1)} - {0})
    yield from np.diff([0, *ends]).tolist()


def _part(pushes: list[Push], is_full: bool, engine: StreamEngine, device: torch.device) -> Part:
    walls = [push.wall_ms for push in pushes]
    return Part(
        engine.frames - 1,
        is_full,
        float(np.median([push.forward_ms for push in pushes])),
        float(np.median(walls)),
        max(walls),
        held_bytes(device) / 1e6,
        resident_bytes() / 1e6,
        engine.window,
    )
