"""How fast images come and poses go, and how long they take."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
import statistics
import time

_WINDOW_S = 5.0  # over which rates and latencies are taken
_SAME_CLOCK_MS = 3.6e6  # a stamp further away than an hour is of another clock
_NS = 1e9
_PERIODS = 20  # from which the expected period is taken
_LEAST_PERIODS = 5
_GAP_FACTOR = 2.5  # one image may get lost without a word


@dataclass(frozen=True)
class Pace:
    """
    What the last few seconds were like.

    Latencies end when the pose is published and are of images that came after the map was
    initialized; `initial_ms` is the longest of those before. Stamps of another clock tell nothing.
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
    """Notes when images arrive and when their poses are published; used under a lock."""

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
        """Note a pose whose image was stamped `stamp_ms` ago."""
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


class GapWatch:
    """Finds gaps in a stream of stamps: periods much longer than those before."""

    def __init__(self):
        self.forget()

    def forget(self) -> None:
        """Take the next stamp as the first."""
        self._newest_ns: int | None = None
        self._periods_s: deque[float] = deque(maxlen=_PERIODS)

    def see(self, stamp_ns: int) -> str:
        """Return what is missing before this stamp; '' if nothing is."""
        newest_ns, self._newest_ns = self._newest_ns, stamp_ns
        if newest_ns is None:
            return ''
        period_s = (stamp_ns - newest_ns) / _NS
        known = len(self._periods_s) >= _LEAST_PERIODS
        expected_s = statistics.median(self._periods_s) if known else float('inf')
        self._periods_s.append(period_s)
        if period_s <= _GAP_FACTOR * expected_s:
            return ''
        return (
            f'no image for {period_s:.3f} s where one every {expected_s:.3f} s is expected: the '
            'camera paused, or images get lost on the way here'
        )
