"""What the node sends on /tf in each tf_mode, and reports when a transform is missing."""

import itertools
import time

from diagnostic_msgs.msg import DiagnosticStatus
from lingbot_map.mapping.points import POINT_DTYPE
from lingbot_map_ros.output import tf_modes
from lingbot_map_ros.output.frames import NoTransform
from node_rig import running, to_time
import numpy as np
import pytest
from rclpy.lifecycle import TransitionCallbackReturn
from rosgraph_msgs.msg import Clock
from tf2_ros import StaticTransformBroadcaster, TransformBroadcaster
from transforms import OPTICAL, product, stamped

pytestmark = pytest.mark.usefixtures('ros')
METRES = {'scale': 2.0, 'num_scale_frames': 1}
SOON_S = 0.4  # for what must not happen


class Robot:
    """Publishes the transforms of a robot to the node."""

    def __init__(self, rig):
        self._rig = rig
        self._static = StaticTransformBroadcaster(rig.probe)
        self._moving = TransformBroadcaster(rig.probe)

    def mount(self, xyz=(0.0, 0.0, 0.0), xyzw=OPTICAL):
        self._static.sendTransform(stamped('base_link', 'cam', 0.0, xyz, xyzw))
        self._rig.wait(self._is_mounted, 'extrinsics')

    def _is_mounted(self):
        try:
            self._rig.node.pipeline.tree.extrinsics('base_link', 'cam')
        except NoTransform:
            return False
        return True

    def move(self, parent, child, time_s, x=0.0, xyzw=(0.0, 0.0, 0.0, 1.0)):
        """Send a transform on /tf and wait until the node has it."""
        self.send(stamped(parent, child, time_s, (x, 0.0, 0.0), xyzw))
        self._rig.wait(lambda: self._rig.node.pipeline.tree.parents.get(child) == parent)

    def send(self, transform):
        self._moving.sendTransform(transform)

    def drive(self, speed, until_s, since_s=0.0):
        """Send odometry at begin and end; what is between must be interpolated."""
        self._rig.wait(lambda: self._moving.pub_tf.get_subscription_count() == 2)
        for time_s in (since_s, until_s):
            self.send(stamped('odom', 'base_link', time_s, (speed * time_s, 0.0, 0.0)))


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


def test_map_to_odom_corrects_the_odometry_of_the_very_moment_in_each_map(capfd):
    with running(tf_mode='map_to_odom', **METRES) as rig:
        robot = Robot(rig)
        robot.mount((0.3, 0.1, 0.5))
        check_images_without_odometry(rig)
        robot.drive(speed=3.0, until_s=2.5)  # it comes after the images, and is waited for
        wait_for_x(rig, 2 - 3 * 2.0)  # the map says 2 m per image
        wait_for_trouble(rig)
        robot.drive(speed=3.0, until_s=6.0, since_s=2.8)
        rig.send(3.0)
        wait_for_x(rig, 4 - 3 * 3.0)
        rig.send(4.0, 5.0)
        wait_for_x(rig, 8 - 3 * 5.0)
        assert rig.set_parameter('tf_rate', 50.0).successful
        count = len(sent(rig))
        rig.wait(lambda: len(sent(rig)) > count + 5)

        assert rig.call('reset').success
        count = check_that_nothing_is_sent(rig)
        robot.drive(speed=0.0, until_s=9.0, since_s=7.0)
        rig.send(8.0)
        rig.wait(lambda: len(sent(rig)) >= count + 5)
        for transform in sent(rig)[count:]:
            assert xyz(transform) == (0, 0, 0)  # where pose and odometry are the identity
            assert xyzw(transform) == (0, 0, 0, 1)
        assert {t.child_frame_id for t in sent(rig)} == {'odom'}  # never base_link, nor cam
        stamps = [stamp_ns(t) for t in sent(rig)]
        assert all(np.diff(stamps) > 0)  # also from map to map
        assert abs(stamps[-1] / 1e9 - time.time()) < 20  # that of the image is 8 s
        wait_for_trouble(rig)
    assert capfd.readouterr().err.count("no transform 'odom'") == 1


def check_images_without_odometry(rig):
    rig.send(1.0, 2.0)
    wait_for_trouble(rig, "no transform 'odom' -> 'base_link'", 'no TF is published')
    assert not sent(rig)
    poses = rig.wait_for('odometry', 2)
    assert {m.child_frame_id for m in poses} == {'base_link'}  # in the map all the same
    assert poses[1].pose.pose.position.x == pytest.approx(2)


def check_that_nothing_is_sent(rig):
    """Wait until what was under way has come; return the number of transforms."""
    time.sleep(SOON_S)
    count = len(sent(rig))
    time.sleep(SOON_S)
    assert len(sent(rig)) == count
    return count


NONSENSE = (
    {'xyz': (np.inf, 0.0, 0.0)},
    {'xyz': (np.nan, 0.0, 0.0)},
    {'xyzw': (0.0, 0.0, 0.0, 0.0)},
    {'xyzw': (0.0, 0.0, 0.0, np.inf)},
    {'time_s': -5.0},
    {'child': 'odom'},
    {'child': ''},
)


def test_what_is_no_place_is_left_out_and_odom_gets_no_second_parent(capfd):
    with running(tf_mode='map_to_odom', **METRES) as rig:
        robot = Robot(rig)
        robot.mount()
        robot.drive(speed=0.5, until_s=1.5)
        for nonsense in NONSENSE:
            bad = {'parent': 'odom', 'child': 'base_link', 'time_s': 1.2} | nonsense
            for _ in range(3):
                robot.send(stamped(**bad))
        robot.drive(speed=0.5, until_s=2.5, since_s=1.9)
        rig.send(1.0, 2.0)
        wait_for_x(rig, 1.0)  # 2 m by the map, 1 m by odometry
        wait_for_trouble(rig)
        log = capfd.readouterr().err
        assert log.count('is ignored: it needs two frames') == 1
        assert 'TF_' not in log

        robot.move('earth', 'odom', 2.0)
        wait_for_trouble(rig, "'odom' has the parent 'earth'")
        check_that_nothing_is_sent(rig)


def test_stamps_follow_simulated_time_also_back_and_its_standstill_is_an_error(monkeypatch):
    monkeypatch.setattr(tf_modes, '_STANDSTILL_S', 0.5)
    with running(tf_mode='map_to_odom', use_sim_time=True, **METRES) as rig:
        clock = rig.publisher(Clock, '/clock')
        robot = Robot(rig)
        robot.mount()
        check_standstill(rig, clock)
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

        assert not sent(rig)
        play_until(lambda: rig.node.get_clock().now().nanoseconds > 100 * 10**9, 100.0)
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


def check_standstill(rig, clock):
    """Let images come while time stands still, before it has begun and later."""
    transform, stamps = rig.node.pipeline.outputs.transform, itertools.count(1.0, 0.001)
    for time_s in (0.0, 7.0):
        if time_s:
            clock.publish(Clock(clock=to_time(time_s)))
            rig.wait(lambda: rig.node.get_clock().now().nanoseconds > 0)
        text = f'/clock stands still at {time_s:.3f} s'
        rig.wait(
            lambda text=text: (
                rig.send(next(stamps)) or text in transform._troubles.get('clock', '')
            )
        )
        wait_for_trouble(rig, text)
    clock.publish(Clock(clock=to_time(8.0)))
    rig.wait(lambda: rig.node.get_clock().now().nanoseconds > 8 * 10**9)
    rig.send(next(stamps))
    rig.wait(lambda: 'clock' not in transform._troubles)


def test_map_to_base_from_missing_extrinsics_to_a_robot_that_has_a_parent(tmp_path, capfd):
    topics = ('pose', 'points')
    values = {'tf_mode': 'map_to_base', 'save_directory': str(tmp_path)}
    with running(topics, **values, **METRES) as rig:
        robot = Robot(rig)
        check_images_without_extrinsics(rig, robot)
        check_outputs_of_the_robot(rig, robot)
        check_the_robot_gets_no_second_parent(rig, robot)
    assert capfd.readouterr().err.count('no TF is published, odometry and pose are') == 1


def check_images_without_extrinsics(rig, robot):
    """Send two images without static extrinsics, each in a map of its own."""
    rig.send(1.0)
    wait_for_trouble(rig, "no transform 'base_link' -> 'cam' on /tf_static")
    robot.move('base_link', 'cam', 5.0, xyzw=OPTICAL)
    assert rig.call('reset').success
    rig.send(2.0)
    wait_for_trouble(rig, "'base_link' -> 'cam' is not completely on /tf_static")
    poses = rig.wait_for('odometry', 2)
    assert {m.child_frame_id for m in poses} == {'cam'}
    assert not sent(rig)


def check_outputs_of_the_robot(rig, robot):
    """Mount a camera that looks down a little, which starts a map, and send three images."""
    down = np.deg2rad(20)
    mount = product((0.0, np.sin(down / 2), 0.0, np.cos(down / 2)), OPTICAL)
    robot.mount((0.3, 0.1, 0.5), mount)
    rig.send(3.0, 4.0)
    rig.wait(lambda: len(sent(rig)) == 2)
    first, second = sent(rig)
    assert (first.child_frame_id, second.child_frame_id) == ('base_link', 'base_link')
    assert (first.header.stamp, second.header.stamp) == (to_time(3.0), to_time(4.0))
    assert xyz(first) == (0, 0, 0)
    assert xyzw(first) == (0, 0, 0, 1)
    assert xyzw(second) == (0, 0, 0, 1)
    moved = (2 * np.cos(down), 0, -2 * np.sin(down))  # along the optical axis
    assert xyz(second) == moved
    for topic in ('odometry', 'pose'):
        message = rig.wait_for(topic, 4)[3]
        pose = message.pose.pose if topic == 'odometry' else message.pose
        assert (pose.position.x, pose.position.z) == pytest.approx((moved[0], moved[2]))
        assert message.header.frame_id == 'map'
    assert {m.child_frame_id for m in rig.heard['odometry'][2:]} == {'base_link'}
    rig.wait_counts(4, 4)
    assert rig.node.pipeline.session.number == 2
    wait_for_trouble(rig)
    rows = np.loadtxt(rig.call('save_trajectory').message)
    np.testing.assert_allclose(rows[0, 1:4], (0.3, 0.1, 0.5), atol=1e-6)  # the camera's
    np.testing.assert_allclose(np.abs(rows[0, 4:]), np.abs(mount), atol=1e-6)
    assert rig.set_parameter('points.stride', 1).successful
    rig.send(5.0)
    rig.call('flush')
    rig.wait(lambda: rig.stamps('points')[-1:] == [5.0])
    cloud = np.frombuffer(rig.heard['points'][-1].data, POINT_DTYPE)
    middle = cloud.reshape(42, 56)[21, 28]  # on the optical axis, 4 m from the camera
    way = 4 + 4  # of the camera and of the light
    expected = (0.3 + way * np.cos(down), 0.1, 0.5 - way * np.sin(down))
    np.testing.assert_allclose([middle[axis] for axis in 'xyz'], expected, atol=1e-5)


def check_the_robot_gets_no_second_parent(rig, robot):
    """Let another node send odom -> base_link during the map."""
    rig.wait(lambda: len(sent(rig)) == 3)
    robot.move('odom', 'base_link', 6.0)
    rig.send(6.0, 7.0)
    rig.wait_for('odometry', 7)
    wait_for_trouble(rig, "'base_link' has the parent 'odom'", "'map_to_odom'")
    assert len(sent(rig)) == 3
    rig.call('reset')  # the other has been stopped, say
    rig.send(8.0)
    rig.wait(lambda: len(sent(rig)) == 4)
    wait_for_trouble(rig)


def test_before_the_scale_frames_are_complete_there_is_a_state_and_no_transform():
    with running(num_scale_frames=8) as rig:
        rig.send(1.0, 2.0, 3.0)
        rig.wait_for('processed', 3)
        assert rig.diagnostic('state') == 'INITIALIZING 3/8'
        assert not sent(rig)
        rig.send(*range(4, 9))
        rig.wait(lambda: len(sent(rig)) == 8)
        assert rig.diagnostic('state') == 'TRACKING'

        Robot(rig).mount((0.3, 0.0, 0.5), product((0.0, 0.6, 0.0, 0.8), OPTICAL))
        assert rig.call('reset').success
        rig.send(*range(9, 17))
        message = rig.wait_for('odometry', 9)[8]
        assert message.child_frame_id == 'cam'
        p = message.pose.pose.position
        assert (p.x, p.y, p.z) == pytest.approx((0.3, 0, 0.5))  # level with the robot


def test_configuring_what_cannot_work_fails_and_says_why(capfd):
    values = {'tf_mode': 'map_to_base', 'image_mask': '/nowhere.png'}
    with running(autostart=False, **values) as rig:
        assert rig.node.trigger_configure() == TransitionCallbackReturn.FAILURE
        assert rig.node.pipeline is None
        assert "'tf_mode' is 'map_to_base', which needs metres" in capfd.readouterr().err
        assert rig.set_parameter('scale', 2.0).successful
        assert rig.node.trigger_configure() == TransitionCallbackReturn.FAILURE
        assert rig.node.pipeline is None
        assert "'image_mask': '/nowhere.png' is neither" in capfd.readouterr().err
