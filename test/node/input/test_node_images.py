"""What becomes of images that come too fast, out of order, or broken: all are accounted for."""

from dataclasses import replace

from fake_engine import Gate, straight
from node_rig import image, running
import numpy as np
import pytest
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image

pytestmark = pytest.mark.usefixtures('ros')


def test_the_newest_image_wins_while_the_engine_is_busy():
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


def test_every_image_is_run_in_order_when_lossless_however_far_apart_their_stamps():
    stamps = [1e4 * i for i in range(1, 101)]  # days of recording, which are not waited for
    with running(num_scale_frames=8) as rig:
        rig.send(*stamps)
        rig.wait_counts(100, 100)
        rig.wait_for('odometry', 100)
        assert rig.stamps('odometry') == stamps
        positions = [message.pose.pose.position.x for message in rig.heard['odometry']]
        assert positions == pytest.approx(range(100))


def test_a_full_queue_refuses_the_new_image_and_says_so(capfd):
    gate = Gate(at=1)
    with running(queue_size=3, num_scale_frames=1, engine={'before_push': gate}) as rig:
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


def test_one_image_in_flight_never_stalls_the_hand_shake():
    with running(num_scale_frames=4) as rig:
        for i in range(1, 11):
            rig.send(float(i))
            rig.wait_for('processed', i)
        assert rig.call('flush').success
        rig.wait_counts(10, 10)
        assert rig.stamps('processed') == list(range(1, 11))


def test_a_best_effort_camera_is_heard_with_default_settings():
    with running(queue='latest', num_scale_frames=1) as rig:
        qos = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
        camera = rig.probe.create_publisher(Image, '/image', qos)
        rig.wait(lambda: camera.get_subscription_count() == 1)
        camera.publish(image(5.0))
        rig.wait_for('odometry', 1)
        assert rig.stamps('odometry') == [5]


def test_a_bag_that_starts_again_starts_a_new_map():
    with running(num_scale_frames=2) as rig:
        rig.send(100.0, 101.0, 102.0)
        rig.wait_counts(3, 3)
        rig.send(10.0, 101.9, 11.0, 12.0)  # the second is a straggler of the first pass
        rig.wait_counts(7, 6, late=1)
        rig.wait_for('odometry', 6)
        assert rig.stamps('odometry') == [100, 101, 102, 10, 11, 12]
        positions = [message.pose.pose.position.x for message in rig.heard['odometry']]
        assert positions == pytest.approx([0, 1, 2, 0, 1, 2], abs=1e-9)


def test_an_empty_frame_id_is_refused_with_the_remedy(capfd):
    with running(num_scale_frames=1) as rig:
        rig.send(1.0, frame_id='')
        rig.send(2.0, frame_id='map')
        rig.send(3.0, frame_id='cam')
        rig.send(4.0, frame_id='other_cam')
        rig.wait_counts(4, 1, frame_id=3)
        rig.wait_for('tf', 1)
        assert rig.heard['tf'][0].transforms[0].child_frame_id == 'cam'
    assert 'camera_frame' in capfd.readouterr().err


def test_images_without_stamp_or_frame_id_get_those_of_the_node():
    with running(num_scale_frames=1, camera_frame='front_optical') as rig:
        rig.send(0, frame_id='')
        (message,) = rig.wait_for('odometry', 1)
        age_s = rig.probe.get_clock().now().nanoseconds / 1e9 - message.header.stamp.sec
        assert 0 <= age_s < 60
        assert message.child_frame_id == 'front_optical'
        rig.wait_for('tf', 1)
        assert rig.heard['tf'][0].transforms[0].child_frame_id == 'front_optical'
        (acknowledged,) = rig.wait_for('processed', 1)
        assert acknowledged.stamp.sec == 0  # the header as it came


def test_another_image_size_starts_a_new_map_and_warms_up_again(capfd):
    with running(num_scale_frames=2) as rig:
        assert rig.engine.warmed == [(126, 168)]
        rig.send(1.0, 2.0, 3.0)  # 4:3, as warmed up for
        rig.wait_counts(3, 3)
        rig.send(4.0, size=(84, 28))
        rig.send(5.0, size=(84, 28))
        rig.wait_counts(5, 5)
        assert rig.engine.warmed == [(126, 168), (28, 84)]
        positions = [m.pose.pose.position.x for m in rig.wait_for('odometry', 5)]
        assert positions == pytest.approx([0, 1, 2, 0, 1], abs=1e-9)
    assert 'image size changed to 84x28' in capfd.readouterr().err


def test_an_exception_in_the_worker_costs_the_map_and_nothing_else(capfd):
    def fail(n):
        if n in (3, 9):
            raise RuntimeError('the device is unhappy')

    with running(num_scale_frames=4, engine={'before_push': fail}) as rig:
        rig.send(*range(1, 14))
        # The third image and the two that waited with it for the scale batch, then the ninth.
        rig.wait_counts(13, 9, worker_error=4)
        positions = [m.pose.pose.position.x for m in rig.wait_for('odometry', 9)]
        assert rig.stamps('odometry') == [4, 5, 6, 7, 8, 10, 11, 12, 13]
        assert positions == pytest.approx([0, 1, 2, 3, 4, 0, 1, 2, 3], abs=1e-9)
        assert rig.state() == 'TRACKING'
        assert rig.node.pipeline.worker.errors == 2
    assert 'the device is unhappy' in capfd.readouterr().err


def test_poses_and_intrinsics_that_are_not_finite_never_reach_an_output():
    def pose(index):
        return np.full((4, 4), np.nan) if index == 2 else straight(index)

    topics = ('points', 'depth_info')
    with running(topics, num_scale_frames=1, engine={'pose': pose}) as rig:
        make = rig.engine._result

        def broken(rgb, tag, index):
            result = make(rgb, tag, index)
            K = np.full((3, 3), np.nan) if index == 1 else result.network_intrinsics
            return replace(result, network_intrinsics=K)

        rig.engine._result = broken
        rig.send(1.0, 2.0, 3.0, 4.0)
        rig.wait_counts(4, 2, bad_pose=2)
        rig.call('flush')
        for topic in ('odometry', *topics):
            rig.wait_for(topic, 2)
            assert rig.stamps(topic) == [1, 4]


def test_a_full_map_says_so_until_it_is_reset(capfd):
    with running(num_scale_frames=2, max_keyframes=4, on_limit='stop') as rig:
        rig.send(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
        rig.wait_counts(6, 4, map_full=2)
        assert rig.state() == 'ERROR'
        assert "on_limit is 'stop': call ~/reset" in rig.diagnostic('trouble')
        assert rig.call('reset').success
        rig.send(7.0, 8.0)
        rig.wait_counts(8, 6, map_full=2)
        assert rig.state() == 'TRACKING'
    lines = [line for line in capfd.readouterr().err.splitlines() if 'max_keyframes' in line]
    assert len(lines) == 1 and "holds max_keyframes (4) and on_limit is 'stop'" in lines[0]
