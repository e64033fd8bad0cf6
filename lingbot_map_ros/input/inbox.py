"""Queues for the worker: images (newest only, or a bounded FIFO) and flush requests."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
import threading
import time

from lingbot_map_ros.frame import Frame

_STOPPING = 'the node is stopping'


class Inbox:
    """
    Queue of at most `capacity` frames. Thread-safe.

    If it is full, `put` drops the oldest frame (`newest_wins`) or else the new one.
    """

    def __init__(self, capacity: int, newest_wins: bool):
        self._capacity = capacity
        self._newest_wins = newest_wins
        self._frames: deque[Frame] = deque()
        self._changed = threading.Condition()
        self._woken = False

    def put(self, frame: Frame) -> Frame | None:
        """Add a frame; return the dropped frame, if any."""
        with self._changed:
            dropped = None
            if len(self._frames) >= self._capacity:
                if not self._newest_wins:
                    return frame
                dropped = self._frames.popleft()
            self._frames.append(frame)
            self._changed.notify()
            return dropped

    def pop(self) -> Frame | None:
        with self._changed:
            return self._frames.popleft() if self._frames else None

    def clear(self) -> list[Frame]:
        """Remove and return all frames."""
        with self._changed:
            frames = list(self._frames)
            self._frames.clear()
            return frames

    def wake(self) -> None:
        """Make the current or the next `wait` return at once."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def wait(self, timeout_s: float) -> None:
        """Wait for a frame, a `wake` call or the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._woken, timeout_s)
            self._woken = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._frames)


class FlushRequests:
    """Queue of flush requests (futures); the worker handles one at a time."""

    def __init__(self):
        self._waiting: deque[tuple[float, Future]] = (
            deque()
        )  # (time.monotonic() of the request, result)
        self._current: Future | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self) -> Future:
        """Add a request; its future gets the number of frames from the flush, or an error."""
        done = Future()
        self._waiting.append((time.monotonic(), done))
        if self._closed:
            self._refuse()
        return done

    def are_due(self, newest_s: float) -> bool:
        """Return whether a request is older than `newest_s`: all images before it are done."""
        return bool(self._waiting) and self._waiting[0][0] < newest_s

    def begin(self) -> None:
        """Make the oldest request the current one."""
        _, self._current = self._waiting.popleft()

    def answer(self, frames: int) -> None:
        """Set the result of the current request: the number of frames."""
        self._current.set_result(frames)
        self._current = None

    def fail(self, error: Exception) -> None:
        """Set an error on the current request, if there is one."""
        if self._current is not None:
            self._current.set_exception(error)
            self._current = None

    def close(self) -> None:
        """Fail all present and future requests."""
        self._closed = True
        self.fail(RuntimeError(_STOPPING))
        self._refuse()

    def _refuse(self) -> None:
        while True:
            try:
                _, done = self._waiting.popleft()
            except IndexError:  # no check before popleft: `add` may run this at the same time
                return
            done.set_exception(RuntimeError(_STOPPING))
