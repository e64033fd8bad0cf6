"""Admit or drop images by frame id and stamp, before they are decoded."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
import statistics
import time

from lingbot_map_ros.frame import Dropped, FRAME_ID, LATE, REPEATED, to_ns, ZERO_STAMP
from lingbot_map_ros.parameters import NodeParams
from std_msgs.msg import Header

_NS = 1e9
_PERIODS = 20  # newest periods, whose median is the expected period
_LEAST_PERIODS = 5
_GAP_FACTOR = 2.5  # times the expected period; a single lost image is no gap


@dataclass(frozen=True)
class Admitted:
    """Stamp and frame id of an admitted image, used for all its outputs."""

    stamp_ns: int
    camera: str  # frame id
    jump_s: float = 0.0  # jump back in time before this image; 0: none


class Admission:
    """
    Admits images of one camera with increasing stamps, or raises Dropped. Not thread-safe.

    Replaced by ~/reset only. A map that starts for another reason keeps it, so that late and
    repeated images of the previous map are still dropped.
    """

    def __init__(self, params: NodeParams):
        self._params = params
        self._gate = StampGate(params.time_jump_threshold, params.on_time_jump, params.zero_stamp)
        self._camera = ''  # frame id of earlier images

    def admit(self, header: Header, now_ns: int) -> Admitted:
        """
        Admit an image at the node's time `now_ns`; after a jump back the caller starts a new map.

        :raises Dropped: the frame id or the stamp does not fit.
        """
        camera = self._check_frame_id(header.frame_id)
        verdict = self._gate.judge(to_ns(header.stamp), now_ns)
        self._camera = camera
        return Admitted(verdict.stamp_ns, camera, verdict.jump_s)

    def _check_frame_id(self, frame_id: str) -> str:
        frame_id = (frame_id or self._params.camera_frame).lstrip('/')
        if not frame_id:
            raise Dropped(
                FRAME_ID,
                'its frame_id is empty: make the camera driver set one, or '
                "set the parameter 'camera_frame'",
            )
        if frame_id == self._params.map_frame:
            raise Dropped(
                FRAME_ID,
                f"its frame_id '{frame_id}' is the map frame: change the parameter 'map_frame'",
            )
        if self._camera and frame_id != self._camera:
            raise Dropped(
                FRAME_ID,
                f"its frame_id is '{frame_id}', but that of earlier images is "
                f"'{self._camera}': two cameras on one topic? ~/reset accepts the new one",
            )
        return frame_id


@dataclass(frozen=True)
class Verdict:
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
        self._newest_ns: int | None = None
        self._stamped_here = False  # stamps of earlier images are arrival times
        self._before_jump_ns = 0
        self._jumped_at_s = -float('inf')

    def judge(self, stamp_ns: int, now_ns: int) -> Verdict:
        """
        Admit an image with stamp `stamp_ns` at node time `now_ns`, or raise Dropped.

        After a jump (`jump_s` > 0) the caller must start a new map.
        """
        if stamp_ns <= 0:
            return self._judge_arrival(now_ns)
        verdict = self._judge_order(stamp_ns)
        self._stamped_here = False
        return verdict

    def _judge_arrival(self, now_ns: int) -> Verdict:
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
        verdict = self._judge_order(now_ns)
        self._stamped_here = True
        return verdict

    def _judge_order(self, stamp_ns: int) -> Verdict:
        if self._newest_ns is None:
            self._newest_ns = stamp_ns
            return Verdict(stamp_ns)
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
        return Verdict(stamp_ns)

    def _jump(self, stamp_ns: int, back_ns: int) -> Verdict:
        self._before_jump_ns = self._newest_ns
        self._jumped_at_s = time.monotonic()
        self._newest_ns = stamp_ns
        return Verdict(stamp_ns, back_ns / _NS)

    def _from_before_jump(self, stamp_ns: int, advance_ns: int) -> bool:
        """Return whether a stamp belongs to a late image from before the jump."""
        recent = time.monotonic() - self._jumped_at_s < self._threshold_s
        near_end = 0 <= self._before_jump_ns - stamp_ns <= self._threshold_ns
        return recent and near_end and advance_ns > self._threshold_ns


class GapWatch:
    """Detects gaps in a stream of stamps: periods much longer than the usual one."""

    def __init__(self):
        self._newest_ns: int | None = None
        self._periods_s: deque[float] = deque(maxlen=_PERIODS)

    def pause(self) -> None:
        """Start again with the next stamp, since images before it are ignored on purpose."""
        self._newest_ns = None
        self._periods_s.clear()

    def check(self, stamp_ns: int) -> str:
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
