"""Check image stamps: drop unset, repeated and late ones, detect jumps back and gaps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
import statistics
import time

from lingbot_map_ros.frame import Dropped, LATE, REPEATED, ZERO_STAMP

_NS = 1e9
_PERIODS = 20  # newest periods, whose median is the expected period
_LEAST_PERIODS = 5
_GAP_FACTOR = 2.5  # times the expected period; a single lost image is not reported


@dataclass(frozen=True)
class Admission:
    """The stamp of an admitted image, and how far time jumped back before it (0: no jump)."""

    stamp_ns: int
    jump_s: float = 0.0


class StampGate:
    """
    Admits stamps that are newer than all previous ones, and detects jumps back in time.

    `threshold_s`, `on_jump` and `zero_stamp` are the parameters time_jump_threshold, on_time_jump
    and zero_stamp. Not thread-safe.
    """

    def __init__(self, threshold_s: float, on_jump: str, zero_stamp: str):
        self._threshold_ns = int(threshold_s * _NS)
        self._threshold_s = threshold_s
        self._on_jump = on_jump
        self._zero_stamp = zero_stamp
        self.forget()

    def forget(self) -> None:
        """Reset: admit any stamp next."""
        self._newest_ns: int | None = None
        self._stamped_here = False  # the stamps of this map are arrival times
        self._before_jump_ns = 0
        self._jumped_at_s = -float('inf')

    def judge(self, stamp_ns: int, now_ns: int) -> Admission:
        """
        Admit an image with stamp `stamp_ns` at node time `now_ns`, or raise Dropped.

        After a jump (`jump_s` > 0) the caller must start a new map.
        """
        if stamp_ns <= 0:
            return self._judge_arrival(now_ns)
        admission = self._judge_order(stamp_ns)
        self._stamped_here = False
        return admission

    def _judge_arrival(self, now_ns: int) -> Admission:
        if self._zero_stamp == 'reject':
            raise Dropped(
                ZERO_STAMP,
                'it has no stamp: make the camera driver set one, or '
                "set the parameter 'zero_stamp' to 'arrival'",
            )
        if self._newest_ns is not None and not self._stamped_here:
            raise Dropped(
                ZERO_STAMP,
                'it has no stamp although previous images had one: a map never mixes clocks',
            )
        if now_ns <= 0:
            raise Dropped(
                ZERO_STAMP,
                'it has no stamp and simulated time has not started: is /clock published?',
            )
        admission = self._judge_order(now_ns)
        self._stamped_here = True
        return admission

    def _judge_order(self, stamp_ns: int) -> Admission:
        if self._newest_ns is None:
            self._newest_ns = stamp_ns
            return Admission(stamp_ns)
        advance_ns = stamp_ns - self._newest_ns
        if advance_ns == 0:
            raise Dropped(REPEATED, f'stamp {stamp_ns / _NS:.9f} is repeated')
        if advance_ns < -self._threshold_ns and self._on_jump == 'reset':
            return self._jump(stamp_ns, -advance_ns)
        if advance_ns < 0:
            raise Dropped(
                LATE,
                f'stamp {stamp_ns / _NS:.9f} is {-advance_ns / _NS:.3f} s older '
                'than the newest image',
            )
        if self._from_before_jump(stamp_ns, advance_ns):
            raise Dropped(LATE, f'stamp {stamp_ns / _NS:.9f} is from before the jump in time')
        self._newest_ns = stamp_ns
        return Admission(stamp_ns)

    def _jump(self, stamp_ns: int, back_ns: int) -> Admission:
        self._before_jump_ns = self._newest_ns
        self._jumped_at_s = time.monotonic()
        self._newest_ns = stamp_ns
        return Admission(stamp_ns, back_ns / _NS)

    def _from_before_jump(self, stamp_ns: int, advance_ns: int) -> bool:
        """Return whether a stamp belongs to a late image from before the jump."""
        recent = time.monotonic() - self._jumped_at_s < self._threshold_s
        near_end = 0 <= self._before_jump_ns - stamp_ns <= self._threshold_ns
        return recent and near_end and advance_ns > self._threshold_ns


class GapWatch:
    """Detects gaps in a stream of stamps: periods much longer than the usual one."""

    def __init__(self):
        self.forget()

    def forget(self) -> None:
        """Reset: the next stamp is the first."""
        self._newest_ns: int | None = None
        self._periods_s: deque[float] = deque(maxlen=_PERIODS)

    def see(self, stamp_ns: int) -> str:
        """Return a text about the gap before this stamp, or '' if there is none."""
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
            'camera paused, or images were lost in transport'
        )
