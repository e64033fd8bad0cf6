"""Who waits for a flush: asked for in any thread, answered by the worker."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
import time

_STOPPING = 'the node is stopping'


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
