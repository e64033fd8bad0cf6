"""What the node says on /tf in each tf_mode, and what it does when a transform is missing."""

import itertools
import time

from diagnostic_msgs.msg import DiagnosticStatus
from geometry_msgs.msg import Quaternion, TransformStamped, Vector3
from lingbot_map.mapping.points import POINT_DTYPE
from lingbot_map.settings import ParameterError
from lingbot_map_ros.output import tf_modes
from lingbot_map_ros.parameters import NodeParams
from node_rig import running, to_time
import numpy as np
import pytest
from rclpy.lifecycle import TransitionCallbackReturn
from rosgraph_msgs.msg import Clock
from tf2_ros import StaticTransformBroadcaster, TransformBroadcaster

pytestmark = pytest.mark.usefixtures('ros')
OPTICAL = (-0.5, 0.5, -0.5, 0.5)  # x right, y down, z forward in x forward, y left, z up
METRES = {'scale': 2.0, 'num_scale_frames': 1}
SOON_S = 0.4  # for what must not happen


def told(parent, child, time_s=0.0, xyz=(0.0, 0.0, 0.0), xyzw=(0.0, 0.0, 0.0, 1.0)):
    transform = TransformStamped(child_frame_id=child)
    transform.header.frame_id, transform.header.stamp = parent, to_time(time_s)
    x, y, z, w = xyzw
    transform.transform.rotation = Quaternion(x=x, y=y, z=z, w=w)
    x, y, z = xyz
    transform.transform.translation = Vector3(x=x, y=y, z=z)
    return transform


class Robot:
    """Tells the node where the robot's frames are."""

    def __init__(self, rig):
        self._rig = rig
        self._static = StaticTransformBroadcaster(rig.probe)
        self._moving = TransformBroadcaster(rig.probe)

    @property
    def _tree(self):
        return self._rig.node.pipeline.tree

    def mount(self, xyz=(0.0, 0.0, 0.0), xyzw=OPTICAL, moving=False):
        where = told('base_link', 'cam', 5.0 if moving else 0.0, xyz, xyzw)
        (self._moving if moving else self._static).sendTransform(where)
        self._rig.wait(lambda: self._tree.parents.get('cam') == 'base_link')

    def move(self, time_s, x, parent='odom', child='base_link'):
        self._moving.sendTransform(told(parent, child, time_s, (x, 0.0, 0.0)))

    def drive(self, speed, until_s, since_s=0.0):
        """Tell odometry at begin and end: what is between must be interpolated."""
        self._rig.wait(lambda: self._moving.pub_tf.get_subscription_count() == 2)
        self.move(since_s, speed * since_s)
        self.move(until_s, speed * until_s)


def sent(rig, parent='map'):
    """Return all transforms heard whose parent is `parent`."""
    return [t for m in rig.heard['tf'] for t in m.transforms if t.header.frame_id == parent]


def xyz(transform):
    t = transform.transform.translation
    return pytest.approx((t.x, t.y, t.z), abs=1e-9)


def xyzw(transform):
    q = transform.transform.rotation
    return pytest.approx((q.x, q.y, q.z, q.w), abs=1e-9)


def stamp_ns(transform):
    return transform.header.stamp.sec * 10**9 + transform.header.stamp.nanosec


def wait_for_x(rig, x):
    rig.wait(lambda: sent(rig) and abs(sent(rig)[-1].transform.translation.x - x) < 1e-6)


def wait_for_trouble(rig, *words):
    """Wait until /diagnostics shows an error with all these words; without words, until none."""

    def is_shown():
        status = rig.heard['diagnostics'][-1].status[0] if rig.heard['diagnostics'] else None
        text = {v.key: v.value for v in status.values}.get('trouble') if status else None
        if not words:
            return text == ''
        is_error = status is not None and status.level == DiagnosticStatus.ERROR
        return is_error and all(word in text for word in words)

    rig.wait(is_shown, f'trouble: {words}')


def test_map_to_odom_is_identity_where_pose_and_odometry_are():
    with running(tf_mode='map_to_odom', **METRES) as rig:
        robot = Robot(rig)
        robot.mount((0.3, 0.1, 0.5))
        robot.drive(speed=0.0, until_s=2.0)
        rig.send(1.0)
        rig.wait(lambda: len(sent(rig)) >= 5)
        for transform in sent(rig):
            assert transform.child_frame_id == 'odom'  # and never base_link, nor cam
            assert xyz(transform) == (0, 0, 0)
            assert xyzw(transform) == (0, 0, 0, 1)
        stamps = [stamp_ns(t) for t in sent(rig)]
        assert all(np.diff(stamps) > 0)
        assert abs(stamps[-1] / 1e9 - time.time()) < 20  # that of the image is 1 s
        wait_for_trouble(rig)


def test_map_to_odom_corrects_the_odometry_of_the_very_moment():
    with running(tf_mode='map_to_odom', **METRES) as rig:
        robot = Robot(rig)
        robot.mount()
        robot.drive(speed=1.5, until_s=6.0)
        rig.send(1.0)
        wait_for_x(rig, 0 - 1.5)
        rig.send(2.0, 3.0)  # the map says 2 m per image
        wait_for_x(rig, 4 - 4.5)
        assert rig.set_parameter('tf_rate', 50.0).successful
        count = len(sent(rig))
        rig.wait(lambda: len(sent(rig)) > count + 5)


def test_odometry_that_comes_after_the_image_is_waited_for():
    with running(tf_mode='map_to_odom', **METRES) as rig:
        robot = Robot(rig)
        robot.mount()
        rig.send(1.0)
        rig.wait_for('odometry', 1)
        time.sleep(SOON_S)
        assert not sent(rig)
        robot.drive(speed=3.0, until_s=2.0)
        wait_for_x(rig, -3)


def test_without_odometry_there_is_no_transform_and_one_line_says_so(capfd):
    with running(tf_mode='map_to_odom', **METRES) as rig:
        Robot(rig).mount()
        rig.send(1.0, 2.0)
        wait_for_trouble(rig, "no transform 'odom' -> 'base_link'", 'no TF is published')
        assert not sent(rig)
        poses = rig.wait_for('odometry', 2)
        assert {m.child_frame_id for m in poses} == {'base_link'}  # in the map all the same
        assert poses[1].pose.pose.position.x == pytest.approx(2)
    assert capfd.readouterr().err.count("no transform 'odom'") == 1


def test_nothing_of_the_old_map_is_sent_after_a_reset():
    with running(tf_mode='map_to_odom', tf_rate=50.0, **METRES) as rig:
        robot = Robot(rig)
        robot.mount()
        robot.drive(speed=1.0, until_s=6.0)
        rig.send(1.0, 2.0)
        wait_for_x(rig, 0)
        rig.call('reset')
        newest_ns = max(stamp_ns(t) for t in sent(rig))
        time.sleep(SOON_S)  # what was under way has come
        count = len(sent(rig))
        time.sleep(SOON_S)
        assert len(sent(rig)) == count
        robot.drive(speed=1.0, until_s=6.0)
        rig.send(3.0)
        wait_for_x(rig, -3)
        assert stamp_ns(sent(rig)[count]) > newest_ns


def test_stamps_follow_simulated_time_also_back():
    with running(tf_mode='map_to_odom', use_sim_time=True, **METRES) as rig:
        clock = rig.publisher(Clock, '/clock')
        now_s = 0.0

        def play_until(is_true, begin_s=None):
            nonlocal now_s
            now_s = now_s if begin_s is None else begin_s

            def tick():
                nonlocal now_s
                now_s += 0.05
                clock.publish(Clock(clock=to_time(now_s)))
                return is_true()

            rig.wait(tick)

        play_until(lambda: rig.node.get_clock().now().nanoseconds > 100 * 10**9, 100.0)
        robot = Robot(rig)
        robot.mount()
        robot.drive(speed=1.0, until_s=105.0, since_s=99.0)
        rig.send(100.0)
        play_until(lambda: len(sent(rig)) >= 3)
        assert all(100 < stamp_ns(t) / 1e9 < now_s + 0.3 for t in sent(rig))
        ahead_s = stamp_ns(sent(rig)[-1]) / 1e9
        play_until(lambda: rig.node.get_clock().now().nanoseconds < 60 * 10**9, 50.0)
        assert stamp_ns(sent(rig)[-1]) / 1e9 >= ahead_s  # nothing of the pass before
        count = len(sent(rig))
        robot.drive(speed=2.0, until_s=55.0, since_s=49.0)
        rig.send(51.0)  # starts a new map
        play_until(lambda: len(sent(rig)) >= count + 3)
        back = [t for t in sent(rig) if stamp_ns(t) < 90 * 10**9]
        assert len(back) >= 3
        assert all(np.diff([stamp_ns(t) for t in back]) > 0)
        assert back[-1].transform.translation.x == pytest.approx(-2 * 51.0, abs=1e-6)


@pytest.mark.parametrize('begins', [False, True])
def test_simulated_time_that_stands_still_while_images_come_is_an_error(begins, monkeypatch):
    monkeypatch.setattr(tf_modes, '_STANDSTILL_S', 0.5)
    with running(tf_mode='map_to_odom', use_sim_time=True, **METRES) as rig:
        Robot(rig).mount()
        clock = rig.publisher(Clock, '/clock')
        if begins:
            clock.publish(Clock(clock=to_time(7.0)))
            rig.wait(lambda: rig.node.get_clock().now().nanoseconds > 0)
        transform, stamps = rig.node.pipeline.outputs.transform, itertools.count(1.0)
        rig.wait(lambda: rig.send(next(stamps)) or 'clock' in transform._troubles)
        wait_for_trouble(rig, f'/clock stands still at {7.0 * begins:.3f} s')
        clock.publish(Clock(clock=to_time(8.0)))
        rig.wait(lambda: rig.node.get_clock().now().nanoseconds > 8 * 10**9)
        rig.send(next(stamps))
        rig.wait(lambda: 'clock' not in transform._troubles)


NONSENSE = (
    {'xyz': (np.inf, 0.0, 0.0)},
    {'xyz': (np.nan, 0.0, 0.0)},
    {'xyzw': (0.0, 0.0, 0.0, 0.0)},
    {'xyzw': (0.0, 0.0, 0.0, np.inf)},
    {'time_s': -5.0},
    {'child': 'odom'},
    {'child': ''},
)


def test_what_is_no_place_is_left_out_with_one_line(capfd):
    with running(tf_mode='map_to_odom', **METRES) as rig:
        robot = Robot(rig)
        robot.mount()
        robot.drive(speed=0.5, until_s=1.5)
        for nonsense in NONSENSE:
            bad = told(**{'parent': 'odom', 'child': 'base_link', 'time_s': 1.2} | nonsense)
            for _ in range(3):
                robot._moving.sendTransform(bad)
        robot.drive(speed=0.5, until_s=2.5, since_s=1.9)
        rig.send(1.0, 2.0)
        wait_for_x(rig, 1.0)  # 2 m by the map, 1 m by odometry
        wait_for_trouble(rig)
    log = capfd.readouterr().err
    assert log.count('is ignored: it needs two frames') == 1
    assert 'TF_' not in log


def test_map_to_base_starts_at_identity_and_outputs_are_of_the_robot(tmp_path):
    down = np.deg2rad(20)  # the camera looks down a little, from 0.5 m above
    pitch = (0.0, np.sin(down / 2), 0.0, np.cos(down / 2))
    mount = product(pitch, OPTICAL)
    with running(
        ('pose', 'points'), tf_mode='map_to_base', save_directory=str(tmp_path), **METRES
    ) as rig:
        Robot(rig).mount((0.3, 0.1, 0.5), mount)
        rig.send(1.0, 2.0)
        rig.wait(lambda: len(sent(rig)) == 2)
        first, second = sent(rig)
        assert (first.child_frame_id, second.child_frame_id) == ('base_link', 'base_link')
        assert (first.header.stamp, second.header.stamp) == (to_time(1.0), to_time(2.0))
        assert xyz(first) == (0, 0, 0)
        assert xyzw(first) == (0, 0, 0, 1)
        assert xyzw(second) == (0, 0, 0, 1)
        moved = (2 * np.cos(down), 0, -2 * np.sin(down))  # along the optical axis
        assert xyz(second) == moved
        for topic in ('odometry', 'pose'):
            message = rig.wait_for(topic, 2)[1]
            pose = message.pose.pose if topic == 'odometry' else message.pose
            assert (pose.position.x, pose.position.z) == pytest.approx((moved[0], moved[2]))
            assert message.header.frame_id == 'map'
        assert rig.heard['odometry'][1].child_frame_id == 'base_link'
        saved = rig.call('save_trajectory').message
        rows = np.loadtxt(saved)
        np.testing.assert_allclose(rows[0, 1:4], (0.3, 0.1, 0.5), atol=1e-6)  # the camera's
        np.testing.assert_allclose(np.abs(rows[0, 4:]), np.abs(mount), atol=1e-6)
        assert rig.set_parameter('points.stride', 1).successful
        rig.send(3.0)
        rig.call('flush')
        cloud = np.frombuffer(rig.wait_for('points', 3)[2].data, POINT_DTYPE)
        middle = cloud.reshape(42, 56)[21, 28]  # on the optical axis, 4 m from the camera
        way = 4 + 4  # of the camera and of the light
        expected = (0.3 + way * np.cos(down), 0.1, 0.5 - way * np.sin(down))
        np.testing.assert_allclose([middle[axis] for axis in 'xyz'], expected, atol=1e-5)


def test_a_point_ahead_of_the_camera_is_ahead_of_the_robot():
    with running(
        ('points',), tf_mode='map_to_base', points__stride=1, scale=1.000001, num_scale_frames=1
    ) as rig:
        Robot(rig).mount()
        rig.send(1.0)
        cloud = np.frombuffer(rig.wait_for('points', 1)[0].data, POINT_DTYPE)
        middle = cloud.reshape(42, 56)[21, 28]
        np.testing.assert_allclose([middle[axis] for axis in 'xyz'], (2, 0, 0), atol=1e-5)


@pytest.mark.parametrize('moving', [False, True])
def test_without_a_static_mount_poses_are_the_cameras_until_it_is_known(moving, capfd):
    with running(tf_mode='map_to_base', **METRES) as rig:
        robot = Robot(rig)
        if moving:
            robot.mount(moving=True)
        rig.send(1.0, 2.0)
        rig.wait_for('odometry', 2)
        assert {m.child_frame_id for m in rig.heard['odometry']} == {'cam'}
        wait_for_trouble(rig, "'base_link' -> 'cam'", '/tf_static')
        assert not sent(rig)
        robot.mount((0.0, 0.0, 1.0))
        tree = rig.node.pipeline.tree
        rig.wait(lambda: tree.parents.get('cam') == 'base_link')
        rig.send(3.0, 4.0)
        rig.wait(lambda: len(sent(rig)) == 2)
        assert [xyz(t) for t in sent(rig)] == [(0, 0, 0), (2, 0, 0)]
        rig.wait_counts(4, 4)
        assert rig.wait_for('odometry', 4)[2].child_frame_id == 'base_link'
        assert rig.node.pipeline.session.number == 1
        wait_for_trouble(rig)
    assert capfd.readouterr().err.count('no TF is published, odometry and pose are') == 1


def test_a_camera_whose_images_come_in_the_frame_of_the_robot_has_no_mount():
    values = {'tf_mode': 'map_to_odom', 'scale_source': 'odometry', 'num_scale_frames': 1}
    with running(**values) as rig:
        rig.send(1.0, frame_id='base_link')
        wait_for_trouble(rig, "the images have the frame 'base_link' itself")
        assert not sent(rig)


def test_a_robot_that_has_a_parent_gets_no_second_one_also_if_that_comes_late():
    with running(tf_mode='map_to_base', **METRES) as rig:
        robot = Robot(rig)
        robot.mount()
        rig.send(1.0)
        rig.wait(lambda: len(sent(rig)) == 1)
        robot.move(1.0, 0.0)  # odom -> base_link
        tree = rig.node.pipeline.tree
        rig.wait(lambda: tree.parents.get('base_link') == 'odom')
        rig.send(2.0, 3.0)
        rig.wait_for('odometry', 3)
        wait_for_trouble(rig, "'base_link' has the parent 'odom'", "'map_to_odom'")
        assert len(sent(rig)) == 1
        rig.call('reset')  # the other has been stopped, say
        rig.send(4.0)
        rig.wait(lambda: len(sent(rig)) == 2)
        wait_for_trouble(rig)


def test_odom_that_has_a_parent_gets_no_second_one():
    with running(tf_mode='map_to_odom', **METRES) as rig:
        robot = Robot(rig)
        robot.mount()
        robot.drive(speed=0.0, until_s=3.0)
        robot.move(1.0, 0.0, parent='earth', child='odom')
        tree = rig.node.pipeline.tree
        rig.wait(lambda: tree.parents.get('odom') == 'earth')
        rig.send(1.0)
        wait_for_trouble(rig, "'odom' has the parent 'earth'")
        assert not sent(rig)


@pytest.mark.parametrize('tf_mode', ['off', 'map_to_camera'])
def test_the_map_is_level_with_the_robot_whenever_the_mount_is_known(tf_mode):
    with running(tf_mode=tf_mode, num_scale_frames=1) as rig:
        Robot(rig).mount((0.3, 0.0, 0.5), product((0.0, 0.6, 0.0, 0.8), OPTICAL))
        rig.send(1.0)
        message = rig.wait_for('odometry', 1)[0]
        assert message.child_frame_id == 'cam'
        p = message.pose.pose.position
        assert (p.x, p.y, p.z) == pytest.approx((0.3, 0, 0.5))


def test_no_transform_is_older_than_the_newest_until_time_jumps_back():
    with running(num_scale_frames=1, time_jump_threshold=2.0) as rig:
        rig.send(100.0, 101.0)
        rig.wait(lambda: len(sent(rig)) == 2)
        rig.call('reset')
        rig.send(100.5, 101.0, 101.5)  # the first two were under way when reset came
        rig.wait_for('odometry', 5)
        rig.send(50.0, 51.0)  # the bag starts again
        rig.wait_for('odometry', 7)
        rig.wait(lambda: len(sent(rig)) == 5)
        assert [t.header.stamp.sec + t.header.stamp.nanosec // 10**8 / 10 for t in sent(rig)] == [
            100.0,
            101.0,
            101.5,
            50.0,
            51.0,
        ]


def test_before_the_scale_frames_are_complete_there_is_a_state_and_no_transform():
    with running(num_scale_frames=8) as rig:
        rig.send(1.0, 2.0, 3.0)
        rig.wait_for('processed', 3)
        assert rig.diagnostic('state') == 'INITIALIZING 3/8'
        assert not sent(rig)
        rig.send(*range(4, 9))
        rig.wait(lambda: len(sent(rig)) == 8)
        assert rig.diagnostic('state') == 'TRACKING'


@pytest.mark.parametrize(
    ('values', 'words'),
    [
        ({'tf_mode': 'map_to_base', 'base_frame': '', 'scale': 2.0}, "'base_frame' is empty"),
        ({'tf_mode': 'map_to_odom', 'odom_frame': '/', 'scale': 2.0}, "'odom_frame' is empty"),
        ({'map_frame': '/map'}, "'map_frame' is '/map'"),
        ({'tf_mode': 'map_to_odom', 'odom_frame': 'map', 'scale': 2.0}, 'the same frame'),
        ({'tf_mode': 'map_to_base'}, "'scale'.*'scale_source'"),
        ({'tf_mode': 'map_to_odom'}, "'scale'.*'scale_source'"),
    ],
)
def test_modes_that_cannot_work_are_refused(values, words):
    with pytest.raises(ParameterError, match=words):
        NodeParams.from_values(values)


def test_frames_that_a_mode_does_not_use_need_no_name():
    NodeParams.from_values({'base_frame': '', 'odom_frame': ''})
    NodeParams.from_values({'tf_mode': 'map_to_odom', 'scale_source': 'odometry'})


def test_configuring_a_robot_mode_without_metres_fails_and_says_why(capfd):
    with running(autostart=False, tf_mode='map_to_base') as rig:
        assert rig.node.trigger_configure() == TransitionCallbackReturn.FAILURE
        assert rig.node.pipeline is None
    assert "'tf_mode' is 'map_to_base', which needs metres" in capfd.readouterr().err


def product(p, q):
    """Return the quaternion xyzw of turning by q, then by p."""
    (a, b), (v, w) = (np.array(p[:3]), p[3]), (np.array(q[:3]), q[3])
    return (*(b * v + w * a + np.cross(a, v)).tolist(), float(b * w - a @ v))
