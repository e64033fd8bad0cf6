"""Cameras faster than the network, slow listeners, gaps and odd rates: poses keep their pace."""

import threading

from fake_engine import Gate
from lingbot_map_ros.output import conversions
from node_rig import running, WAIT_S
import numpy as np
import pytest
from std_srvs.srv import SetBool

pytestmark = pytest.mark.usefixtures('ros')
ROUNDS = 100
# The newest image wins, and none is lost on its way to the node.
_LATEST = {'queue': 'latest', 'qos_overrides./image.subscription.reliability': 'reliable'}


class Turnstile:
    """Lets the engine run one image at a time."""

    def __init__(self):
        self.entered, self._passes = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, n):
        self.entered.release()
        assert self._passes.acquire(timeout=WAIT_S)

    def let_pass(self):
        self._passes.release()


def test_a_camera_three_times_too_fast_costs_two_of_three_images_and_no_delay():
    turnstile = Turnstile()
    with running(num_scale_frames=1, engine={'before_push': turnstile}, **_LATEST) as rig:
        sent = 1
        rig.send(1.0)
        for _ in range(ROUNDS):
            assert turnstile.entered.acquire(timeout=WAIT_S)
            for _ in range(3):  # while the engine is busy
                sent += 1
                rig.send(float(sent))
                rig.wait(lambda: rig.counts().received == sent)  # noqa: B023
            turnstile.let_pass()
        assert turnstile.entered.acquire(timeout=WAIT_S)
        turnstile.let_pass()
        rig.wait_counts(1 + 3 * ROUNDS, 1 + ROUNDS, superseded=2 * ROUNDS)
        rig.wait_for('odometry', 1 + ROUNDS)
        # each was the newest there was, so none is older than one run of the engine
        assert rig.stamps('odometry') == [1 + 3 * i for i in range(1 + ROUNDS)]


def test_who_takes_clouds_slowly_slows_down_no_pose_and_no_memory_fills(monkeypatch):
    held, opened, built = threading.Event(), threading.Event(), []
    cloud = conversions.cloud

    def slow(header, points):
        built.append(header.stamp.sec)
        held.set()
        assert opened.wait(WAIT_S)
        return cloud(header, points)

    monkeypatch.setattr(conversions, 'cloud', slow)
    with running(('points',), num_scale_frames=1, map__voxel_size=0.0, **_LATEST) as rig:
        rig.send(1.0)
        assert held.wait(WAIT_S)
        for i in range(2, 31):
            rig.send(float(i))
            rig.wait_for('odometry', i)
        rig.wait_for('processed', 30)  # its cloud is handed over by then
        assert len(rig.node.pipeline.outputs._thread._tasks) == 1
        assert built == [1]
        opened.set()
        rig.wait_for('points', 2)
        assert rig.stamps('points') == [1, 30]  # the newest, and nothing in between
        assert rig.stamps('odometry') == list(range(1, 31))


def test_the_last_images_of_a_recording_come_out_and_are_saved(tmp_path):
    with running(num_scale_frames=8, save_directory=str(tmp_path)) as rig:
        rig.send(*range(1, 21))
        rig.wait(lambda: rig.counts().received == 20)
        assert rig.call('flush').success
        rig.wait_counts(20, 20)
        rig.wait_for('odometry', 20)
        answer = rig.call('save_trajectory')
        np.testing.assert_allclose(np.loadtxt(answer.message)[:, 1], range(20), atol=1e-6)


def test_a_gap_is_counted_and_said_once_with_both_periods_and_a_pause_is_none(capfd):
    with running(num_scale_frames=1) as rig:
        rig.send(*(10 + i / 10 for i in range(10)))
        rig.send(*(12 + i / 10 for i in range(10)))  # 1.1 s later
        rig.send(*(14 + i / 10 for i in range(10)))
        rig.wait_counts(30, 30)
        rig.call('pause', SetBool.Request(data=True))
        rig.send(20.0)
        rig.wait_for('processed', 31)
        rig.call('pause', SetBool.Request(data=False))
        rig.send(50.0, 50.1)
        rig.wait_counts(32, 32)
        assert rig.diagnostic('gaps') == '2'
    log = capfd.readouterr().err
    assert log.count('no image for 1.100 s where one every 0.100 s is expected') == 1
    assert log.count('no image for') == 1


def test_the_time_while_inactive_is_no_gap():
    with running(num_scale_frames=1) as rig:
        rig.send(*(10 + i / 10 for i in range(10)))
        rig.wait_counts(10, 10)
        rig.node.pipeline.deactivate()
        rig.node.pipeline.activate()
        rig.send(50.0, 50.1)
        rig.wait_counts(12, 12)
        assert rig.node.pipeline.ledger.events()['gaps'] == 0


def test_the_time_before_the_map_begins_is_reported_apart():
    gate = Gate(at=3)
    with running(num_scale_frames=3, engine={'before_push': gate}) as rig:
        rig.send(1.0, 2.0, 3.0)
        assert gate.reached.wait(WAIT_S)
        gate.open()
        rig.wait_for('processed', 3)
        values = diagnostics(rig)
        assert float(values['initial_latency_ms']) > 0
        assert 'latency_arrival_p50_ms' not in values  # all three waited for the map to begin
        rig.send(4.0, 5.0)
        rig.wait_counts(5, 5)
        values = diagnostics(rig)
        for p in (50, 95, 99):
            assert float(values[f'latency_arrival_p{p}_ms']) > 0
        assert 'latency_stamp_p50_ms' not in values  # stamps of 1970 are of another clock
        assert float(values['warm_up_s']) >= 0
        assert 'gpu_memory_mib' not in values  # nothing of it is used


def test_stamps_of_the_nodes_clock_give_a_latency_from_the_stamp():
    with running(num_scale_frames=1) as rig:
        now_s = rig.probe.get_clock().now().nanoseconds // 10**9
        rig.send(now_s - 10.0)
        rig.wait_for('processed', 1)
        rig.send(now_s - 5.0)
        rig.wait_counts(2, 2)
        assert 5e3 <= float(diagnostics(rig)['latency_stamp_p50_ms']) < 5e3 + 1e3 * WAIT_S


def diagnostics(rig):
    count = len(rig.heard['diagnostics'])
    array = rig.wait_for('diagnostics', count + 1)[-1]
    return {value.key: value.value for value in array.status[0].values}
