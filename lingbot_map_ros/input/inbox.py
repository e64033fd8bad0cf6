"""Where images wait for the worker: the newest one only, or a bounded first-in first-out queue."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
import threading
import time

from lingbot_map_ros.frame import Frame

_STOPPING = 'the node is stopping'


class Inbox:
    """
    Holds up to `capacity` frames; safe to use from any thread.

    When it is full, `newest_wins` decides who gives way: the oldest frame, or the new one.
    """

    def __init__(self, capacity: int, newest_wins: bool):
        self._capacity = capacity
        self._newest_wins = newest_wins
        self._frames: deque[Frame] = deque()
        self._changed = threading.Condition()
        self._woken = False

    def put(self, frame: Frame) -> Frame | None:
        """Add a frame; return the frame that had to give way, if any."""
        with self._changed:
            loser = None
            if len(self._frames) >= self._capacity:
                if not self._newest_wins:
                    return frame
                loser = self._frames.popleft()
            self._frames.append(frame)
            self._changed.notify()
            return loser

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
        """End the present or the next `wait` at once."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def wait(self, timeout_s: float) -> None:
        """Wait until there is a frame, `wake` is called, or `timeout_s` has passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._woken, timeout_s)
            self._woken = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._frames)


class FlushRequests:
    """A queue of futures, of which the worker has at most one in hand."""

    def __init__(self):
        self._waiting: deque[tuple[float, Future]] = deque()  # when asked for, by time.monotonic()
        self._in_hand: Future | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self) -> Future:
        """Return a future that will hold how many frames the flush brought, or an error."""
        done = Future()
        self._waiting.append((time.monotonic(), done))
        if self._closed:
            self._refuse()
        return done

    def are_due(self, newest_s: float) -> bool:
        """Tell whether all images are done that came before a request, the last at `newest_s`."""
        return bool(self._waiting) and self._waiting[0][0] < newest_s

    def take(self) -> None:
        """Take the oldest request in hand."""
        _, self._in_hand = self._waiting.popleft()

    def answer(self, frames: int) -> None:
        """Answer the request in hand."""
        self._in_hand.set_result(frames)
        self._in_hand = None

    def fail(self, error: Exception) -> None:
        """Answer the request in hand with an error, if there is one."""
        if self._in_hand is not None:
            self._in_hand.set_exception(error)
            self._in_hand = None

    def close(self) -> None:
        """Refuse all requests, those to come as well."""
        self._closed = True
        self.fail(RuntimeError(_STOPPING))
        self._refuse()

    def _refuse(self) -> None:
        while True:
            try:
                _, done = self._waiting.popleft()
            except IndexError:  # not asked for before: `ask` may do this at the same time
                return
            done.set_exception(RuntimeError(_STOPPING))
