"""A thread that publishes large messages, so that poses never wait for clouds."""

from __future__ import annotations

from collections.abc import Callable
import threading
import time

Job = Callable[[], None]
_LONGEST_WAIT_S = 1.0  # until a changed rate takes effect


class PublisherThread:
    """
    Runs jobs one after the other, with at most one waiting job per kind.

    A new job replaces the waiting one of its kind; with `lossless`, `hand` waits instead. A job
    that fails when `is_connected()` is false ends the thread without an error.
    """

    def __init__(self, lossless: bool, logger, is_connected: Callable[[], bool] = lambda: True):
        self.errors = 0  # jobs that raised
        self._lossless = lossless
        self._logger, self._is_connected = logger, is_connected
        self._changed = threading.Condition()
        self._jobs: dict[str, Job] = {}
        self._repeated: list[tuple[Callable[[], float], Job]] = []
        self._ran_s: list[float] = []
        self._busy = self._stopping = False
        self._thread = threading.Thread(target=self._run, name='publisher', daemon=True)

    def start(self) -> None:
        self._thread.start()

    def repeat(self, rate_hz: Callable[[], float], job: Job) -> None:
        """Run `job` periodically at a rate [Hz] that may change; call before `start`."""
        self._repeated.append((rate_hz, job))
        self._ran_s.append(-float('inf'))

    def hand(self, kind: str, job: Job) -> None:
        """Queue a job; replace the waiting job of its kind, or wait for it if lossless."""
        with self._changed:
            if self._lossless:
                self._changed.wait_for(lambda: kind not in self._jobs or self._stopping)
            self._jobs[kind] = job
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all queued jobs have run."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._jobs or self._busy) or self._stopping)

    def stop(self, timeout_s: float) -> None:
        """Stop after the current job; drop the waiting ones."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._stopping, self._idle_s())
                if self._stopping:
                    return
                jobs = self._due_jobs()
                if self._jobs:
                    jobs.append(self._jobs.pop(next(iter(self._jobs))))
                self._busy = bool(jobs)
                self._changed.notify_all()
            for job in jobs:
                self._guarded(job)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _guarded(self, job: Job) -> None:
        try:
            job()
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

    def _due_jobs(self) -> list[Job]:
        now_s = time.monotonic()
        jobs = []
        for i, (_, job) in enumerate(self._repeated):
            if self._due_s(i) <= now_s:
                self._ran_s[i] = now_s
                jobs.append(job)
        return jobs
