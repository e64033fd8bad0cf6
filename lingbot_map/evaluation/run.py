"""
Run the images of a recording through the engine and collect trajectory and timing.

Uses the same engine as the node, but without queue or clock: no image is dropped, and the same
input on the same machine gives the same result (`deterministic_kernels`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
import os
import resource
import time

from lingbot_map.images.camera import Camera
from lingbot_map.images.mask import ImageMask
from lingbot_map.images.view import camera_rotation, rotate_image, View
from lingbot_map.mapping.map_frame import MapFrame, MappedFrame
from lingbot_map.recordings.source import SourceError
from lingbot_map.streaming.engine import NotFiniteError, StreamEngine, StreamLimitError
from lingbot_map.streaming.frame import FrameResult
import numpy as np
import torch

_CUBLAS_WORKSPACE = ':4096:8'  # the larger of the two reproducible settings


@dataclass(frozen=True)
class PlacedFrame:
    """One image with its result and its pose in the map."""

    stamp_ns: int
    rgb: np.ndarray  # (H, W, 3) uint8, rectified
    frame: MappedFrame

    @property
    def T_map_cam(self) -> np.ndarray:
        """Pose of the camera's optical frame (4, 4) float64, map units."""
        return self.frame.camera.T_map_body


@dataclass(frozen=True)
class ViewSettings:
    """How to prepare images for the network; see `View`."""

    camera: Camera | None = None
    mask: ImageMask | None = None
    degrees: int = 0  # clockwise rotation that makes the images upright
    replace_intrinsics: bool = False

    def view(self, size: tuple[int, int]) -> View:
        """Return the view for images of `size` (width, height); raise UserError."""
        if self.camera is not None and self.camera.size != size:
            raise SourceError(
                f'camera_info is for images of {"x".join(map(str, self.camera.size))}, these are '
                f'{"x".join(map(str, size))}: set camera_info to none'
            )
        valid = None if self.mask is None else self.mask.valid(*size)
        return View(size, self.camera, valid, self.degrees, self.replace_intrinsics)


DIRECT = ViewSettings()  # images as they are


@dataclass(frozen=True)
class EstimatedPath:
    """The trajectory of one recording, with one row per image that has a pose."""

    stamps_ns: list[int]
    T_map_cam: np.ndarray  # (N, 4, 4)
    is_keyframe: np.ndarray  # (N,) bool
    images: int  # number of input images
    image_size: tuple[int, int]  # width, height
    windows: int  # roll-overs of the memory + 1


@dataclass(frozen=True)
class Timing:
    """How long a run took."""

    warm_up_s: float
    scale_batch_ms: float  # the first frames, which run as a batch
    frame_ms: list[float]  # each later frame: upload, resize, network, until the pose is known
    engine_s: float
    total_s: float  # including reading, decoding and exports


def run_recording(
    engine: StreamEngine,
    images: Iterable[tuple[int, np.ndarray]],
    scale: float = 1.0,
    view_settings: ViewSettings = DIRECT,
    consumers: Sequence[Callable[[PlacedFrame], None]] = (),
) -> tuple[EstimatedPath, Timing]:
    """
    Stream (stamp_ns, rgb) pairs, at least one, into a new map.

    Each consumer is called with every placed frame, in order. Frames without a finite pose are
    skipped. Raises SourceError if the image size changes or the memory is full, and UserError if
    the mask does not fit.
    """
    started_s = time.perf_counter()
    feed, rows = _Feed(engine, view_settings), []
    map_frame = MapFrame(scale, camera_rotation(view_settings.degrees))
    for result in feed.results(images):
        stamp_ns, rgb = result.tag
        try:
            frame = map_frame.place(result)
        except FloatingPointError:
            continue
        rows.append((stamp_ns, frame.camera.T_map_body, frame.is_keyframe))
        for consume in consumers:
            as_mounted = rotate_image(rgb, -view_settings.degrees % 360)
            consume(PlacedFrame(stamp_ns, as_mounted, frame))
    estimate = EstimatedPath(
        [stamp_ns for stamp_ns, _, _ in rows],
        np.array([T for _, T, _ in rows]).reshape(-1, 4, 4),
        np.array([is_keyframe for *_, is_keyframe in rows], bool),
        feed.images,
        feed.size,
        engine.window + 1,
    )
    return estimate, feed.timing(time.perf_counter() - started_s)


class _Feed:
    """Pushes images and times the engine, with separate times of the scale batch and of frames."""

    def __init__(self, engine: StreamEngine, view_settings: ViewSettings):
        self.images = 0
        self.size: tuple[int, int] | None = None  # width, height
        self._engine, self._view_settings = engine, view_settings
        self._view: View | None = None
        self._sequence = 0
        self._warm_up_s = self._scale_batch_ms = self._engine_s = 0.0
        self._frame_ms: list[float] = []
        self._initialized = False

    def results(self, images: Iterable[tuple[int, np.ndarray]]) -> Iterator[FrameResult]:
        for stamp_ns, rgb in images:
            self._check_size(stamp_ns, rgb)
            self.images += 1
            prepared = self._view.prepare(rgb)
            try:
                results = self._timed(self._engine.push, prepared, (stamp_ns, prepared))
            except StreamLimitError:  # with on_limit stop
                raise _memory_is_full(stamp_ns) from None
            if self._engine.sequence != self._sequence:
                raise _memory_is_full(stamp_ns)
            yield from results
        if self._engine.waiting:
            yield from self._timed(self._engine.flush)

    def _check_size(self, stamp_ns: int, rgb: np.ndarray) -> None:
        height, width = rgb.shape[:2]
        if self.size is None:
            self.size = (width, height)
            self._view = self._view_settings.view(self.size)
            start = time.perf_counter()
            self._engine.warm_up(*self._view.upright_size[::-1])
            self._sequence = self._engine.sequence
            self._warm_up_s = time.perf_counter() - start
        elif self.size != (width, height):
            raise SourceError(
                f'the image at {stamp_ns * 1e-9:.3f} s is {width}x{height}, previous images are '
                f'{self.size[0]}x{self.size[1]}: evaluate them apart with --start and --duration'
            )

    def _timed(self, call: Callable[..., list[FrameResult]], *arguments) -> list[FrameResult]:
        start = time.perf_counter()
        try:
            results = call(*arguments)
        except NotFiniteError as error:
            raise SourceError(str(error)) from None
        elapsed_s = time.perf_counter() - start
        self._engine_s += elapsed_s
        if self._initialized:
            self._frame_ms.append(1e3 * elapsed_s)
        else:
            self._scale_batch_ms += 1e3 * elapsed_s
            self._initialized = bool(results)
        return [self._view.restore(result) for result in results]

    def timing(self, total_s: float) -> Timing:
        return Timing(
            self._warm_up_s, self._scale_batch_ms, self._frame_ms, self._engine_s, total_s
        )


def _memory_is_full(stamp_ns: int) -> SourceError:
    return SourceError(
        f'the map cannot continue at {stamp_ns * 1e-9:.3f} s, since the memory is full: '
        'raise max_keyframes or keyframe_interval, or set on_limit to roll_over'
    )


def timing_values(
    timing: Timing, estimate: EstimatedPath, device: torch.device
) -> dict[str, object]:
    """Return the content of timing.json."""
    frame_ms = timing.frame_ms
    on_gpu = device.type == 'cuda'
    return {
        'fps': estimate.images / timing.engine_s,
        'fps_with_reading_and_exports': estimate.images / (timing.total_s - timing.warm_up_s),
        'latency_ms': {f'p{p}': float(np.percentile(frame_ms, p)) for p in (50, 90, 95, 99)}
        | {'max': max(frame_ms)}
        if frame_ms
        else None,
        'scale_batch_ms': timing.scale_batch_ms,
        'warm_up_s': timing.warm_up_s,
        'total_s': timing.total_s,
        'gpu': torch.cuda.get_device_name(device) if on_gpu else None,
        'gpu_memory_peak_mb': torch.cuda.max_memory_allocated(device) / 1e6 if on_gpu else None,
        'host_memory_peak_mb': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


@contextmanager
def deterministic_kernels() -> Iterator[dict[str, object]]:
    """
    Make torch use deterministic kernels only; yield the settings for the record.

    An operation without such a kernel raises RuntimeError. Must be entered before CUDA is used.
    """
    before = torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn
    flags = cudnn.benchmark, cudnn.deterministic
    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', _CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield {
            'deterministic_algorithms': True,
            'cudnn.benchmark': False,
            'cudnn.deterministic': True,
            'CUBLAS_WORKSPACE_CONFIG': os.environ['CUBLAS_WORKSPACE_CONFIG'],
            'threads': torch.get_num_threads(),
        }
    finally:
        torch.use_deterministic_algorithms(before)
        cudnn.benchmark, cudnn.deterministic = flags
