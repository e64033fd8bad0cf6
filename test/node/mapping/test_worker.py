"""What stands around the worker: inbox, ledger, publisher thread, trajectory."""

import threading
import time

from fake_engine import straight
from lingbot_map.mapping.map_frame import MapFrame
from lingbot_map_ros.frame import BAD_IMAGE, Frame, SUPERSEDED, to_stamp
from lingbot_map_ros.input.admission import GapWatch
from lingbot_map_ros.input.inbox import Inbox
from lingbot_map_ros.mapping.ledger import GAP, Ledger
from lingbot_map_ros.output.conversions import pose_stamped
from lingbot_map_ros.output.publisher_thread import PublisherThread
from lingbot_map_ros.output.trajectory import Trajectory
import numpy as np
import pytest
from std_msgs.msg import Header

WAIT_S = 10.0


class Log:
    """Collects what is logged."""

    def __init__(self):
        self.lines = []

    def warning(self, line, **_):
        self.lines.append(line)

    error = warning


def frames(count):
    return [Frame(None, to_stamp(i), 'cam', 0.0) for i in range(count)]


def test_newest_wins_gives_the_older_one_back():
    a, b, c = frames(3)
    inbox = Inbox(1, newest_wins=True)
    assert [inbox.put(a), inbox.put(b), inbox.put(c)] == [None, a, b]
    assert inbox.pop() is c
    assert inbox.pop() is None


def test_first_in_first_out_refuses_the_new_one_when_full():
    a, b, c = frames(3)
    inbox = Inbox(2, newest_wins=False)
    assert [inbox.put(a), inbox.put(b), inbox.put(c)] == [None, None, c]
    assert [inbox.pop(), inbox.pop(), inbox.pop()] == [a, b, None]


def test_wake_ends_a_wait():
    inbox = Inbox(1, newest_wins=True)
    waiter = threading.Thread(target=inbox.wait, args=(WAIT_S,))
    waiter.start()
    inbox.wake()
    waiter.join(WAIT_S / 2)
    assert not waiter.is_alive()


def test_clear_returns_what_waited():
    a, b = frames(2)
    inbox = Inbox(5, newest_wins=False)
    inbox.put(a), inbox.put(b)
    assert inbox.clear() == [a, b]
    assert len(inbox) == 0


def test_the_ledger_balances():
    log = Log()
    ledger = Ledger(log)
    for frame in frames(10):
        ledger.receive()
        if frame.stamp.nanosec < 4:
            ledger.count_out(frame)
    for _ in range(3):
        ledger.count_drop(SUPERSEDED)
    ledger.count_drop(BAD_IMAGE, 'it is broken')
    ledger.count_drop(BAD_IMAGE, 'it is broken')
    ledger.count_paused()
    counts = ledger.counts()
    assert (counts.received, counts.out, counts.paused) == (10, 4, 1)
    assert counts.dropped == {SUPERSEDED: 3, BAD_IMAGE: 2}
    assert counts.waiting == 1
    assert len(log.lines) == 1  # throttled, and silent about the normal
    assert 'it is broken' in log.lines[0]
    assert len(ledger.pace().arrival_ms) == 4


def test_each_kind_is_logged_once_and_counted():
    log = Log()
    ledger = Ledger(log)
    for _ in range(3):
        for kind in ('step', "encoding 'foo8'"):
            ledger.count_drop(BAD_IMAGE, f'bad {kind}', kind)
    assert [line.split(': ')[1] for line in log.lines] == ['bad step', "bad encoding 'foo8'"]
    assert ledger.kinds() == {'step': 3, "encoding 'foo8'": 3}
    assert ledger.counts().dropped == {BAD_IMAGE: 6}


def test_endlessly_many_kinds_are_neither_kept_nor_logged():
    log = Log()
    ledger = Ledger(log)
    for i in range(1000):
        ledger.count_drop(BAD_IMAGE, f'bad {i}', f'kind {i}')
    assert len(ledger.kinds()) < 100
    assert len(log.lines) < 100
    assert ledger.counts().dropped == {BAD_IMAGE: 1000}


@pytest.fixture
def make_thread():
    threads = []

    def make(lossless, log=None, repeated=()):
        threads.append(PublisherThread(lossless, log or Log()))
        for job in repeated:
            threads[-1].repeat(lambda: 100.0, job)
        threads[-1].start()
        return threads[-1]

    yield make
    for thread in threads:
        thread.stop(WAIT_S)


def test_waiting_tasks_of_a_kind_are_replaced_by_the_newest(make_thread):
    thread, gate, done = make_thread(lossless=False), threading.Event(), []
    started = threading.Event()
    thread.hand('points', lambda: (started.set(), gate.wait(WAIT_S)))
    assert started.wait(WAIT_S)
    for i in range(5):
        thread.hand('points', lambda i=i: done.append(i))
    thread.hand('depth', lambda: done.append('depth'))
    gate.set()
    thread.drain()
    assert done == [4, 'depth']


def test_lossless_tasks_all_run_in_order(make_thread):
    thread, done = make_thread(lossless=True), []
    for i in range(50):
        thread.hand('points', lambda i=i: done.append(i))
    thread.drain()
    assert done == list(range(50))


def test_stopping_frees_who_waits_for_room(make_thread):
    thread, gate = make_thread(lossless=True), threading.Event()
    started = threading.Event()
    thread.hand('points', lambda: (started.set(), gate.wait(WAIT_S)))
    assert started.wait(WAIT_S)
    thread.hand('points', lambda: None)
    waiter = threading.Thread(target=thread.hand, args=('points', lambda: None))
    waiter.start()
    stopper = threading.Thread(target=thread.stop, args=(WAIT_S,))
    stopper.start()
    waiter.join(WAIT_S)
    assert not waiter.is_alive()
    gate.set()
    stopper.join(WAIT_S)


def test_a_failing_job_is_logged_and_the_next_one_runs(make_thread):
    log, done = Log(), []
    thread = make_thread(lossless=True, log=log)
    thread.hand('points', lambda: 1 / 0)
    thread.hand('points', lambda: done.append(1))
    thread.drain()
    assert done == [1]
    assert 'ZeroDivisionError' in log.lines[0]


def test_repeated_tasks_run_again_and_again(make_thread):
    counted = threading.Semaphore(0)
    make_thread(lossless=False, repeated=[counted.release])
    for _ in range(3):
        assert counted.acquire(timeout=WAIT_S)


def test_the_path_is_bounded_and_the_trajectory_whole():
    frame, trajectory = MapFrame(1.0), Trajectory(max_size=100)
    for i in range(500):
        pose = frame.pose(straight(i))
        trajectory.append(pose_stamped(Header(stamp=to_stamp(i + 1)), pose), pose)
    assert [p.header.stamp for p in trajectory.newest] == [to_stamp(i) for i in range(401, 501)]
    stamps_ns, poses = trajectory.export()
    assert stamps_ns == list(range(1, 501))
    positions = np.array([T[:3, 3] for T in poses])
    np.testing.assert_allclose(positions, [(i, 0, 0) for i in range(500)], atol=1e-9)
    np.testing.assert_array_equal(poses[7], pose_of(7))


def pose_of(index):
    frame = MapFrame(1.0)
    frame.pose(straight(0))
    return frame.pose(straight(index)).T_map_body


def test_latencies_are_apart_from_those_before_the_map_began():
    ledger = Ledger(Log(), now_ns=lambda: 10 * 10**9)
    now_s = time.monotonic()
    ages_s = [5.0, 4.0, 0.3, 0.2, 0.1]
    for age_s in ages_s:
        frame = Frame(None, to_stamp(10 * 10**9 - int(2e9 * age_s)), 'cam', now_s - age_s)
        ledger.receive()
        ledger.count_out(frame, is_initial=age_s > 1)
    pace = ledger.pace()
    np.testing.assert_allclose(pace.stamp_ms, [600, 400, 200])
    assert pace.arrival_ms == sorted(pace.arrival_ms, reverse=True)
    assert 300 <= pace.arrival_ms[0] < 4000 < 5000 <= pace.initial_ms
    assert pace.output_hz == pytest.approx(1.0)


def test_stamps_of_another_clock_give_no_latency():
    ledger = Ledger(Log(), now_ns=time.time_ns)
    (frame,) = frames(1)
    ledger.count_out(frame)
    assert (len(ledger.pace().arrival_ms), ledger.pace().stamp_ms) == (1, [])


def test_a_gap_is_a_period_much_longer_than_those_before():
    watch, period_ns = GapWatch(), 10**8
    stamps_ns = [i * period_ns for i in range(10)]
    assert not any(watch.check(stamp_ns) for stamp_ns in stamps_ns)
    assert not watch.check(stamps_ns[-1] + 2 * period_ns)  # one lost image is no gap
    text = watch.check(stamps_ns[-1] + 12 * period_ns)
    assert 'no image for 1.000 s' in text
    assert 'every 0.100 s' in text
    watch.pause()
    assert not watch.check(10**12)
    slower = [10**12 + i * 10 * period_ns for i in range(30)]
    assert not any(watch.check(stamp_ns) for stamp_ns in slower[15:])


def test_a_few_periods_are_not_enough_to_expect_one():
    watch = GapWatch()
    assert not any(watch.check(stamp_ns) for stamp_ns in (0, 10**8, 2 * 10**8, 10**10))


def test_events_are_counted_and_logged_now_and_then():
    log = Log()
    ledger = Ledger(log)
    for _ in range(5):
        ledger.count_event(GAP, 'no image for 1 s')
    assert ledger.events()[GAP] == 5
    assert len(log.lines) == 1
    assert ledger.seconds_since_trouble() < WAIT_S
    assert ledger.counts().dropped == {}
