"""Counts of received, processed and dropped images, and rates and latencies."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
import threading
import time

from lingbot_map_ros.frame import DROP_REASONS, Frame, INACTIVE, RESET, STATIC, SUPERSEDED

_WINDOW_S = 5.0  # for rates and latencies
_SAME_CLOCK_MS = 3.6e6  # stamps more than an hour apart come from different clocks
_NS = 1e9
GAP = 'gaps'
POSE_JUMP = 'pose_jumps'
EVENTS = (GAP, POSE_JUMP)  # shown as a warning, although the node drops no image
_EXPECTED = {SUPERSEDED, STATIC, RESET, INACTIVE}  # normal operation
_LOG_PERIOD_S = 5.0
_REASONS_SHOWN = 3  # the most frequent ones
_MAX_KINDS = 50  # limits the memory if a topic carries arbitrary data


@dataclass(frozen=True)
class Pace:
    """
    Rates and latencies over the last seconds.

    A latency ends when the pose is published. `arrival_ms` (since arrival) and `stamp_ms` (since
    the stamp) cover images that arrived after the map was initialized; `initial_ms` is the largest
    latency since arrival of the earlier ones. `stamp_ms` leaves out stamps of another clock.
    """

    input_hz: float
    output_hz: float
    arrival_ms: list[float]
    stamp_ms: list[float]
    initial_ms: float


@dataclass(frozen=True)
class _Departure:
    at_s: float
    arrival_ms: float
    stamp_ms: float
    is_initial: bool


class PaceMeter:
    """Records when images arrive and when their poses are published. Not thread-safe."""

    def __init__(self):
        self._arrivals_s: deque[float] = deque()
        self._departures: deque[_Departure] = deque()
        self._initial_ms = 0.0

    def arrive(self) -> None:
        now_s = time.monotonic()
        self._arrivals_s.append(now_s)
        while self._arrivals_s[0] < now_s - _WINDOW_S:
            self._arrivals_s.popleft()

    def depart(self, arrival_s: float, stamp_ms: float, is_initial: bool) -> None:
        """Record a published pose whose image was stamped `stamp_ms` ago."""
        now_s = time.monotonic()
        arrival_ms = 1e3 * (now_s - arrival_s)
        if is_initial:
            began = not (self._departures and self._departures[-1].is_initial)
            self._initial_ms = arrival_ms if began else max(arrival_ms, self._initial_ms)
        self._departures.append(_Departure(now_s, arrival_ms, stamp_ms, is_initial))
        while self._departures[0].at_s < now_s - _WINDOW_S:
            self._departures.popleft()

    def pace(self) -> Pace:
        begin_s = time.monotonic() - _WINDOW_S
        recent = [d for d in self._departures if d.at_s >= begin_s]
        steady = [d for d in recent if not d.is_initial]
        return Pace(
            sum(at_s >= begin_s for at_s in self._arrivals_s) / _WINDOW_S,
            len(recent) / _WINDOW_S,
            [d.arrival_ms for d in steady],
            [d.stamp_ms for d in steady if abs(d.stamp_ms) < _SAME_CLOCK_MS],
            self._initial_ms,
        )


@dataclass(frozen=True)
class Counts:
    """Images since the node was configured."""

    received: int
    out: int
    dropped: dict[str, int]
    paused: int  # arrived while paused; not part of `received`

    @property
    def waiting(self) -> int:
        return self.received - self.out - sum(self.dropped.values())


class Ledger:
    """
    Counts received, processed and dropped images. Thread-safe.

    `now_ns` reads the clock of the stamps.
    """

    def __init__(self, logger, now_ns: Callable[[], int] = time.time_ns):
        self._logger, self._now_ns = logger, now_ns
        self._lock = threading.Lock()
        self._received = self._out = self._paused = 0
        self._dropped = Counter()
        self._dropped_before = Counter()  # dropped images when the last pose was published
        self._kinds = Counter()
        self._events = Counter()
        self._logged_s: dict[str, float] = {}
        self._trouble_s = -float('inf')
        self._arrived_s = -float('inf')
        self._meter = PaceMeter()

    def receive(self) -> None:
        with self._lock:
            self._received += 1
            self._arrived_s = time.monotonic()
            self._meter.arrive()

    def count_paused(self) -> None:
        with self._lock:
            self._paused += 1
            self._arrived_s = time.monotonic()

    def count_out(self, frame: Frame, is_initial: bool = False) -> None:
        """Count a published pose; `is_initial`: its image arrived before the map initialized."""
        stamp_ms = (self._now_ns() - frame.stamp_ns) / 1e6
        with self._lock:
            self._out += 1
            self._dropped_before = Counter(self._dropped)
            self._meter.depart(frame.arrival_s, stamp_ms, is_initial)

    def count_event(self, event: str, why: str) -> None:
        """Count one of EVENTS and log it, at most every few seconds."""
        assert event in EVENTS, event
        now_s = time.monotonic()
        with self._lock:
            self._events[event] += 1
            count = self._events[event]
            self._trouble_s = now_s
            if not self._is_due(event, '', now_s):
                return
        self._logger.warning(f'{why} ({event}: {count} so far)')

    def events(self) -> dict[str, int]:
        """Return how often each of EVENTS happened."""
        with self._lock:
            return {event: self._events[event] for event in EVENTS}

    def count_drop(self, reason: str, why: str = '', kind: str = '') -> None:
        """
        Count one dropped image and log why.

        At most one line every few seconds per reason, or only one line ever per `kind`.
        """
        assert reason in DROP_REASONS, reason
        now_s = time.monotonic()
        with self._lock:
            self._dropped[reason] += 1
            count = self._dropped[reason]
            if reason not in _EXPECTED:
                self._trouble_s = now_s
            if not why or not self._is_due(reason, kind, now_s):
                return
        self._logger.warning(f'image dropped ({reason}, {count} so far): {why}')

    def _is_due(self, reason: str, kind: str, now_s: float) -> bool:
        """Return whether to log a line; count the kind."""
        if kind in self._kinds or (kind and len(self._kinds) < _MAX_KINDS):
            self._kinds[kind] += 1
            return self._kinds[kind] == 1
        quiet = now_s - self._logged_s.get(reason, -float('inf')) < _LOG_PERIOD_S
        if not quiet:
            self._logged_s[reason] = now_s
        return not quiet

    def refusal(self, since: Counts) -> str:
        """
        Return a text if all images are dropped; '' if a pose was published or an image waits.

        Counted since `since`, or since the last published pose if there was one after it.
        """
        with self._lock:
            counts = self._counts()
            before = since.dropped if counts.out == since.out else self._dropped_before
            refused = Counter(counts.dropped) - Counter(before)
        for reason in _EXPECTED:
            del refused[reason]
        if counts.waiting or not refused:
            return ''
        shown = refused.most_common(_REASONS_SHOWN)
        reasons = ', '.join(f'{reason} {count}' for reason, count in shown)
        return f'all images dropped ({reasons})'

    def kinds(self) -> dict[str, int]:
        """Return the number of dropped images of each kind (see `count_drop`)."""
        with self._lock:
            return dict(self._kinds)

    def seconds_since_trouble(self) -> float:
        """Return the time since the last event, or drop for an unexpected reason."""
        return time.monotonic() - self._trouble_s

    def pace(self) -> Pace:
        with self._lock:
            return self._meter.pace()

    def seconds_since_arrival(self) -> float:
        return time.monotonic() - self._arrived_s

    def counts(self) -> Counts:
        with self._lock:
            return self._counts()

    def _counts(self) -> Counts:
        return Counts(self._received, self._out, dict(self._dropped), self._paused)
