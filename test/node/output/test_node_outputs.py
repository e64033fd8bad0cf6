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


def test_every_output_carries_the_stamp_and_frame_of_its_image_and_the_cloud_its_colours():
    topics = ('pose', 'points', 'depth', 'confidence', 'depth_info', 'path')
    with running(topics, num_scale_frames=1, points__stride=1) as rig:
        rig.send(100.25, frame_id='cam7_optical')
        rig.wait_counts(1, 1)
        rig.call('flush')
        for topic in (*topics, 'odometry', 'processed'):
            (message,) = rig.wait_for(topic, 1)
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
        np.testing.assert_allclose(points['x'], DEPTH, rtol=1e-6)
        row = points.reshape(42, 56)
        assert row['y'][0, 0] > 0 > row['y'][0, -1]  # left of the image is left
        assert row['z'][0, 0] > 0 > row['z'][-1, 0]
        assert set(points['rgb']) == {0x808080}
        assert set(points['confidence']) == {3.0}


def test_a_path_that_a_deactivation_held_back_is_published_after_the_activation(monkeypatch):
    with running(('path',), num_scale_frames=1, path__publish_rate=50.0) as rig:
        pipeline, make_path = rig.node.pipeline, conversions.path
        deactivated = threading.Event()

        def deactivate_once(header, poses):
            if not deactivated.is_set():
                pipeline.deactivate()
                deactivated.set()
            return make_path(header, poses)

        monkeypatch.setattr(conversions, 'path', deactivate_once)
        rig.send(1.0)
        assert deactivated.wait(WAIT_S)
        rig.wait_counts(1, 1)
        pipeline.activate()
        assert len(rig.wait_for('path', 1)[0].poses) == 1


def test_moving_forward_is_moving_along_x():
    with running(('pose', 'path'), path__publish_rate=50.0) as rig:
        rig.send(1.0, 2.0, 3.0, 4.0)
        rig.wait_counts(4, 4)
        poses = [message.pose.pose for message in rig.wait_for('odometry', 4)]
        transforms = [message.transforms[0].transform for message in rig.wait_for('tf', 4)]
        for i, (pose, transform) in enumerate(zip(poses, transforms, strict=True)):
            assert (i, 0, 0) == position(pose)
            moved = transform.translation
            assert (moved.x, moved.y, moved.z) == pytest.approx((i, 0, 0), abs=1e-9)
            q = transform.rotation
            assert (q.x, q.y, q.z, q.w) == pytest.approx((-0.5, 0.5, -0.5, 0.5))
        assert rig.stamps('odometry') == rig.stamps('pose') == rig.stamps('tf')
        rig.wait(lambda: rig.heard['path'] and len(rig.heard['path'][-1].poses) == 4)
        path = rig.heard['path'][-1].poses
        assert [p.pose for p in path] == poses


def test_scale_applies_to_poses_their_uncertainty_depth_and_clouds_alike():
    topics = ('points', 'depth')
    with running(topics, num_scale_frames=1, scale=3.0, points__stride=1) as rig:
        rig.send(1.0, 2.0)
        rig.wait_counts(2, 2)
        message = rig.wait_for('odometry', 2)[1]
        assert position(message.pose.pose) == (3, 0, 0)
        error = 0.2 / 3.0  # the confidence of the fake engine is 3
        expected = np.diag([(error * DEPTH * 3.0) ** 2] * 3 + [error**2] * 3)
        np.testing.assert_allclose(message.pose.covariance.reshape(6, 6), expected, rtol=1e-5)
        np.testing.assert_array_equal(message.twist.covariance.reshape(6, 6), 1e6 * np.eye(6))
        assert message.twist.twist == Odometry().twist.twist
        rig.call('flush')
        depth = np.frombuffer(rig.wait_for('depth', 2)[1].data, '<f4')
        np.testing.assert_allclose(depth, 3 * DEPTH)
        points = cloud_points(rig.wait_for('points', 2)[1])
        np.testing.assert_allclose(points['x'], 3 + 3 * DEPTH, rtol=1e-6)


def test_clouds_come_for_keyframes_or_for_every_frame():
    with running(('points',), num_scale_frames=1, keyframe_interval=3) as rig:
        rig.send(*range(1, 8))
        rig.wait_counts(7, 7)
        rig.call('flush')
        rig.wait_for('points', 3)
        assert rig.stamps('points') == [1, 2, 5]  # the scale frame, then every third
        assert rig.set_parameter('points.every_frame', True).successful
        rig.send(8, 9, 10)
        rig.wait_counts(10, 10)
        rig.call('flush')
        rig.wait_for('points', 6)
        assert rig.stamps('points') == [1, 2, 5, 8, 9, 10]
        keyframes = rig.engine.keyframes
        assert rig.set_parameter('keyframe_interval', 2).successful
        rig.send(11, 12, 13, 14)
        rig.wait_counts(14, 14)
        assert rig.engine.keyframes == keyframes + 2


def test_points_parameters_and_rates_act_at_once():
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


def test_the_map_is_kept_while_nobody_listens_and_shown_to_who_comes_late():
    with running(num_scale_frames=1, map__voxel_size=0.5, map__publish_rate=50.0) as rig:
        rig.send(1.0, 2.0, 3.0)
        rig.wait_counts(3, 3)
        rig.listen('map')
        rig.wait(lambda: rig.heard['map'] and rig.stamps('map')[-1] == 3)
        points = cloud_points(rig.heard['map'][-1])
        voxels = {tuple(np.floor(np.array([p['x'], p['y'], p['z']]) / 0.5)) for p in points}
        assert len(voxels) == len(points) > 0
        assert {p[0] for p in voxels} == {4, 6, 8}  # depth 2, seen from 0, 1 and 2


def test_flush_runs_a_short_scale_batch_and_latches_path_and_map():
    with running(num_scale_frames=8) as rig:
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


def test_nothing_is_computed_for_topics_without_listeners(monkeypatch):
    with running(num_scale_frames=1, map__voxel_size=0.0) as rig:
        computed = []
        outputs = rig.node.pipeline.outputs
        monkeypatch.setattr(outputs, 'hand_points', lambda *_: computed.append('points'))
        monkeypatch.setattr(outputs, 'hand_map', lambda *_: computed.append('map'))
        monkeypatch.setattr(outputs, 'hand_depth', lambda *_: computed.append('depth'))
        rig.send(1.0, 2.0)
        rig.wait_counts(2, 2)
        assert computed == []
        rig.listen('depth')
        rig.listen('points')
        rig.wait(
            lambda: outputs._depth_pub.get_subscription_count() and outputs._wants_points(True)
        )
        rig.send(3.0)
        rig.wait_counts(3, 3)
        rig.wait(lambda: computed == ['points', 'depth'])


@pytest.mark.parametrize('Broadcaster', [TransformBroadcaster, StaticTransformBroadcaster])
def test_a_camera_that_has_a_parent_gets_no_second_one(Broadcaster, capfd):
    with running(num_scale_frames=1) as rig:
        mount = TransformStamped(header=Header(frame_id='base_link'), child_frame_id='cam')
        Broadcaster(rig.probe).sendTransform(mount)
        rig.wait(lambda: rig.node.pipeline.tree.parents)
        rig.send(1.0, 2.0)
        rig.wait_for('odometry', 2)
        count = len(rig.heard['diagnostics'])
        status = rig.wait_for('diagnostics', count + 2)[-1].status[0]
        assert status.level == DiagnosticStatus.ERROR
        values = {pair.key: pair.value for pair in status.values}
        assert "'cam' has the parent 'base_link'" in values['trouble']
        heard = [t.header.frame_id for m in rig.heard['tf'] for t in m.transforms]
        assert 'map' not in heard
    assert capfd.readouterr().err.count("'base_link'") == 1


def test_other_transforms_are_no_obstacle():
    with running(num_scale_frames=1) as rig:
        others = [
            TransformStamped(header=Header(frame_id='map'), child_frame_id='cam'),
            TransformStamped(header=Header(frame_id='base_link'), child_frame_id='lidar'),
        ]
        StaticTransformBroadcaster(rig.probe).sendTransform(others)
        rig.wait(lambda: len(rig.node.pipeline.tree.parents) == 2)
        rig.send(1.0)
        rig.wait_for('tf', 1)
        assert rig.stamps('tf') == [1]


def test_tf_can_be_switched_off():
    with running(num_scale_frames=1, tf_mode='off') as rig:
        rig.send(1.0)
        rig.wait_counts(1, 1)
        rig.wait_for('odometry', 1)
        assert not rig.heard['tf']
        assert rig.probe.count_publishers('/tf') == 0
        assert rig.node.count_subscribers('/tf') == 1  # that of the probe


@pytest.mark.parametrize('topic', ['depth', 'confidence', 'depth_info'])
def test_depth_confidence_and_their_camera_info_come_each_for_itself(topic, monkeypatch):
    with running((topic,), num_scale_frames=1, map__voxel_size=0.0) as rig:
        outputs, handed = rig.node.pipeline.outputs, []
        hand = outputs.hand_depth
        monkeypatch.setattr(outputs, 'hand_depth', lambda *a: (handed.append(a[1]), hand(*a)))
        rig.send(1.0)
        rig.wait_for(topic, 1)
        (output,) = handed
        assert (output.depth is not None) == (topic == 'depth')
        assert (output.confidence is not None) == (topic == 'confidence')


def test_a_sudden_jump_is_published_and_flagged(capfd):
    def pose(index):
        T = straight(index)
        T[:3, 3] += 500.0 if index >= 10 else 0.0
        return T

    with running(num_scale_frames=1, engine={'pose': pose}) as rig:
        rig.send(*range(1, 15))
        rig.wait_counts(14, 14)
        count = len(rig.heard['diagnostics'])
        status = rig.wait_for('diagnostics', count + 1)[-1].status[0]
        assert status.level == DiagnosticStatus.WARN
        assert {v.key: v.value for v in status.values}['pose_jumps'] == '1'
    assert 'the pose jumped' in capfd.readouterr().err
