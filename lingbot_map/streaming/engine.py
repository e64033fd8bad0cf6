"""StreamEngine: runs a GCTStream on a stream of RGB images, one call per image."""

from collections.abc import Callable
import logging
import time

from lingbot_map.errors import UserError
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.models.keyframes import keyframes_for
from lingbot_map.models.memory import StreamLimitError, StreamMemory
from lingbot_map.models.windows import Outputs, Similarity
from lingbot_map.settings import StreamConfig
from lingbot_map.streaming.compiling import RING_BACKENDS, uses_graph_trees, warm_up
from lingbot_map.streaming.frame import FrameInput, FrameResult, results_of
from lingbot_map.streaming.motion_gate import MotionGate
from lingbot_map.streaming.preprocess import crop_map, PixelMap
from lingbot_map.streaming.roll_over import NextWindow
from lingbot_map.streaming.runner import FrameRunner
import numpy as np
import torch

__all__ = ['NotFiniteError', 'StreamEngine', 'StreamLimitError']
LOGGER = logging.getLogger(__name__)


class NotFiniteError(ArithmeticError):
    """A pose of the scale batch is not finite; the next image starts a new sequence."""


class StreamEngine:
    """
    Runs images through a GCTStream and owns its memory. Use it from one thread only.

    The first `num_scale_frames` images are collected and run as one batch; every later image runs
    at once. The model needs a camera head and a depth head. `on_limit` selects what happens when
    `max_keyframes` frames are kept.

    `check_memory(height, width)` is called before memory is allocated for images of that size; it
    may raise.

    Public attributes:
    `sequence`: number of the sequence; poses of different sequences have unrelated world frames.
    `window`: number of the window within the sequence, from 0.
    `last_scale_step`, `last_residual`: of the newest roll-over (see `Seam`); 1 and 0 before.
    `is_static`: the motion gate found no motion in the newest image.
    `gated_frames`: frames of the sequence that ran as non-keyframes because they were static.
    """

    def __init__(
        self,
        model: GCTStream,
        config: StreamConfig,
        device: torch.device | str = 'cpu',
        check_memory: Callable[[int, int], object] = lambda height, width: None,
    ):
        if model.camera_head is None or model.depth_head is None:
            raise ValueError('the engine needs a model with camera and depth head')
        if config.image_width % model.patch_size:
            raise UserError(
                f"'image_width' is {config.image_width}; it must be a multiple of "
                f'the patch size {model.patch_size}'
            )
        self._model, self._config, self._device = model, config, torch.device(device)
        if self._device.index is not None and self._device.type == 'cuda':
            # Streams, graphs and Triton kernels use the thread's current device.
            torch.cuda.set_device(self._device)
        self.check_memory = check_memory
        self._keyframes = keyframes_for(config)
        self._gate = MotionGate(config.motion_threshold if config.motion_gate else None)
        self._memory: StreamMemory | None = None
        self._runner: FrameRunner | None = None
        self._next: NextWindow | None = None
        self._network_size: tuple[int, int] | None = None  # width, height
        self.sequence = 0
        self.reset()

    def reset(self) -> None:
        """Start a new sequence."""
        self.sequence += 1
        self.window, self.last_scale_step, self.last_residual = 0, 1.0, 0.0
        self._move = Similarity.identity()  # window's world frame -> sequence's world frame
        self._earlier_keyframes = 0  # kept by earlier windows, no longer in memory
        self._waiting: list[FrameInput] = []
        self._scale_frames = 0  # size of the scale batch; 0 before it has run
        self._streamed = 0
        self._keyframes.start(None)
        self._forget_motion()
        self.gated_frames = 0
        if self._memory is not None:
            self._memory.reset()
        if self._next is not None:
            self._next.reset()

    @property
    def waiting(self) -> int:
        """Number of images collected for a scale batch that has not run yet."""
        return len(self._waiting)

    @property
    def frames(self) -> int:
        """Number of images since the last reset, without those that the motion gate dropped."""
        return len(self._waiting) + self._scale_frames + self._streamed

    @property
    def keyframes(self) -> int:
        """Number of frames kept since the last reset."""
        return self._earlier_keyframes + self.held_keyframes

    @property
    def held_keyframes(self) -> int:
        """Number of frames in memory now; after a roll-over, those of the overlap."""
        return 0 if self._memory is None else self._memory.kept

    @property
    def max_keyframes(self) -> int:
        """Keyframe capacity of the memory."""
        return self._config.max_keyframes

    @property
    def compile_mode(self) -> str:
        """Compile mode in use; the warm-up may have fallen back to a slower one."""
        return self._model.compile_mode

    @property
    def attention_backend(self) -> str:
        return self._model.attention_backend

    @property
    def keyframe_interval(self) -> int:
        """Every n-th frame is kept. Can be set at any time; ignored by other keyframe policies."""
        return self._keyframes.interval

    @keyframe_interval.setter
    def keyframe_interval(self, interval: int) -> None:
        if self._config.keyframe_policy == 'interval':
            self._keyframes.interval = interval

    @torch.inference_mode()
    def warm_up(self, height: int, width: int) -> None:
        """
        Allocate for images of `height` x `width`, compile, run every code path and reset.

        Nothing is compiled or captured afterwards until the image size changes. If the model's
        `compile_mode` fails on this device, log one warning and use a slower mode.
        """
        mapping = self.pixel_map(height, width)
        self.check_memory(height, width)
        self._prepare(mapping)
        frame = FrameInput.noise(mapping, self._device)
        size, self._network_size = self._network_size, None  # stays None after a failure
        try:
            warm_up(self._model, lambda: self._warm_up_paths(frame))
            for runner in self._runners():
                runner.freeze()
            self._network_size = size
        finally:
            self.reset()

    @torch.inference_mode()
    def push(self, rgb: np.ndarray, tag: object = None) -> list[FrameResult]:
        """
        Process an image (H, W, 3) uint8 and return the available results, oldest first.

        Returns no result while the scale batch is collected, then those of the whole batch, then
        one per image. A change of the network's image size starts a new sequence. With
        `motion_gate`, a static image (`is_static`) is dropped before the scale batch and runs as
        a non-keyframe after it. A later image whose pose is not finite is not kept.

        :raises StreamLimitError: the memory is full and `on_limit` is 'stop'; call `reset`.
        :raises NotFiniteError: a pose of the scale batch is not finite.
        :raises ValueError: not an (H, W, 3) uint8 image, too wide, or raised by `check_memory`.
        """
        if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3 or 0 in rgb.shape:
            raise ValueError(f'expected an image (H, W, 3) uint8, got {rgb.shape} {rgb.dtype}')
        frame = FrameInput.of(rgb, tag, self.pixel_map(*rgb.shape[:2]), self._device)
        if frame.mapping.network_size != self._network_size:
            self.check_memory(*rgb.shape[:2])
            if self.frames:
                LOGGER.warning(
                    'image size changed to %dx%d: starting a new sequence',
                    *frame.mapping.original_size,
                )
            if self._model.compile_mode == 'off':
                self._prepare(frame.mapping)
            else:
                LOGGER.warning('warming up for images of %dx%d', *frame.mapping.original_size)
                self.warm_up(*rgb.shape[:2])
        self.is_static = not self._gate.passes(frame.image)
        if self._scale_frames:
            try:
                return [self._run_frame(frame, moves=not self.is_static)]
            except StreamLimitError as error:
                if self._config.on_limit == 'stop':
                    raise
                LOGGER.warning('%s: starting a new sequence', error)
                self.reset()
                self._gate.passes(frame.image)  # first image of the new sequence
        if self.is_static:
            return []
        self._waiting.append(frame)
        full = len(self._waiting) == self._config.num_scale_frames
        return self._run_waiting() if full else []

    @torch.inference_mode()
    def flush(self) -> list[FrameResult]:
        """Run an incomplete scale batch and return its results; reset the motion gate."""
        self._forget_motion()
        return self._run_waiting()

    def _forget_motion(self) -> None:
        self.is_static = False
        self._gate.clear()

    def _run_waiting(self) -> list[FrameResult]:
        if not self._waiting:
            return []
        frames, self._waiting = self._waiting, []
        results = self._run_scale_batch(frames)
        if not all(np.isfinite(result.T_world_cam).all() for result in results):
            self.reset()
            raise NotFiniteError(
                f'the network returned no finite poses for the {len(frames)} images of the scale '
                "batch; if that happens again, set 'dtype' to bfloat16 or float32"
            )
        return results

    def network_size(self, height: int, width: int) -> tuple[int, int]:
        """Return (width, height) of the network's input [px]; raises as `pixel_map`."""
        return self.pixel_map(height, width).network_size

    def pixel_map(self, height: int, width: int) -> PixelMap:
        """
        Return the mapping between images of `height` x `width` and the network's input.

        :raises UserError: the image is too wide for the network.
        """
        return crop_map(width, height, self._config.image_width, self._model.patch_size)

    def _prepare(self, mapping: PixelMap) -> None:
        """Start a new sequence; reallocate the memory if the network size differs."""
        if mapping.network_size != self._network_size:
            # Free the old buffers before allocating. Set the size only when all succeeded.
            self._memory = self._runner = self._next = self._network_size = None
            width, height = mapping.network_size
            config = self._config
            self._model.kv_cache_scale_frames = config.num_scale_frames
            self._model.kv_cache_sliding_window = config.sliding_window
            self._memory = self._model.new_memory(height, width, config.max_keyframes)
            self._runner = FrameRunner(self._model, self._memory, config.num_scale_frames)
            if config.on_limit == 'roll_over':
                self._next = NextWindow(
                    self._model, height, width, config.num_scale_frames, config.overlap_keyframes
                )
            self._network_size = mapping.network_size
        self.reset()

    def _runners(self) -> list[FrameRunner]:
        return [self._runner] if self._next is None else [self._runner, self._next.runner]

    def _warm_up_paths(self, frame: FrameInput) -> None:
        """Capture graphs if the mode does, then stream until frames are evicted."""
        mode, pool = self._model.compile_mode, None
        for runner in self._runners():
            runner.restart()
        if mode == 'cuda-graph':
            for runner in self._runners():
                pool = runner.capture(frame.image, pool)
        shape = self._memory.shape
        # Ring kernels are specialised for each length at first use, also in mode 'off'.
        whole = mode != 'off' or self.attention_backend in RING_BACKENDS
        frames = shape.anchors + shape.window + 2 if whole else 2
        for count in [frames, 2, 2] if uses_graph_trees(self._model) else [frames]:
            self.reset()
            self._warm_up_stream(frame, count)
            if self._next is not None:
                self._next.warm_up(frame.image)
                self._memory.adopt(self._next.memory)
                self._next.reset()

    def _warm_up_stream(self, frame: FrameInput, count: int) -> None:
        """Run the scale batch and up to `count` frames that fit; the last one is not kept."""
        self._run_scale_batch([frame] * self._config.num_scale_frames)
        room = self._memory.shape.max_keyframes - self._memory.kept
        interval = self._keyframes.interval
        try:
            for i in range(min(count, room)):
                self._keyframes.interval = 1 if i + 1 < count else count
                self._run_frame(frame)
        finally:
            self._keyframes.interval = interval

    def _run_scale_batch(self, frames: list[FrameInput]) -> list[FrameResult]:
        start_s = time.perf_counter()
        self._memory.write(len(frames), keep=True)
        outputs = self._forward(frames, len(frames))
        self._memory.commit()
        self._keyframes.start(outputs['pose_enc'][0, -1])
        results = self._results(frames, outputs, True, start_s)
        self._scale_frames = len(frames)
        return results

    def _run_frame(self, frame: FrameInput, moves: bool = True) -> FrameResult:
        """Run one frame; without motion it is no keyframe and not counted for the interval."""
        if self._next is not None and self._next.complete:
            self._roll_over()  # deferred to here: the previous frame ran an extra pass
        start_s = time.perf_counter()
        self._memory.write(1, moves and self._keyframes.keeps_early())
        batch = self._next.scale_frames if self.window else self._scale_frames
        outputs = self._forward([frame], batch)
        due = moves and self._keyframes.keeps(outputs)
        # Keys that are not finite would corrupt all later frames.
        kept = due and bool(outputs['pose_enc'].isfinite().all())
        if kept:
            self._memory.commit()
        else:
            self._memory.undo()
        if not moves:
            self.gated_frames += 1
        elif kept or not due:
            self._keyframes.advance(kept, outputs)
        else:
            self._gate.clear()  # the next frame may be a keyframe even if static
        (result,) = self._results([frame], outputs, kept, start_s)
        self._streamed += 1
        limit = self._memory.shape.max_keyframes
        if kept and self._next is not None and self._memory.kept > limit - self._next.overlap:
            self._next.add(frame.image, outputs)
        return result

    def _roll_over(self) -> None:
        seam = self._next.join(self._move)
        if seam is None:  # the memory is full at the next keyframe: `push` starts a new sequence
            LOGGER.error('cannot roll over: the next window has a pose that is not finite')
            self._next.reset()
            return
        self._earlier_keyframes += self._memory.kept - self._next.overlap
        self._memory.adopt(self._next.memory)
        self._keyframes.set_reference(self._next.last_pose_enc)
        self._next.reset()
        self._move = seam.move
        self.window += 1
        self.last_scale_step, self.last_residual = seam.scale_step, seam.residual
        LOGGER.log(
            logging.INFO if seam.consistent else logging.WARNING,
            'window %d continues from %d keyframes: scale step %.4f, residual %.1f %% of depth%s',
            self.window,
            self._next.overlap,
            seam.scale_step,
            100 * seam.residual,
            '' if seam.consistent else '; the windows do not agree, the map may be distorted here',
        )

    def _forward(self, frames: list[FrameInput], scale_frames: int) -> Outputs:
        return self._runner(torch.stack([frame.image for frame in frames]), scale_frames)

    def _results(
        self, frames: list[FrameInput], outputs: Outputs, kept: bool, start_s: float
    ) -> list[FrameResult]:
        first = self._scale_frames + self._streamed
        return results_of(frames, outputs, self._move, first, kept, start_s)
