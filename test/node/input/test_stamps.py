"""Which stamps are admitted."""

from lingbot_map_ros.frame import Dropped, LATE, REPEATED, ZERO_STAMP
from lingbot_map_ros.input import admission as stamps
from lingbot_map_ros.input.admission import StampGate
import pytest

S = 1_000_000_000
NOW = 5000 * S


class Steady:
    """A clock that stands still until it is moved."""

    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    steady = Steady()
    monkeypatch.setattr(stamps, 'time', steady)
    return steady


def judged(gate, stamp_ns):
    """Return what becomes of a stamp: 'in', 'jump', or the reason of the drop."""
    try:
        return 'jump' if gate.judge(stamp_ns, NOW).jump_s else 'in'
    except Dropped as drop:
        assert str(drop)
        return drop.reason


def test_only_newer_stamps_pass(clock):
    gate = StampGate(1.0, 'reset', 'arrival')
    sequence = [10 * S, 10 * S + 1, 10 * S + 1, 10 * S, 9 * S + 1, 11 * S]
    assert [judged(gate, stamp) for stamp in sequence] == ['in', 'in', REPEATED, LATE, LATE, 'in']


def test_a_stamp_far_back_is_a_jump_and_starts_over(clock):
    gate = StampGate(1.0, 'reset', 'arrival')
    sequence = [100 * S, 2 * S, 2 * S + 5, 3 * S]
    assert [judged(gate, stamp) for stamp in sequence] == ['in', 'jump', 'in', 'in']


def test_jumps_are_waited_out_when_ignored(clock):
    gate = StampGate(1.0, 'ignore', 'arrival')
    sequence = [100 * S, 2 * S, 99 * S, 101 * S]
    assert [judged(gate, stamp) for stamp in sequence] == ['in', LATE, LATE, 'in']


def test_stragglers_from_before_a_jump_are_late_but_only_for_a_while(clock):
    gate = StampGate(1.0, 'reset', 'arrival')
    assert judged(gate, 100 * S) == 'in'
    assert judged(gate, 2 * S) == 'jump'
    assert judged(gate, 100 * S - 5) == LATE
    assert judged(gate, 2 * S + 1) == 'in'
    clock.now_s += 2.0
    assert judged(gate, 100 * S - 5) == 'in'


def test_a_short_loop_is_not_taken_for_stragglers(clock):
    gate = StampGate(1.0, 'reset', 'arrival')
    loop = [S + i * S // 10 for i in range(16)]  # 1.5 s long
    assert [judged(gate, stamp) for stamp in loop] == ['in'] * 16
    assert [judged(gate, stamp) for stamp in loop] == ['jump'] + ['in'] * 15


def test_missing_stamps_become_arrival_times(clock):
    gate = StampGate(1.0, 'reset', 'arrival')
    assert gate.judge(0, NOW).stamp_ns == NOW
    assert gate.judge(0, NOW + 5).stamp_ns == NOW + 5


def test_missing_stamps_are_rejected_on_demand(clock):
    assert judged(StampGate(1.0, 'reset', 'reject'), 0) == ZERO_STAMP


def test_clocks_are_not_mixed_within_a_map(clock):
    gate = StampGate(1.0, 'reset', 'arrival')
    assert judged(gate, 10 * S) == 'in'
    assert judged(gate, 0) == ZERO_STAMP
    gate = StampGate(1.0, 'reset', 'arrival')
    assert judged(gate, 0) == 'in'
    assert judged(gate, 10 * S) == 'jump'  # far before the arrival times: a new map
    assert judged(gate, 0) == ZERO_STAMP


def test_missing_stamps_wait_for_simulated_time(clock):
    with pytest.raises(Dropped, match='/clock'):
        StampGate(1.0, 'reset', 'arrival').judge(0, 0)
