"""What becomes of images that come too fast, out of order, or broken: all are accounted for."""

from dataclasses import replace

from fake_engine import Gate
from node_rig import image, running
import numpy as np
import pytest
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image

pytestmark = pytest.mark.usefixtures('ros')


def positions(rig):
    """Return x of all odometry received."""
    return [message.pose.pose.position.x for message in rig.heard['odometry']]


def test_the_newest_image_wins_while_the_engine_is_busy_and_best_effort_is_heard():
    gate = Gate(at=1)
    with running(queue='latest', num_scale_frames=1, engine={'before_push': gate}) as rig:
        rig.send(1.0)
        assert gate.reached.wait(20)
        for i in range(2, 12):  # one by one: a best-effort reader keeps only a few
            rig.send(float(i))
            rig.wait(lambda i=i: rig.counts().received == i)
        gate.open()
        rig.wait_counts(11, 2, superseded=9)
        rig.wait_for('odometry', 2)
        assert rig.stamps('odometry') == [1, 11]
        rig.wait_for('processed', 11)
        assert sorted(rig.stamps('processed')) == list(range(1, 12))

        qos = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
        camera = rig.probe.create_publisher(Image, '/image', qos)
        rig.wait(lambda: camera.get_subscription_count() == 1)
        camera.publish(image(15.0))
        rig.wait_for('odometry', 3)
        assert rig.stamps('odometry') == [1, 11, 15]


def test_every_image_is_run_in_order_when_lossless(capfd):
    with running(num_scale_frames=4) as rig:
        for i in range(1, 11):  # one in flight never stalls the hand-shake
            rig.send(float(i))
            rig.wait_for('processed', i)
        assert rig.call('flush').success
        rig.wait_counts(10, 10)
        assert rig.stamps('processed') == list(range(1, 11))

        assert rig.call('reset').success
        stamps = [1e4 * i for i in range(1, 101)]  # days of recording, which are not waited for
        rig.send(*stamps)
        rig.wait_counts(110, 110)
        rig.wait_for('odometry', 110)
        assert rig.stamps('odometry')[10:] == stamps
        assert positions(rig)[10:] == pytest.approx(range(100))

        assert rig.call('reset').success
        check_a_bag_that_starts_again(rig)
        capfd.readouterr()
        check_frame_ids(rig)
    assert 'camera_frame' in capfd.readouterr().err


def check_a_bag_that_starts_again(rig):
    rig.send(100.0, 101.0, 102.0, 103.0)
    rig.wait_counts(114, 114)
    rig.send(10.0, 102.9, 11.0, 12.0, 13.0)  # the second is a straggler of the first pass
    rig.wait_counts(119, 118, late=1)
    rig.wait_for('odometry', 118)
    assert rig.stamps('odometry')[110:] == [100, 101, 102, 103, 10, 11, 12, 13]
    assert positions(rig)[110:] == pytest.approx([0, 1, 2, 3, 0, 1, 2, 3], abs=1e-9)


def check_frame_ids(rig):
    rig.send(14.0, frame_id='')
    rig.send(15.0, frame_id='map')
    rig.send(16.0, frame_id='cam')
    rig.send(17.0, frame_id='other_cam')
    rig.wait_counts(123, 119, late=1, frame_id=3)
    rig.wait_for('tf', 119)
    assert {t.child_frame_id for message in rig.heard['tf'] for t in message.transforms} == {'cam'}


def test_a_full_queue_and_a_full_map_say_so(capfd):
    gate = Gate(at=1)
    values = {'queue_size': 3, 'max_keyframes': 4, 'on_limit': 'stop', 'num_scale_frames': 1}
    with running(engine={'before_push': gate}, **values) as rig:
        rig.send(1.0)
        assert gate.reached.wait(20)
        for i in range(2, 8):
            rig.send(float(i))
            rig.wait(lambda i=i: rig.counts().received == i)
        gate.open()
        rig.wait_counts(7, 4, queue_full=3)
        rig.wait_for('odometry', 4)
        assert rig.stamps('odometry') == [1, 2, 3, 4]
        assert 'queue_size' in capfd.readouterr().err

        rig.send(8.0, 9.0)
        rig.wait_counts(9, 4, queue_full=3, map_full=2)
        assert rig.state() == 'ERROR'
        assert "on_limit is 'stop': call ~/reset" in rig.diagnostic('trouble')
        assert rig.call('reset').success
        rig.send(10.0, 11.0)
        rig.wait_counts(11, 6, queue_full=3, map_full=2)
        assert rig.state() == 'TRACKING'
    lines = [line for line in capfd.readouterr().err.splitlines() if 'max_keyframes' in line]
    assert len(lines) == 1 and "holds max_keyframes (4) and on_limit is 'stop'" in lines[0]


def test_another_image_size_starts_a_new_map_and_missing_stamps_and_frames_are_filled_in(capfd):
    with running(num_scale_frames=2, camera_frame='front_optical') as rig:
        assert rig.engine.warmed == [(126, 168)]
        rig.send(1.0, 2.0, 3.0)  # 4:3, as warmed up for
        rig.wait_counts(3, 3)
        rig.send(4.0, size=(84, 28))
        rig.send(5.0, size=(84, 28))
        rig.wait_counts(5, 5)
        assert rig.engine.warmed == [(126, 168), (28, 84)]
        rig.wait_for('odometry', 5)
        assert positions(rig) == pytest.approx([0, 1, 2, 0, 1], abs=1e-9)
        assert 'image size changed to 84x28' in capfd.readouterr().err

        assert rig.call('reset').success
        rig.send(0, frame_id='', size=(84, 28))
        rig.wait_for('processed', 6)
        assert rig.call('flush').success
        message = rig.wait_for('odometry', 6)[5]
        age_s = rig.probe.get_clock().now().nanoseconds / 1e9 - message.header.stamp.sec
        assert 0 <= age_s < 60
        assert message.child_frame_id == 'front_optical'
        assert rig.wait_for('tf', 6)[5].transforms[0].child_frame_id == 'front_optical'
        assert rig.heard['processed'][5].stamp.sec == 0  # the header as it came


def test_an_exception_costs_a_map_and_results_that_are_not_finite_reach_no_output(capfd):
    def fail(n):
        if n in (3, 9):
            raise RuntimeError('the device is unhappy')

    topics = ('points', 'depth_info')
    with running(topics, num_scale_frames=4, engine={'before_push': fail}) as rig:
        rig.send(*range(1, 14))
        # The third image and the two that waited with it for the scale batch, then the ninth.
        rig.wait_counts(13, 9, worker_error=4)
        rig.wait_for('odometry', 9)
        assert rig.stamps('odometry') == [4, 5, 6, 7, 8, 10, 11, 12, 13]
        assert positions(rig) == pytest.approx([0, 1, 2, 3, 4, 0, 1, 2, 3], abs=1e-9)
        assert rig.state() == 'TRACKING'
        assert rig.node.pipeline.worker.errors == 2
        assert 'the device is unhappy' in capfd.readouterr().err

        assert rig.call('reset').success
        break_results(rig.engine)
        rig.send(20.0, 21.0, 22.0, 23.0)
        rig.wait_counts(17, 11, worker_error=4, bad_pose=2)
        rig.call('flush')
        for topic in ('odometry', *topics):
            rig.wait(lambda topic=topic: rig.stamps(topic)[-1] == 23)
            assert [stamp for stamp in rig.stamps(topic) if stamp >= 20] == [20, 23]


def break_results(engine):
    """Replace the intrinsics of the second result and the pose of the third one by NaN."""
    make, fields = engine._result, {1: 'network_intrinsics', 2: 'T_world_cam'}

    def broken(rgb, tag, index):
        result = make(rgb, tag, index)
        nan = {fields[index]: np.full_like(getattr(result, fields[index]), np.nan)}
        return replace(result, **nan)

    engine._result = lambda *args: (broken if args[2] in fields else make)(*args)
