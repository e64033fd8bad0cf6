"""An engine whose poses are known: the camera moves along its optical axis, one step per image."""

from collections import deque
from collections.abc import Callable
import threading

from lingbot_map.streaming.engine import StreamLimitError
from lingbot_map.streaming.frame import FrameResult
from lingbot_map.streaming.preprocess import crop_map
import numpy as np
import torch

STEP = 1.0  # network units per image
DEPTH = 2.0


class FakeEngine:
    """
    Same interface as StreamEngine; remembers its calls and the threads that made them.

    `before_push(n)` is called with the number of the image since the engine was made, and may
    block or raise. `pose(index)` replaces the straight motion.
    """

    compile_mode, attention_backend = 'off', 'sdpa'

    def __init__(
        self,
        params,
        before_push: Callable[[int], None] = lambda n: None,
        pose: Callable[[int], np.ndarray] = None,
    ):
        self.keyframe_interval = params.keyframe_interval
        self.max_keyframes = params.max_keyframes
        self.width = params.image_width or 56
        self.window, self.last_scale_step, self.last_residual = 0, 1.0, 0.0
        self.is_static, self.gated_frames = False, 0
        self.warmed: list[tuple[int, int]] = []
        self.pushed = self.resets = 0
        self.pictures = deque(maxlen=50)  # the newest, as the network would see them
        self.threads: set[int] = set()
        self.inference_modes: set[bool] = set()
        self._params, self._before_push, self._pose = params, before_push, pose or straight
        self._note_thread()
        self._begin()

    def _begin(self):
        self._scale_batch: list[tuple] | None = []  # None once it has run
        self.frames = self.keyframes = 0

    def _note_thread(self):
        self.threads.add(threading.get_ident())
        self.inference_modes.add(torch.is_inference_mode_enabled())

    @property
    def waiting(self) -> int:
        return len(self._scale_batch or ())

    @property
    def sequence(self) -> int:
        return self.resets

    @property
    def held_keyframes(self) -> int:
        return self.keyframes

    def network_size(self, height, width):
        return crop_map(width, height, self.width, 14).network_size

    def check_memory(self, height, width):
        """Find enough for any size."""

    def warm_up(self, height, width):
        self._note_thread()
        self.warmed.append((height, width))
        self.reset()

    def reset(self):
        self.resets += 1
        self._begin()

    def push(self, rgb, tag):
        self._note_thread()
        self.pushed += 1
        self.pictures.append(rgb)
        self._before_push(self.pushed)
        if self.keyframes >= self._params.max_keyframes:
            if getattr(self._params, 'on_limit', 'stop') == 'stop':
                raise StreamLimitError('no room for another keyframe')
            self.reset()  # it cannot roll over
        if self._scale_batch is None:
            self.frames += 1
            return [self._result(rgb, tag, self.frames - 1)]
        self._scale_batch.append((rgb, tag))
        full = len(self._scale_batch) == self._params.num_scale_frames
        return self.flush() if full else []

    def flush(self):
        self._note_thread()
        if not self._scale_batch:
            return []
        batch, self._scale_batch = self._scale_batch, None
        self.frames = len(batch)
        return [self._result(rgb, tag, index) for index, (rgb, tag) in enumerate(batch)]

    def _result(self, rgb, tag, index):
        past_batch = index - self._params.num_scale_frames
        is_keyframe = past_batch < 0 or past_batch % self.keyframe_interval == 0
        self.keyframes += is_keyframe
        height, width = rgb.shape[:2]
        mapping = crop_map(width, height, self.width, 14)
        w, h = mapping.network_size
        K = np.array([[w, 0.0, w / 2], [0.0, w, h / 2], [0.0, 0.0, 1.0]])
        return FrameResult(
            tag,
            index,
            is_keyframe,
            self._pose(index),
            mapping.to_original(K),
            K,
            torch.full((h, w), DEPTH),
            torch.full((h, w), 3.0),
            torch.full((h, w, 3), 128, dtype=torch.uint8),
            mapping,
            {'preprocess': 0.1, 'forward': 0.2},
        )


class Gate:
    """Holds the engine at a given image until it is opened."""

    def __init__(self, at: int):
        self.reached, self._open, self._at = threading.Event(), threading.Event(), at

    def __call__(self, n):
        if n == self._at:
            self.reached.set()
            assert self._open.wait(30)

    def open(self):
        self._open.set()


def straight(index: int) -> np.ndarray:
    """Return the camera-to-world pose after `index` steps forward, from a world turned at will."""
    T = turned()
    T[:3, 3] += index * STEP * T[:3, 2]
    return T


def turned() -> np.ndarray:
    """Return a first pose that is not the identity, as a network may give it."""
    c, s = np.cos(0.3), np.sin(0.3)
    T = np.eye(4)
    T[:3, :3] = np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]]) @ np.array(
        [[1, 0, 0], [0, c, -s], [0, s, c]]
    )
    T[:3, 3] = (0.5, -0.25, 0.1)
    return T
