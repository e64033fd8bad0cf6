"""A thread that publishes large messages, so that poses never wait for clouds."""

from __future__ import annotations

from collections.abc import Callable
import threading
import time

Task = Callable[[], None]
_LONGEST_WAIT_S = 1.0  # until a changed rate takes effect


class PublisherThread:
    """
    Runs tasks one after the other, with at most one waiting task per kind.

    A new task replaces the waiting one of its kind; with `lossless`, `hand` waits instead. A task
    that fails when `is_connected()` is false ends the thread without an error.
    """

    def __init__(self, lossless: bool, logger, is_connected: Callable[[], bool] = lambda: True):
        self.errors = 0  # tasks that raised
        self._lossless = lossless
        self._logger, self._is_connected = logger, is_connected
        self._changed = threading.Condition()
        self._tasks: dict[str, Task] = {}
        self._repeated: list[tuple[Callable[[], float], Task]] = []
        self._ran_s: list[float] = []
        self._busy = self._stopping = False
        self._thread = threading.Thread(target=self._run, name='publisher', daemon=True)

    def start(self) -> None:
        self._thread.start()

    def repeat(self, rate_hz: Callable[[], float], task: Task) -> None:
        """Run `task` periodically at a rate [Hz] that may change; call before `start`."""
        self._repeated.append((rate_hz, task))
        self._ran_s.append(-float('inf'))

    def hand(self, kind: str, task: Task) -> None:
        """Queue a task; replace the waiting task of its kind, or wait for it if lossless."""
        with self._changed:
            if self._lossless:
                self._changed.wait_for(lambda: kind not in self._tasks or self._stopping)
            self._tasks[kind] = task
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all queued jobs have run."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._tasks or self._busy) or self._stopping)

    def stop(self, timeout_s: float) -> None:
        """Stop after the current task; drop the waiting ones."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._stopping, self._idle_s())
                if self._stopping:
                    return
                tasks = self._due_tasks()
                if self._tasks:
                    tasks.append(self._tasks.pop(next(iter(self._tasks))))
                self._busy = bool(tasks)
                self._changed.notify_all()
            for task in tasks:
                self._guarded(task)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _guarded(self, task: Task) -> None:
        try:
            task()
        except Exception as error:  # top of the thread: if it ended, the worker would wait forever
            if not self._is_connected():
                self._stopping = True
                return
            self.errors += 1
            self._logger.error(
                f'publishing failed: {type(error).__name__}: {error}', throttle_duration_sec=5.0
            )

    def _idle_s(self) -> float | None:
        if not self._repeated:
            return None
        due_s = min(map(self._due_s, range(len(self._repeated))))
        return min(max(0.0, due_s - time.monotonic()), _LONGEST_WAIT_S)

    def _due_s(self, i: int) -> float:
        rate_hz, _ = self._repeated[i]
        return self._ran_s[i] + 1 / rate_hz()

    def _due_tasks(self) -> list[Task]:
        now_s = time.monotonic()
        tasks = []
        for i, (_, task) in enumerate(self._repeated):
            if self._due_s(i) <= now_s:
                self._ran_s[i] = now_s
                tasks.append(task)
        return tasks
