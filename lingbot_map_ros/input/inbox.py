"""Where images wait for the worker: the newest one only, or a bounded first-in first-out queue."""

from __future__ import annotations

from collections import deque
import threading

from lingbot_map_ros.mapping.ledger import Frame


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
