"""StreamEngine: RGB images in, poses and depth out, one call per image."""

from collections.abc import Callable
import logging
import time

from lingbot_map.config import StreamConfig
from lingbot_map.models.gct_stream import GCTStream, Outputs
from lingbot_map.models.keyframes import keyframes_for
from lingbot_map.models.memory import StreamLimitError, StreamMemory
from lingbot_map.models.windows import Similarity
from lingbot_map.streaming.compiling import RING_BACKENDS, uses_graph_trees, warm_up
from lingbot_map.streaming.frame import Frame, FrameResult, results_of
from lingbot_map.streaming.motion_gate import MotionGate
from lingbot_map.streaming.preprocess import crop_map, PixelMap
from lingbot_map.streaming.roll_over import NextWindow
from lingbot_map.streaming.runner import FrameRunner
import numpy as np
import torch

__all__ = ['NotFiniteError', 'StreamEngine', 'StreamLimitError']
LOGGER = logging.getLogger(__name__)


class NotFiniteError(ArithmeticError):
    """The images of a scale batch led to nothing; the next image begins a new sequence."""


class StreamEngine:
    """
    Feed images to a GCTStream and keep its memory; to be used from one thread.

    The first `num_scale_frames` images are collected and run as one batch, every later image at
    once. Needs a model with camera and depth head. When `max_keyframes` are kept, `on_limit` says
    how it goes on.

    Attributes: `sequence`, changes whenever a new sequence begins, whose poses share no frame with
    those before; `window` of the sequence, from 0; `last_scale_step` and `last_residual` of its
    newest roll-over (see `Seam`), 1 and 0 before the first; `standing`, whether the motion gate
    saw no motion in the newest image; `gated_frames`, those of the sequence that ran as
    non-keyframes for that reason. `check_memory(height, width)` is called before anything is
    allocated for images of that size, and may raise.
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
            raise ValueError(
                f"'image_width' is {config.image_width}; it must be a multiple of "
                f'the patch size {model.patch_size}'
            )
        self._model, self._config, self._device = model, config, torch.device(device)
        if self._device.index is not None and self._device.type == 'cuda':
            # Streams, graphs and Triton's kernels follow the thread's device.
            torch.cuda.set_device(self._device)
        self.check_memory = check_memory
        self._keyframes = keyframes_for(config)
        self._gate = MotionGate(config.motion_threshold if config.motion_gate else None)
        self._memory: StreamMemory | None = None
        self._runner: FrameRunner | None = None  # runs frames over the memory
        self._next: NextWindow | None = None
        self._network_size: tuple[int, int] | None = None  # width, height
        self.sequence = 0
        self.reset()

    def reset(self) -> None:
        """Start a new sequence."""
        self.sequence += 1
        self.window, self.last_scale_step, self.last_residual = 0, 1.0, 0.0
        self._move = Similarity.identity()  # from the window's world frame to the sequence's
        self._left_behind = 0  # frames that only earlier windows kept
        self._waiting: list[Frame] = []
        self._scale_frames = 0  # size of the scale batch that was run, 0 before
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
        """Images collected for a scale batch that has not run yet."""
        return len(self._waiting)

    @property
    def frames(self) -> int:
        """Images taken since the last reset: those pushed, without what the gate left out."""
        return len(self._waiting) + self._scale_frames + self._streamed

    @property
    def keyframes(self) -> int:
        """Frames kept since the last reset."""
        return self._left_behind + self.held_keyframes

    @property
    def held_keyframes(self) -> int:
        """Frames that the memory holds now; a roll-over leaves those of the overlap."""
        return 0 if self._memory is None else self._memory.kept

    @property
    def max_keyframes(self) -> int:
        """Keyframes that the memory can hold."""
        return self._config.max_keyframes

    @property
    def compile_mode(self) -> str:
        """How the network runs; the warm-up may have fallen back to a slower mode."""
        return self._model.compile_mode

    @property
    def attention_backend(self) -> str:
        return self._model.attention_backend

    @property
    def keyframe_interval(self) -> int:
        """Every n-th frame is kept; to be set at any time with the keyframe policy 'interval'."""
        return self._keyframes.interval

    @keyframe_interval.setter
    def keyframe_interval(self, interval: int) -> None:
        if self._config.keyframe_policy == 'interval':
            self._keyframes.interval = interval

    @torch.inference_mode()
    def warm_up(self, height: int, width: int) -> None:
        """
        Allocate for images of `height` x `width`, compile, and run every path; ends in a reset.

        Nothing is compiled or captured afterwards until the size of the images changes. What the
        model's `compile_mode` cannot do here is said in one warning, and done in a slower mode.
        """
        mapping = self.pixel_map(height, width)
        self.check_memory(height, width)
        self._prepare(mapping)
        frame = Frame.noise(mapping, self._device)
        size, self._network_size = self._network_size, None  # a failure leaves no size warm
        try:
            warm_up(self._model, lambda: self._rehearse(frame))
            for runner in self._runners():
                runner.settle()
            self._network_size = size
        finally:
            self.reset()

    @torch.inference_mode()
    def push(self, rgb: np.ndarray, tag: object = None) -> list[FrameResult]:
        """
        Take an image (H, W, 3) uint8 and return the results that are ready, oldest first.

        Nothing while the scale batch fills, then all of it at once, then one result per image. A
        change of the network's image size starts a new sequence. With `motion_gate`, an image that
        shows no motion (`standing`) is left out while the batch fills, and no keyframe later.

        A later image whose pose is not finite is no keyframe.

        :raises StreamLimitError: `max_keyframes` are kept and `on_limit` is 'stop'; `reset` to go
            on.
        :raises NotFiniteError: a pose of the scale batch is not finite.
        :raises ValueError: not an (H, W, 3) uint8 image, or too wide, or `check_memory` says so.
        """
        if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3 or 0 in rgb.shape:
            raise ValueError(f'expected an image (H, W, 3) uint8, got {rgb.shape} {rgb.dtype}')
        frame = Frame.of(rgb, tag, self.pixel_map(*rgb.shape[:2]), self._device)
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
        self.standing = not self._gate.passes(frame.image)
        if self._scale_frames:
            try:
                return [self._run_frame(frame, moves=not self.standing)]
            except StreamLimitError as error:
                if self._config.on_limit == 'stop':
                    raise
                LOGGER.warning('%s: starting a new sequence', error)
                self.reset()
                self._gate.passes(frame.image)  # the first of the new sequence
        if self.standing:
            return []
        self._waiting.append(frame)
        full = len(self._waiting) == self._config.num_scale_frames
        return self._run_waiting() if full else []

    @torch.inference_mode()
    def flush(self) -> list[FrameResult]:
        """
        Run a scale batch that is not full yet with the images there are.

        For the motion gate, the next image is a first one.
        """
        self._forget_motion()
        return self._run_waiting()

    def _forget_motion(self) -> None:
        self.standing = False
        self._gate.clear()

    def _run_waiting(self) -> list[FrameResult]:
        if not self._waiting:
            return []
        frames, self._waiting = self._waiting, []
        results = self._run_scale_batch(frames)
        if not all(np.isfinite(result.T_world_cam).all() for result in results):
            self.reset()
            raise NotFiniteError(
                f'the network gave no finite poses for the {len(frames)} images that begin a '
                "sequence; if that happens again, set 'dtype' to bfloat16 or float32"
            )
        return results

    def network_size(self, height: int, width: int) -> tuple[int, int]:
        """Return (width, height) of the network's input; raise ValueError as `pixel_map` does."""
        return self.pixel_map(height, width).network_size

    def pixel_map(self, height: int, width: int) -> PixelMap:
        """
        Return how the network sees images of `height` x `width`.

        :raises ValueError: an image too wide for the network.
        """
        return crop_map(width, height, self._config.image_width, self._model.patch_size)

    def _prepare(self, mapping: PixelMap) -> None:
        """Start a new sequence with a memory for this image size."""
        if mapping.network_size != self._network_size:
            # Free the old buffers before the new ones are made; until all are there, no size fits.
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

    def _rehearse(self, frame: Frame) -> None:
        """Capture what the compile mode captures, then stream as later, up to an eviction."""
        mode, pool = self._model.compile_mode, None
        for runner in self._runners():
            runner.restart()
        if mode == 'cuda-graph':
            for runner in self._runners():
                pool = runner.capture(frame.image, pool)
        shape = self._memory.shape
        # Eagerly, too, the kernels of the ring prepare themselves once for every length.
        whole = mode != 'off' or self.attention_backend in RING_BACKENDS
        frames = shape.anchors + shape.window + 2 if whole else 2
        for count in [frames, 2, 2] if uses_graph_trees(self._model) else [frames]:
            self.reset()
            self._rehearse_stream(frame, count)
            if self._next is not None:
                self._next.warm_up(frame.image)
                self._memory.adopt(self._next.memory)
                self._next.reset()

    def _rehearse_stream(self, frame: Frame, count: int) -> None:
        """Run the scale batch and `count` frames, as far as they fit; the last one is not kept."""
        self._run_scale_batch([frame] * self._config.num_scale_frames)
        room = self._memory.shape.max_keyframes - self._memory.kept
        interval = self._keyframes.interval
        try:
            for i in range(min(count, room)):
                self._keyframes.interval = 1 if i + 1 < count else count
                self._run_frame(frame)
        finally:
            self._keyframes.interval = interval

    def _run_scale_batch(self, frames: list[Frame]) -> list[FrameResult]:
        start_s = time.perf_counter()
        self._memory.write(len(frames), keep=True)
        outputs = self._forward(frames, len(frames))
        self._memory.commit()
        self._keyframes.start(outputs['pose_enc'][0, -1])
        results = self._results(frames, outputs, True, start_s)
        self._scale_frames = len(frames)
        return results

    def _run_frame(self, frame: Frame, moves: bool = True) -> FrameResult:
        """Run one frame; without motion it is no keyframe and does not count on the way to one."""
        if self._next is not None and self._next.complete:
            self._roll_over()  # only now: the frame before ran the next window's batch
        start_s = time.perf_counter()
        self._memory.write(1, moves and self._keyframes.keeps_early())
        batch = self._next.scale_frames if self.window else self._scale_frames
        outputs = self._forward([frame], batch)
        due = moves and self._keyframes.keeps(outputs)
        # The keys of a frame that is not finite would spoil all frames that see them.
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
            self._gate.clear()  # the next frame is due, even if it shows no motion
        (result,) = self._results([frame], outputs, kept, start_s)
        self._streamed += 1
        limit = self._memory.shape.max_keyframes
        if kept and self._next is not None and self._memory.kept > limit - self._next.overlap:
            self._next.add(frame.image, outputs)
        return result

    def _roll_over(self) -> None:
        seam = self._next.join(self._move)
        if seam is None:  # the next keyframe finds no room, and `push` starts a new sequence
            LOGGER.error('cannot roll over: the next window has a pose that is not finite')
            self._next.reset()
            return
        self._left_behind += self._memory.kept - self._next.overlap
        self._memory.adopt(self._next.memory)
        self._keyframes.refer_to(self._next.last_pose_enc)
        self._next.reset()
        self._move = seam.move
        self.window += 1
        self.last_scale_step, self.last_residual = seam.scale_step, seam.residual
        LOGGER.log(
            logging.INFO if seam.consistent else logging.WARNING,
            'window %d goes on from %d keyframes: scale step %.4f, residual %.1f %% of depth%s',
            self.window,
            self._next.overlap,
            seam.scale_step,
            100 * seam.residual,
            '' if seam.consistent else '; the windows do not agree, the map may be bent here',
        )

    def _forward(self, frames: list[Frame], scale_frames: int) -> Outputs:
        return self._runner(torch.stack([frame.image for frame in frames]), scale_frames)

    def _results(
        self, frames: list[Frame], outputs: Outputs, kept: bool, start_s: float
    ) -> list[FrameResult]:
        first = self._scale_frames + self._streamed
        return results_of(frames, outputs, self._move, first, kept, start_s)
