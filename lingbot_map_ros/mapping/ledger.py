"""Accounts for every image: in = out + dropped by reason + still waiting, at any moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
import threading
import time

from builtin_interfaces.msg import Time
from lingbot_map_ros.mapping.pace import Pace, PaceMeter
from sensor_msgs.msg import Image
from std_msgs.msg import Header

SUPERSEDED = 'superseded'
QUEUE_FULL = 'queue_full'
REPEATED = 'repeated_stamp'
LATE = 'late'
ZERO_STAMP = 'zero_stamp'
FRAME_ID = 'frame_id'
BAD_IMAGE = 'bad_image'
STATIC = 'static'
MAP_FULL = 'map_full'
BAD_POSE = 'bad_pose'
WORKER_ERROR = 'worker_error'
RESET = 'reset'
INACTIVE = 'inactive'

DROP_REASONS = {
    SUPERSEDED: 'a newer image came before its turn (queue: latest)',
    QUEUE_FULL: 'queue_size images were waiting already (queue: lossless)',
    REPEATED: 'its stamp is that of the image before',
    LATE: 'its stamp is older than that of an image before',
    ZERO_STAMP: 'it has no stamp, and zero_stamp or the other images forbid to give it one',
    FRAME_ID: 'its frame id is empty, the map frame, or not that of the images before',
    BAD_IMAGE: 'unsupported encoding, or malformed',
    STATIC: 'it shows no motion, and the map waits for some to begin (motion_gate)',
    MAP_FULL: 'the map holds max_keyframes keyframes (on_limit: stop)',
    BAD_POSE: 'the network gave a pose that is not finite',
    WORKER_ERROR: 'an exception while it was processed',
    RESET: 'a new map was started while it waited',
    INACTIVE: 'the node was deactivated or stopped while it waited',
}
GAP = 'gaps'
POSE_JUMP = 'pose_jumps'
EVENTS = (GAP, POSE_JUMP)  # worth a look although no image is lost here
_EXPECTED = {SUPERSEDED, STATIC, RESET, INACTIVE}  # nothing is wrong when these happen
_LOG_PERIOD_S = 5.0
_REASONS_SHOWN = 3  # the most frequent, in one line
_MAX_KINDS = 50  # told apart; nonsense on a topic must not fill the memory


class Dropped(Exception):
    """Says why an image is not processed: one of DROP_REASONS, and a line for the log."""

    def __init__(self, reason: str, why: str = ''):
        super().__init__(why)
        self.reason = reason


@dataclass(eq=False)
class Frame:
    """An admitted image on its way through the node."""

    message: Image
    stamp: Time  # what all outputs carry
    frame_id: str
    arrival_s: float  # time.monotonic()
    epoch: int = -1  # the map it belongs to, given when the worker takes it

    @property
    def stamp_ns(self) -> int:
        return to_ns(self.stamp)

    def header(self, frame_id: str) -> Header:
        return Header(stamp=self.stamp, frame_id=frame_id)


@dataclass(frozen=True)
class Counts:
    """Images since the node was configured."""

    received: int
    out: int
    dropped: dict[str, int]
    paused: int  # came while paused; not among the received

    @property
    def waiting(self) -> int:
        return self.received - self.out - sum(self.dropped.values())


class Ledger:
    """
    Counts what became of each image; safe to use from any thread.

    `now_ns` reads the clock that stamps images.
    """

    def __init__(self, logger, now_ns: Callable[[], int] = time.time_ns):
        self._logger, self._now_ns = logger, now_ns
        self._lock = threading.Lock()
        self._received = self._out = self._paused = 0
        self._dropped = Counter()
        self._refused = Counter()  # since the map began, or the last image that got through
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
        """Count an image whose pose is published; `is_initial`: it waited for the map to begin."""
        stamp_ms = (self._now_ns() - frame.stamp_ns) / 1e6
        with self._lock:
            self._out += 1
            self._refused.clear()
            self._meter.depart(frame.arrival_s, stamp_ms, is_initial)

    def count_event(self, event: str, why: str) -> None:
        """Count one of EVENTS and log it, at most every few seconds."""
        assert event in EVENTS, event
        now_s = time.monotonic()
        with self._lock:
            self._events[event] += 1
            count = self._events[event]
            self._trouble_s = now_s
            if not self._is_news(event, '', now_s):
                return
        self._logger.warning(f'{why} ({event}: {count} so far)')

    def events(self) -> dict[str, int]:
        """Return how often each of EVENTS happened."""
        with self._lock:
            return {event: self._events[event] for event in EVENTS}

    def count_drop(self, reason: str, why: str = '', kind: str = '') -> None:
        """
        Count one dropped image and log why.

        That is at most every few seconds per reason, and only once for all images of a `kind`.
        """
        assert reason in DROP_REASONS, reason
        now_s = time.monotonic()
        with self._lock:
            self._dropped[reason] += 1
            count = self._dropped[reason]
            if reason not in _EXPECTED:
                self._refused[reason] += 1
                self._trouble_s = now_s
            if not why or not self._is_news(reason, kind, now_s):
                return
        self._logger.warning(f'image dropped ({reason}, {count} so far): {why}')

    def _is_news(self, reason: str, kind: str, now_s: float) -> bool:
        if kind in self._kinds or (kind and len(self._kinds) < _MAX_KINDS):
            self._kinds[kind] += 1
            return self._kinds[kind] == 1
        quiet = now_s - self._logged_s.get(reason, -float('inf')) < _LOG_PERIOD_S
        if not quiet:
            self._logged_s[reason] = now_s
        return not quiet

    def begin_map(self) -> None:
        with self._lock:
            self._refused.clear()

    def refusal(self) -> str:
        """Return in words that no image got through since one last did; '' if one may yet."""
        with self._lock:
            counts, refused = self._counts(), self._refused.most_common(_REASONS_SHOWN)
        if counts.waiting or not refused:
            return ''
        reasons = ', '.join(f'{reason} {count}' for reason, count in refused)
        return f'all images dropped ({reasons})'

    def kinds(self) -> dict[str, int]:
        """Return how many images of each kind were dropped."""
        with self._lock:
            return dict(self._kinds)

    def seconds_since_trouble(self) -> float:
        """Return how long ago an image was dropped for a reason that somebody should look at."""
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


def to_ns(stamp: Time) -> int:
    return stamp.sec * 1_000_000_000 + stamp.nanosec


def to_stamp(stamp_ns: int) -> Time:
    return Time(sec=stamp_ns // 1_000_000_000, nanosec=stamp_ns % 1_000_000_000)
