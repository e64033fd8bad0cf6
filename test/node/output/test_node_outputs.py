"""What the node publishes for images that are in order: poses, TF, path, clouds, depth."""

import threading

from diagnostic_msgs.msg import DiagnosticStatus
from fake_engine import DEPTH, straight
from geometry_msgs.msg import TransformStamped
from lingbot_map.mapping.points import POINT_DTYPE
from lingbot_map_ros.output import conversions
from nav_msgs.msg import Odometry
from node_rig import running, to_time, WAIT_S
import numpy as np
import pytest
from std_msgs.msg import Header
from tf2_ros import StaticTransformBroadcaster, TransformBroadcaster

pytestmark = pytest.mark.usefixtures('ros')


def position(pose):
    return pytest.approx((pose.position.x, pose.position.y, pose.position.z), abs=1e-9)


def cloud_points(message):
    return np.frombuffer(message.data, POINT_DTYPE)


def test_every_output_carries_the_stamp_and_frame_of_its_image_and_the_cloud_its_colours(
    monkeypatch,
):
    """And the scale applies to poses, their uncertainty, depth and clouds alike."""
    topics = ('pose', 'points', 'depth', 'confidence', 'depth_info', 'path')
    params = {'scale': 3.0, 'points__stride': 1, 'path__publish_rate': 50.0}
    with running(topics, num_scale_frames=1, **params) as rig:
        rig.send(100.25, frame_id='cam7_optical')
        rig.wait_counts(1, 1)
        rig.call('flush')
        for topic in (*topics, 'odometry', 'processed'):
            message = rig.wait_for(topic, 1)[0]
            header = getattr(message, 'header', message)
            assert header.stamp == to_time(100.25), topic
            in_map = topic in ('pose', 'points', 'path', 'odometry')
            assert header.frame_id == ('map' if in_map else 'cam7_optical'), topic
        (transform,) = rig.wait_for('tf', 1)[0].transforms
        assert transform.header.stamp == to_time(100.25)
        assert (transform.header.frame_id, transform.child_frame_id) == ('map', 'cam7_optical')
        assert rig.heard['odometry'][0].child_frame_id == 'cam7_optical'
        points = cloud_points(rig.heard['points'][0])
        assert len(points) == 56 * 42
        np.testing.assert_allclose(points['x'], 3 * DEPTH, rtol=1e-6)
        row = points.reshape(42, 56)
        assert row['y'][0, 0] > 0 > row['y'][0, -1]  # left of the image is left
        assert row['z'][0, 0] > 0 > row['z'][-1, 0]
        assert set(points['rgb']) == {0x808080}
        assert set(points['confidence']) == {3.0}
        rig.send(101, 102, 103, frame_id='cam7_optical')
        rig.wait_counts(4, 4)
        check_forward_is_along_x(rig, 4, step=3)
        check_scale_of_uncertainty_and_depth(rig)
        check_path_after_a_deactivation(rig, monkeypatch)


def check_forward_is_along_x(rig, count, step):
    """Compare `count` poses with those of a camera that moves by `step` per image."""
    poses = [message.pose.pose for message in rig.wait_for('odometry', count)]
    transforms = [message.transforms[0].transform for message in rig.wait_for('tf', count)]
    for i, (pose, transform) in enumerate(zip(poses, transforms, strict=True)):
        assert (step * i, 0, 0) == position(pose)
        moved = transform.translation
        assert (moved.x, moved.y, moved.z) == pytest.approx((step * i, 0, 0), abs=1e-9)
        q = transform.rotation
        assert (q.x, q.y, q.z, q.w) == pytest.approx((-0.5, 0.5, -0.5, 0.5))
    rig.wait_for('pose', count)
    assert rig.stamps('odometry') == rig.stamps('pose') == rig.stamps('tf')
    rig.wait(lambda: rig.heard['path'] and len(rig.heard['path'][-1].poses) == count)
    assert [p.pose for p in rig.heard['path'][-1].poses] == poses


def check_scale_of_uncertainty_and_depth(rig):
    message = rig.heard['odometry'][-1]
    error = 0.2 / 3.0  # the confidence of the fake engine is 3
    expected = np.diag([(error * DEPTH * 3.0) ** 2] * 3 + [error**2] * 3)
    np.testing.assert_allclose(message.pose.covariance.reshape(6, 6), expected, rtol=1e-5)
    np.testing.assert_array_equal(message.twist.covariance.reshape(6, 6), 1e6 * np.eye(6))
    assert message.twist.twist == Odometry().twist.twist
    rig.call('flush')
    depth = np.frombuffer(rig.wait_for('depth', 4)[3].data, '<f4')
    np.testing.assert_allclose(depth, 3 * DEPTH)
    points = cloud_points(rig.wait_for('points', 4)[3])
    np.testing.assert_allclose(points['x'], 3 * 3 + 3 * DEPTH, rtol=1e-6)


def check_path_after_a_deactivation(rig, monkeypatch):
    """Deactivate while the path of 5 poses is made: it is published after the activation."""
    pipeline, make_path = rig.node.pipeline, conversions.path
    deactivated = threading.Event()

    def deactivate_once(header, poses):
        if len(poses) == 5 and not deactivated.is_set():
            pipeline.deactivate()
            deactivated.set()
        return make_path(header, poses)

    monkeypatch.setattr(conversions, 'path', deactivate_once)
    rig.send(104, frame_id='cam7_optical')
    assert deactivated.wait(WAIT_S)
    rig.wait_counts(5, 5)
    assert len(rig.heard['path'][-1].poses) == 4
    pipeline.activate()
    rig.wait(lambda: len(rig.heard['path'][-1].poses) == 5)


def test_points_parameters_and_rates_act_at_once_and_clouds_come_for_keyframes_or_every_frame():
    topics = ('points', 'path')
    with running(topics, num_scale_frames=1, points__stride=1, path__publish_rate=0.01) as rig:
        for count, (name, value, expected) in enumerate(
            [
                ('points.stride', 2, 28 * 21),
                ('points.min_confidence', 3.5, 0),  # all are 3: an empty cloud is a cloud
                ('points.min_confidence', 1.0, 28 * 21),
                ('points.max_depth', 1.5, 0),
            ],
            start=1,
        ):
            assert rig.set_parameter(name, value).successful
            rig.send(float(count))
            assert rig.wait_for('points', count)[-1].width == expected
        rig.wait_counts(4, 4)
        assert not rig.heard['path']
        assert rig.set_parameter('path.publish_rate', 50.0).successful
        rig.wait_for('path', 1)  # not after the 100 s of before
        assert rig.set_parameter('keyframe_interval', 3).successful
        rig.call('reset')
        rig.heard['points'].clear()
        rig.send(*range(11, 18))
        rig.wait_counts(11, 11)
        rig.call('flush')
        rig.wait_for('points', 3)
        assert rig.stamps('points') == [11, 12, 15]  # the scale frame, then every third
        assert rig.set_parameter('points.every_frame', True).successful
        rig.send(18, 19, 20)
        rig.wait_counts(14, 14)
        rig.call('flush')
        rig.wait_for('points', 6)
        assert rig.stamps('points') == [11, 12, 15, 18, 19, 20]
        keyframes = rig.engine.keyframes
        assert rig.set_parameter('keyframe_interval', 2).successful
        rig.send(21, 22, 23, 24)
        rig.wait_counts(18, 18)
        assert rig.engine.keyframes == keyframes + 2


def forget(rig, publisher):
    """Destroy the newest subscription of the probe; wait until its `publisher` knows."""
    *_, newest = rig.probe.subscriptions
    rig.probe.destroy_subscription(newest)
    rig.wait(lambda: publisher.get_subscription_count() == 0)


def test_flush_latches_path_and_map_and_the_map_is_kept_while_nobody_listens(capfd):
    def pose(index):
        T = straight(index)
        T[:3, 3] += 500.0 if index >= 10 else 0.0
        return T

    params = {'map__voxel_size': 0.5, 'map__publish_rate': 50.0}
    with running(num_scale_frames=8, engine={'pose': pose}, **params) as rig:
        rig.send(1.0, 2.0, 3.0)
        rig.wait_for('processed', 3)  # acknowledged although no pose is out
        assert rig.state() == 'INITIALIZING 3/8'
        assert not rig.heard['odometry']
        answer = rig.call('flush')
        assert answer.success
        assert answer.message.startswith('3 images')
        rig.wait_for('odometry', 3)
        assert rig.stamps('odometry') == [1, 2, 3]
        rig.wait_counts(3, 3)
        rig.listen('path')
        rig.listen('map')
        assert len(rig.wait_for('path', 1)[0].poses) == 3
        assert rig.wait_for('map', 1)[0].width > 0
        forget(rig, rig.node.pipeline.outputs._map_pub)
        rig.send(4.0, 5.0)
        rig.wait_counts(5, 5)
        rig.listen('map')
        rig.wait(lambda: rig.stamps('map')[-1] == 5)
        points = cloud_points(rig.heard['map'][-1])
        voxels = {tuple(np.floor(np.array([p['x'], p['y'], p['z']]) / 0.5)) for p in points}
        assert len(voxels) == len(points) > 0
        assert {p[0] for p in voxels} == {4, 6, 8, 10, 12}  # depth 2, seen from 0 to 4
        check_jump_is_flagged(rig)
    assert capfd.readouterr().err.count('the pose jumped') == 1


def check_jump_is_flagged(rig):
    """Send the images up to number 14, of which the eleventh is far away."""
    rig.send(*range(6, 11))
    rig.wait_counts(10, 10)
    assert rig.diagnostic('pose_jumps') == '0'
    rig.send(*range(11, 15))
    rig.wait_counts(14, 14)
    rig.wait_for('odometry', 14)  # it is published
    assert rig.diagnostic('pose_jumps') == '1'
    assert rig.heard['diagnostics'][-1].status[0].level == DiagnosticStatus.WARN


def test_nothing_is_computed_for_topics_without_listeners(monkeypatch):
    """Depth, confidence and their camera info come each for itself; TF can be switched off."""
    with running(num_scale_frames=1, map__voxel_size=0.0, tf_mode='off') as rig:
        outputs, computed = rig.node.pipeline.outputs, []
        for name in ('hand_points', 'hand_map', 'hand_depth'):
            hand = getattr(outputs, name)
            monkeypatch.setattr(
                outputs, name, lambda *a, n=name, f=hand: (computed.append((n, a[1])), f(*a))
            )
        rig.send(1.0, 2.0)
        rig.wait_for('processed', 2)  # with all outputs
        assert computed == []
        for count, (topic, publisher) in enumerate(
            [
                ('depth', outputs._depth_pub),
                ('confidence', outputs._confidence_pub),
                ('depth_info', outputs._depth_info_pub),
            ],
            start=3,
        ):
            rig.listen(topic)
            rig.wait(lambda publisher=publisher: publisher.get_subscription_count() == 1)
            rig.send(float(count))
            rig.wait_counts(count, count)
            rig.wait_for(topic, 1)
            ((name, output),) = computed
            assert name == 'hand_depth'
            assert (output.depth is not None) == (topic == 'depth')
            assert (output.confidence is not None) == (topic == 'confidence')
            forget(rig, publisher)
            computed.clear()
        rig.listen('points')
        rig.wait(lambda: outputs._wants_points(True))
        rig.send(6.0)
        rig.wait_counts(6, 6)
        rig.wait_for('points', 1)
        assert [name for name, _ in computed] == ['hand_points']
        rig.wait_for('odometry', 6)
        assert not rig.heard['tf']
        # Waits for the discovery that nodes of earlier tests have ended.
        rig.wait(lambda: rig.probe.count_publishers('/tf') == 0, 'no publisher of /tf')
        rig.wait(
            lambda: rig.node.count_subscribers('/tf') == 1, 'only the probe subscribes to /tf'
        )


def test_a_camera_that_has_a_parent_gets_no_second_one(capfd):
    with running(num_scale_frames=1) as rig:
        others = [  # no obstacle
            TransformStamped(header=Header(frame_id='map'), child_frame_id='cam'),
            TransformStamped(header=Header(frame_id='base_link'), child_frame_id='lidar'),
        ]
        static = StaticTransformBroadcaster(rig.probe)
        static.sendTransform(others)
        rig.wait(lambda: len(rig.node.pipeline.tree.parents) == 2)
        rig.send(1.0)
        rig.wait_for('tf', 1)
        assert rig.stamps('tf') == [1]
        for number, broadcaster in enumerate((static, TransformBroadcaster(rig.probe)), start=1):
            rig.call('reset')
            camera = f'cam{number}'
            mount = TransformStamped(header=Header(frame_id='base_link'), child_frame_id=camera)
            broadcaster.sendTransform(mount)
            rig.wait(lambda camera=camera: camera in rig.node.pipeline.tree.parents)
            rig.send(10.0 * number, 10.0 * number + 1, frame_id=camera)
            rig.wait_for('odometry', 1 + 2 * number)
            count = len(rig.heard['diagnostics'])
            status = rig.wait_for('diagnostics', count + 2)[-1].status[0]
            assert status.level == DiagnosticStatus.ERROR
            values = {pair.key: pair.value for pair in status.values}
            assert f"'{camera}' has the parent 'base_link'" in values['trouble']
        sent = [t.child_frame_id for m in rig.heard['tf'] for t in m.transforms
                if t.header.frame_id == 'map']  # fmt: skip
        assert sent == ['cam']
    log = capfd.readouterr().err  # at most one line in 30 s
    assert log.count("'cam1' has the parent 'base_link'") == 1
