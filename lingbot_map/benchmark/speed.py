"""Time an engine on noise: the scale batch, then each later frame."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
import time

from lingbot_map.benchmark.setup import build, noise, Ready, Setup, synchronize
from lingbot_map.mapping.map_frame import MapFrame
from lingbot_map.mapping.points import PointFilter
from lingbot_map.streaming.compiling import compilations
from lingbot_map.streaming.engine import StreamEngine
from lingbot_map.streaming.frame import FrameInput, FrameResult
import numpy as np
import torch
from torch import Tensor

_AROUND_POSITION = 30  # frames on both sides in medians at 10, 50 and 90 % of the run
_AROUND_TRACE = 3  # the same for the trace
_TRACE_STEP = 100
_MIN_POSITION = 10
_OUTSIDE_ROUNDS = 20
_CAMERA_WIDTH = 1280  # [px] of the image whose upload and resize is timed
_NOTES = 5  # progress lines per run

Log = Callable[[str], None]  # prints a progress line


@dataclass(frozen=True)
class Push:
    """Times of one image after the scale batch."""

    held: int  # keyframes in memory before this image
    preprocess_ms: float  # upload and resize
    forward_ms: float  # network, until the pose is in host memory
    wall_ms: float  # total, until the device is idle


@dataclass(frozen=True)
class Run:
    """Results of one engine."""

    setup: Setup
    label: str  # compile mode and attention backend
    ready_s: float
    scale_batch_ms: float
    pushes: list[Push]
    peak_gb: float  # peak of allocated tensors, 1e9 bytes; 0 on a CPU
    reserved_gb: float  # peak reserved by the allocator, 1e9 bytes; 0 on a CPU
    recompiles: int  # since READY
    outside: dict[str, float]  # name -> time of steps around the network [ms]

    @property
    def forward_ms(self) -> np.ndarray:
        return np.array([push.forward_ms for push in self.pushes])

    @property
    def full_ms(self) -> np.ndarray:
        """Network times of the frames with a full window; may be empty."""
        full = self.setup.num_scale_frames + self.setup.sliding_window
        return np.array([push.forward_ms for push in self.pushes if push.held >= full])

    @property
    def median_ms(self) -> float:
        """Median over the frames with a full window, or over all frames if there are none."""
        return float(np.median(self.full_ms if len(self.full_ms) else self.forward_ms))

    @property
    def p99_over_median(self) -> float:
        times = self.full_ms if len(self.full_ms) else self.forward_ms
        return float(np.percentile(times, 99) / np.median(times))

    @property
    def frames(self) -> int:
        return self.setup.num_scale_frames + len(self.pushes)

    @property
    def fps(self) -> float:
        return 1e3 * self.frames / (self.scale_batch_ms + self.forward_ms.sum())

    def positions_ms(self) -> dict[int, float]:
        """Return {percent of the run: median over the frames around it [ms]}."""
        times = self.forward_ms
        places = {10: max(len(times) // 10, _MIN_POSITION)}
        places |= {percent: len(times) * percent // 100 for percent in (50, 90)}
        return {percent: _around(times, at, _AROUND_POSITION) for percent, at in places.items()}

    def trace_ms(self) -> dict[int, float]:
        """Return {index: median over the frames around it [ms]} for every hundredth frame."""
        first = self.setup.num_scale_frames
        indices = range(_TRACE_STEP, self.frames, _TRACE_STEP)
        return {
            i: _around(self.forward_ms, i - first, _AROUND_TRACE) for i in indices if i >= first
        }


def _around(times: np.ndarray, at: int, reach: int) -> float:
    at = min(at, len(times) - 1)
    return float(np.median(times[max(at - reach, 0) : at + reach + 1]))


def measure(
    setup: Setup, weights: dict[str, Tensor], frames: int, log: Log, outside: bool = False
) -> Run:
    """Build an engine and run noise through it; `outside` also times steps around the network."""
    log(f'compile_mode {setup.compile_mode}: loading and warming up')
    ready = build(setup, weights)
    log(f'READY after {ready.ready_s:.1f} s: {ready.label(setup.compile_mode)}')
    compiled = compilations()
    images = noise(setup, frames)
    scale_batch_ms, results = _scale_batch(ready.engine, images)
    pushes = list(with_progress(stream(ready.engine, images, setup.device), frames, log))
    return Run(
        setup,
        ready.label(setup.compile_mode),
        ready.ready_s,
        scale_batch_ms,
        pushes,
        *_peak_gb(setup.device),
        recompiles=compilations() - compiled,
        outside=_outside_ms(ready, setup, results[-1]) if outside else {},
    )


def _scale_batch(engine: StreamEngine, images: Iterator) -> tuple[float, list[FrameResult]]:
    while not (results := engine.push(next(images))):
        pass
    return sum(result.timings_ms['forward'] for result in results), results


def stream(engine: StreamEngine, images: Iterable, device: torch.device) -> Iterator[Push]:
    """Push the images after the scale batch; the device is idle before each."""
    for rgb in images:
        held = engine.held_keyframes
        start_s = time.perf_counter()
        (result,) = engine.push(rgb)
        synchronize(device)
        wall_ms = 1e3 * (time.perf_counter() - start_s)
        yield Push(held, result.timings_ms['preprocess'], result.timings_ms['forward'], wall_ms)


def with_progress(pushes: Iterable[Push], count: int, log: Log) -> Iterator[Push]:
    """Yield all of about `count` pushes; log the progress _NOTES times."""
    step = max(count // _NOTES, 1)
    for i, push in enumerate(pushes, 1):
        if i % step == 0:
            log(f'{i} of {count} frames, {push.forward_ms:.1f} ms')
        yield push


def _peak_gb(device: torch.device) -> tuple[float, float]:
    if device.type != 'cuda':
        return 0.0, 0.0
    allocated = torch.cuda.max_memory_allocated(device)
    return allocated / 1e9, torch.cuda.max_memory_reserved(device) / 1e9


def _outside_ms(ready: Ready, setup: Setup, result: FrameResult) -> dict[str, float]:
    """Return the times of image upload and of a full point cloud [ms]."""
    height = round(_CAMERA_WIDTH * setup.image_height / setup.image_width)
    camera = np.random.default_rng(0).integers(0, 256, (height, _CAMERA_WIDTH, 3), dtype=np.uint8)
    mapping = ready.engine.pixel_map(height, _CAMERA_WIDTH)
    pack, placed = PointFilter(), MapFrame(1.0).place(result)
    points = len(pack(placed))
    parts = {
        f'upload and resize of {_CAMERA_WIDTH}x{height}': lambda: FrameInput.of(
            camera, None, mapping, setup.device
        ),
        f'cloud of {points} points': lambda: pack(placed),
    }
    return {name: _median_ms(call, setup.device) for name, call in parts.items()}


def _median_ms(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_OUTSIDE_ROUNDS):
        start_s = time.perf_counter()
        call()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start_s))
    return float(np.median(times))
