"""What the library, which knows no ROS, has to say in the log of the node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import logging
import threading
import time

from lingbot_map.streaming import memory_fit

_PERIOD_S = 5.0  # between records of the same line of code


class LibraryLog(logging.Handler):
    """Hands what is logged in the thread that makes it to the logger of a node."""

    def __init__(self, logger):
        super().__init__()
        self._logger, self._thread = logger, threading.get_ident()
        self._said_s: dict[tuple[str, int], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        # Each node of a process has a handler and a thread: a record belongs to one of them.
        if record.thread != self._thread or not self._is_news(record):
            return
        if record.levelno >= logging.ERROR:
            self._logger.error(record.getMessage())
        elif record.levelno >= logging.WARNING:
            self._logger.warning(record.getMessage())
        else:
            self._logger.info(record.getMessage())

    def _is_news(self, record: logging.LogRecord) -> bool:
        place, now_s = (record.pathname, record.lineno), time.monotonic()
        quiet = now_s - self._said_s.get(place, -float('inf')) < _PERIOD_S
        if not quiet:
            self._said_s[place] = now_s
        return not quiet


@contextmanager
def library_log(logger) -> Iterator[None]:
    """Have what `lingbot_map` says in this thread logged by `logger` of a node."""
    library, handler = logging.getLogger('lingbot_map'), LibraryLog(logger)
    memory_fit.LOGGER.setLevel(logging.INFO)  # the size of the memory; elsewhere warnings do
    library.addHandler(handler)
    try:
        yield
    finally:
        library.removeHandler(handler)
