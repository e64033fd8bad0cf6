"""The thread that loads the engine, runs it and releases it; no other thread uses the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
import ctypes
import logging
import threading
import time

from lingbot_map.errors import describe
from lingbot_map.images.decoding import UnsupportedImage
from lingbot_map.images.view import View
from lingbot_map.settings import usual_image_size
from lingbot_map.streaming import budget
from lingbot_map.streaming.engine import StreamEngine, StreamLimitError
from lingbot_map.streaming.frame import FrameResult
from lingbot_map_ros.frame import (
    BAD_IMAGE,
    BAD_POSE,
    Dropped,
    Frame,
    INACTIVE,
    MAP_FULL,
    RESET,
    STATIC,
    WORKER_ERROR,
)
from lingbot_map_ros.input.images import ImageInput
from lingbot_map_ros.input.inbox import FlushRequests, Inbox
from lingbot_map_ros.mapping.engine_status import Progress, WarmUpReport
from lingbot_map_ros.mapping.ledger import Ledger, POSE_JUMP
from lingbot_map_ros.mapping.map_session import MapSession, State
from lingbot_map_ros.output.publishing import Outputs
from lingbot_map_ros.parameters import NodeParams
import numpy as np
import torch

_RECORD_LOG_PERIOD_S = 5.0  # for records of the same line of code
_POLL_S = 0.2
_ERROR_LOG_PERIOD_S = 5.0
_SCALE_LOG_PERIOD_S = 30.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_KEPT_BYTES = 128 * 2**20
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # that glibc accepts


def keep_freed_memory() -> None:
    """
    Let glibc keep freed memory for the next message instead of returning it to the system.

    Otherwise each cloud causes page faults for its memory. Medians of two runs on two CPU cores,
    with this call and without: a 518x392 cloud on the publisher thread 2.5 and 2.8 ms against
    15.3 and 19.2 ms, serialising 1 M points 6.4 and 15.0 ms against 40.5 and 70.3 ms. The time
    from image to TF is the same. Does nothing with other C libraries.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


class LibraryLog(logging.Handler):
    """Forwards log records of the thread that created this handler to a node's logger."""

    def __init__(self, logger):
        super().__init__()
        self._logger, self._thread = logger, threading.get_ident()
        self._logged_s: dict[tuple[str, int], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        # Each node of a process has its own worker thread and its own handler.
        if record.thread != self._thread or not self._is_due(record):
            return
        if record.levelno >= logging.ERROR:
            self._logger.error(record.getMessage())
        elif record.levelno >= logging.WARNING:
            self._logger.warning(record.getMessage())
        else:
            self._logger.info(record.getMessage())

    def _is_due(self, record: logging.LogRecord) -> bool:
        place, now_s = (record.pathname, record.lineno), time.monotonic()
        quiet = now_s - self._logged_s.get(place, -float('inf')) < _RECORD_LOG_PERIOD_S
        if not quiet:
            self._logged_s[place] = now_s
        return not quiet


@contextmanager
def library_log(logger) -> Iterator[None]:
    """Log the records of `lingbot_map` from this thread with `logger` of a node."""
    library, handler = logging.getLogger('lingbot_map'), LibraryLog(logger)
    budget.LOGGER.setLevel(logging.INFO)  # also logs the memory size
    library.addHandler(handler)
    try:
        yield
    finally:
        library.removeHandler(handler)


class Worker:
    """
    Takes images from the inbox, runs the engine and passes the results to the outputs.

    `start_map()` makes a new MapSession the current one of `outputs`. After an exception the
    thread logs it, starts a new map and continues. Public attributes are thread-safe to read.

    `outputs.current` is the map of new images, `_session` that of the image being processed. The
    two differ from a reset until the next image is taken.
    """

    def __init__(
        self,
        load: Callable[[NodeParams], StreamEngine],
        images: ImageInput,
        inbox: Inbox,
        ledger: Ledger,
        outputs: Outputs,
        start_map: Callable[[], MapSession],
        logger,
    ):
        self.phase = State.LOADING
        self.errors = 0
        self.forward_ms = 0.0  # of the newest result
        self.gpu_memory_mib = 0.0  # allocated by torch; 0 on a CPU
        self.warm_up = WarmUpReport(outputs.params.max_keyframes)  # the latest one
        self._load_engine, self._images, self._inbox = load, images, inbox
        self._ledger, self._outputs, self._logger = ledger, outputs, logger
        self._start_map = start_map
        self._engine: StreamEngine | None = None
        self._session: MapSession = outputs.current
        self._engine_session: MapSession | None = None  # whose images are in the engine
        self._flushes = FlushRequests()
        self._busy_since_s: float | None = None
        self._stopping = False
        self._loaded: Future = Future()
        self._thread = threading.Thread(target=self._run, name='worker', daemon=True)

    def start(self) -> Future:
        """Start loading; the future is done when images can be processed, or has the exception."""
        self._thread.start()
        return self._loaded

    def flush(self) -> Future:
        """Process all waiting images and a partial scale batch; the future returns its size."""
        done = self._flushes.add()
        self._inbox.wake()
        return done

    def stop(self, timeout_s: float) -> bool:
        """Stop after the current image; return whether the thread has ended."""
        self._stopping = True
        self._inbox.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def busy_s(self) -> float:
        """Return how long the current image has been processed; 0 when idle or warming up."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def _run(self) -> None:
        # Entered once, before the warm-up: a change of the grad mode causes recompilation.
        with torch.inference_mode(), library_log(self._logger):
            while not self._is_ending():
                try:
                    if self._engine is None:
                        self._load()
                    self._serve()
                except Exception as error:  # the thread must go on
                    self._on_error(error)
            self._release()

    def _is_ending(self) -> bool:
        """Return whether to end: on request, or because ROS was shut down."""
        if not (self._stopping or self._outputs.connected):
            self._stopping = True
            self._logger.info('ROS was shut down: no more images are processed')
            if not self._loaded.done():
                self._loaded.set_exception(RuntimeError('ROS was shut down'))
        return self._stopping

    def _load(self) -> None:
        params = self._outputs.params
        self._engine = self._load_engine(params)
        self._warm_up(*usual_image_size(params))
        keep_freed_memory()  # only now: memory freed while loading goes back to the system
        if not self._stopping:
            self._loaded.set_result(None)

    def _warm_up(self, height: int, width: int) -> None:
        self.phase = State.WARMING_UP
        start_s = time.monotonic()
        self._engine.warm_up(height, width)
        self._engine_session = self._session
        size, seconds = self._engine.network_size(height, width), time.monotonic() - start_s
        self.warm_up = WarmUpReport.of(self._engine, size, seconds)
        self._logger.info(str(self.warm_up))
        self._note_memory()
        self.phase = State.READY

    def _note_memory(self) -> None:
        if torch.cuda.is_initialized():
            self.gpu_memory_mib = torch.cuda.memory_allocated() / 2**20

    def _serve(self) -> None:
        while not self._is_ending():
            self._inbox.wait(0.0 if self._flushes else _POLL_S)
            is_first = len(self._inbox) and self._outputs.current.view is None
            if is_first and not self._images.ready(_POLL_S):
                continue
            frame = self._take()
            if frame is not None:
                self._process(frame)
            # With a camera faster than the device the inbox is never empty.
            if self._flushes.are_due(float('inf') if frame is None else frame.arrival_s):
                self._flush()

    def _take(self) -> Frame | None:
        """Return the next image, assigned to the current map; None if none waits."""
        # A reset changes the map and empties the inbox under the same lock.
        with self._outputs.lock:
            frame, session = self._inbox.pop(), self._outputs.current
        self._switch_to(session)
        if frame is not None:
            frame.session = session
        return frame

    def _switch_to(self, session: MapSession) -> None:
        """Continue with another map; drop images of the previous one that are in the engine."""
        if session is not self._session:
            self._drop_held(RESET)
            self._session = session

    def _process(self, frame: Frame) -> None:
        self._busy_since_s = time.monotonic()
        self._session.held.append(frame)
        try:
            self._push(frame)
        finally:
            self._busy_since_s = None
            self._note_memory()
            self._outputs.acknowledge(frame.message.header)

    def _push(self, frame: Frame) -> None:
        try:
            image = self._images.decode(frame.message)
            view = self._view_of(image, frame.frame_id)
            width, height = view.upright_size
            network_size = self._engine.network_size(height, width)
            if network_size != self.warm_up.size:
                self._engine.check_memory(height, width)
        except UnsupportedImage as error:
            self._drop(frame, BAD_IMAGE, str(error), error.kind)
            return
        except ValueError as error:  # too large, or nothing is left after mask and crop
            self._drop(frame, BAD_IMAGE, str(error))
            return
        if self._session.is_outdated():
            self._logger.warning('the camera extrinsics are available now: starting a new map')
            self._move_to_new_map(frame)
        self._reset_engine_for_new_map()
        if view is not self._session.view:
            self._change_view(frame, view, network_size)
        self._infer(frame, view.prepare(image))

    def _infer(self, frame: Frame, rgb: np.ndarray) -> None:
        engine, params = self._engine, self._outputs.params
        engine.keyframe_interval = params.keyframe_interval
        sequence = engine.sequence
        try:
            results = engine.push(rgb, frame)
        except StreamLimitError:
            trouble = (
                f'the map holds max_keyframes ({engine.max_keyframes}) and on_limit is '
                f"'{params.on_limit}': call ~/reset for a new map, or set on_limit to roll_over"
            )
            self._session.trouble = trouble
            self._drop(frame, MAP_FULL, trouble)
            return
        if engine.sequence != sequence:
            self._follow_engine_reset(frame)
        self._session.trouble = ''
        if engine.is_static and not results:
            self._drop_static(frame)
        self._deliver(results)

    def _drop_static(self, frame: Frame) -> None:
        self._drop(frame, STATIC)
        if not self._session.waits_for_motion:
            self._session.waits_for_motion = True
            self._logger.info(
                'the images show no motion: the map starts once the camera moves '
                "(set 'motion_gate' to false to start at once)"
            )

    def _follow_engine_reset(self, frame: Frame) -> None:
        """Start a new map, since the engine started a new sequence with this image."""
        self._logger.warning(
            'the memory is full: starting a new map, path and map are cleared '
            f'(on_limit: {self._outputs.params.on_limit})'
        )
        view = self._session.view
        self._move_to_new_map(frame)
        self._session.view, self._engine_session = view, self._session

    def _view_of(self, image: np.ndarray, frame_id: str) -> View:
        size, view = image.shape[1::-1], self._session.view
        if view is not None and view.size == size:
            return view
        return self._images.view(size, frame_id)

    def _reset_engine_for_new_map(self) -> None:
        """Reset the engine if it contains images of another map."""
        if self._engine_session is not self._session:
            self._engine.reset()
            self._engine_session = self._session

    def _change_view(self, frame: Frame, view: View, network_size: tuple[int, int]) -> None:
        """Set the view of a map; if the image size changed, start a new map."""
        width, height = view.size
        if self._session.view is not None:
            self._logger.warning(f'the image size changed to {width}x{height}: starting a new map')
            self._move_to_new_map(frame)
            self._reset_engine_for_new_map()
        if network_size != self.warm_up.size:
            self._logger.info(f'images are {width}x{height}: warming up again for their size')
            self._busy_since_s = None  # may take minutes; the watchdog must not fire
            self._warm_up(*view.upright_size[::-1])
            self._busy_since_s = time.monotonic()
        self._session.view = view

    def _move_to_new_map(self, frame: Frame) -> None:
        """Start a new map with the current image, unless a reset has started one meanwhile."""
        with self._outputs.lock:
            if self._outputs.current is not frame.session:
                return
            session = self._start_map()
        self._session.held.remove(frame)
        self._switch_to(session)
        session.held.append(frame)
        frame.session = session

    def _flush(self) -> None:
        self._flushes.begin()
        self._busy_since_s = time.monotonic()
        try:
            self._reset_engine_for_new_map()
            results = self._engine.flush()
            self._deliver(results)
            self._outputs.flush()
        finally:
            self._busy_since_s = None
        self._flushes.answer(len(results))

    def _deliver(self, results: list[FrameResult]) -> None:
        session = self._session
        for result in results:
            self._deliver_one(session.view.restore(result))
        session.end_batch()
        session.progress = Progress.of(self._engine)

    def _deliver_one(self, result: FrameResult) -> None:
        frame, session = result.tag, self._session
        self._estimate_scale(frame, result)
        try:
            placement, scene = session.place(result)
            self._outputs.publish_pose(frame, placement, scene)
        except Dropped as drop:
            if drop.reason == BAD_POSE:
                session.trouble = str(drop)
            self._drop(frame, drop.reason, str(drop))
            return
        session.held.remove(frame)
        self._ledger.count_out(frame, frame.arrival_s < session.initialized_s)
        session.is_initialized = True
        jump = session.find_jump(frame, placement, scene)
        if jump:
            self._ledger.count_event(POSE_JUMP, jump)
        self.forward_ms = result.timings_ms['forward']
        self._outputs.publish_dense(frame, placement.frame)

    def _estimate_scale(self, frame: Frame, result: FrameResult) -> None:
        """Rescale path and points once the scale is found; warn if it may never be."""
        session = self._session
        found = session.estimate_scale(frame, result)
        if found is not None:
            fit, ratio = found
            self._outputs.rescale(session, ratio, session.scale_origin)
            self._logger.info(
                f'scale is {fit}; map and path are rescaled; the scale is fixed until ~/reset'
            )
        elif session.scale_trouble:
            self._logger.warning(
                f'no scale yet: {session.scale_trouble}',
                throttle_duration_sec=_SCALE_LOG_PERIOD_S,
            )

    def _drop(self, frame: Frame, reason: str, why: str = '', kind: str = '') -> None:
        self._session.held.remove(frame)
        self._ledger.count_drop(reason, why, kind)

    def _drop_held(self, reason: str) -> None:
        for frame in list(self._session.held):
            self._drop(frame, reason)

    def _on_error(self, error: Exception) -> None:
        if not self._loaded.done():
            self._stopping = True
            self._loaded.set_exception(error)
            return
        if self._is_ending():  # publishing fails when ROS is shut down
            return
        self.errors += 1
        reason = describe(error)
        self._logger.error(
            f'{reason}: starting a new map ({self.errors} errors so far)',
            throttle_duration_sec=_ERROR_LOG_PERIOD_S,
        )
        self._drop_held(WORKER_ERROR)
        self._abandon_map(reason)
        self.phase = State.READY
        self._flushes.fail(error)

    def _abandon_map(self, trouble: str) -> None:
        """Start a new map with a trouble, unless a reset has started one meanwhile."""
        with self._outputs.lock:
            if self._outputs.current is self._session:
                self._session = self._start_map()
                self._session.trouble = trouble

    def _release(self) -> None:
        self._drop_held(INACTIVE)
        self.phase = State.ENDED
        self._flushes.close()
        self._engine = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
