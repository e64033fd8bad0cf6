"""The scale from odometry: when there is one, how right it is, and what it rests on."""

from lingbot_map.geometry import invert
from lingbot_map_ros.frame import to_stamp
from lingbot_map_ros.input.odometry import OdometryInput
from lingbot_map_ros.mapping.scale import ScaleEstimator
from lingbot_map_ros.output.frames import NoTransform
from lingbot_map_ros.parameters import NodeParams
from nav_msgs.msg import Odometry
import numpy as np
import pytest
import rclpy

SCALE = 0.4  # metres per network unit
PERIOD_NS = 100_000_000
MOUNT = np.array([[0, 0, 1, 0.8], [-1, 0, 0, 0.2], [0, -1, 0, 1.0], [0, 0, 0, 1]], float)


class Tree:
    """Knows the mount, or does not."""

    def __init__(self, T_base_cam=None):
        self._T_base_cam = T_base_cam

    def extrinsics(self, base, camera):
        assert (base, camera) == ('base_footprint', 'cam')
        if self._T_base_cam is None:
            raise NoTransform('none')
        return self._T_base_cam


@pytest.fixture(scope='module')
def node():
    context = rclpy.Context()
    rclpy.init(context=context)
    node = rclpy.create_node('scale_estimation_test', context=context)
    yield node
    node.destroy_node()
    rclpy.shutdown(context=context)


@pytest.fixture
def odometry(node):
    odometry = OdometryInput(node)
    yield odometry
    odometry.close()


def planar(x, y, yaw):
    T = np.eye(4)
    T[:2, :2] = [[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]]
    T[:2, 3] = x, y
    return T


def message(stamp_ns, T):
    told = Odometry(child_frame_id='base_footprint')
    told.header.stamp = to_stamp(stamp_ns)
    p, q = told.pose.pose.position, told.pose.pose.orientation
    p.x, p.y = T[0, 3], T[1, 3]
    yaw = np.arctan2(T[1, 0], T[0, 0])
    q.z, q.w = np.sin(yaw / 2), np.cos(yaw / 2)
    return told


def seen(T_odom_base, rng=None, noise=0.0):
    """Return T_world_cam as a network sees it: another world, its own unit, some noise."""
    T = planar(3.0, -2.0, 1.0) @ T_odom_base @ MOUNT
    T[:3, 3] /= SCALE
    if rng is not None:
        T[:3, 3] += rng.normal(scale=noise / SCALE, size=3)
    return T


def estimate(odometry, tree, path, seen_path):
    """Return the first fit and the number of images it took; odometry is ahead by one message."""
    estimator = ScaleEstimator(odometry, tree, NodeParams(), 'cam')
    odometry.receive(message(1, path[0]))
    for i, (T_odom_base, T_world_cam) in enumerate(zip(path, seen_path, strict=True), start=1):
        odometry.receive(message(i * PERIOD_NS + 1000, T_odom_base))
        fit = estimator.add(i * PERIOD_NS, T_world_cam)
        if fit is not None:
            return fit, i
    return None, estimator.status


def curve(count, step=0.05, turn=0.05):
    """Return a drive with turns: there the camera, far from the axis, moves otherwise."""
    path = [np.eye(4)]
    for _ in range(count):
        path.append(path[-1] @ planar(step, 0.0, turn))
    return path


def test_a_drive_with_turns_gives_the_scale(odometry):
    path = curve(100)
    fit, images = estimate(odometry, Tree(MOUNT), path, [seen(T) for T in path])
    assert fit.scale == pytest.approx(SCALE, rel=0.01)
    assert fit.path_m >= 1.0
    assert images > 1.0 / 0.08  # the camera is 0.8 m ahead of the axis, and faster


def test_noise_and_a_third_of_slipping_wheels_do_not_matter(odometry):
    rng = np.random.default_rng(4)
    path, told = curve(100, step=0.12, turn=0.02), [np.eye(4)]
    for i, (before, after) in enumerate(zip(path, path[1:], strict=False)):
        slip = planar(0.3, 0.0, 0.0) if i % 3 == 2 else np.eye(4)
        told.append(told[-1] @ invert(before) @ after @ slip)
    fit, _ = estimate(odometry, Tree(MOUNT), told, [seen(T, rng, 0.004) for T in path])
    assert fit.scale == pytest.approx(SCALE, rel=0.05)


def test_without_the_mount_steps_that_turn_are_left_out(odometry):
    straight, bend = curve(25, turn=0.0), curve(20, turn=0.12)
    path = [*bend, *(bend[-1] @ T for T in straight)]
    fit, images = estimate(odometry, Tree(), path, [seen(T) for T in path])
    assert fit.scale == pytest.approx(SCALE, rel=0.01)
    assert images > len(bend)


@pytest.mark.parametrize(
    'path',
    [
        [np.eye(4)] * 100,
        [planar(0.0, 0.0, 0.1 * i) for i in range(100)],
        curve(12),
        [planar(0.02 * (i % 2), 0.0, 0.0) for i in range(200)],
    ],
    ids=['standing', 'turning on the spot', 'too short', 'trembling'],
)
def test_without_enough_motion_there_is_no_scale(odometry, path):
    tree = Tree() if np.allclose(path[-1][:2, 3], 0) else Tree(MOUNT)
    fit, status = estimate(odometry, tree, path, [seen(T) for T in path])
    assert fit is None
    assert 'waiting for motion' in status


def test_paths_that_have_nothing_in_common_give_no_scale(odometry):
    rng = np.random.default_rng(5)
    path = curve(100, step=0.1, turn=0.0)
    other = [planar(*rng.normal(scale=2.0, size=2), 0.0) for _ in path]
    fit, status = estimate(odometry, Tree(MOUNT), path, [seen(T) for T in other])
    assert fit is None
    assert 'disagree' in status


def test_without_odometry_the_status_names_the_topic(odometry):
    estimator = ScaleEstimator(odometry, Tree(MOUNT), NodeParams(), 'cam')
    assert estimator.add(PERIOD_NS, seen(np.eye(4))) is None
    assert estimator.status == 'waiting for odometry on /odom'


def test_odometry_that_is_late_is_waited_for(odometry):
    estimator = ScaleEstimator(odometry, Tree(MOUNT), NodeParams(), 'cam')
    path = curve(40, turn=0.0)
    for i, T in enumerate(path[:-1], start=1):
        assert estimator.add(i * PERIOD_NS, seen(T)) is None
    for i, T in enumerate(path, start=1):
        odometry.receive(message(i * PERIOD_NS, T))
    fit = estimator.add(len(path) * PERIOD_NS, seen(path[-1]))
    assert fit.scale == pytest.approx(SCALE, rel=1e-6)


def test_a_pose_that_is_not_finite_is_no_pair(odometry):
    estimator = ScaleEstimator(odometry, Tree(MOUNT), NodeParams(), 'cam')
    for i in (1, 2):
        odometry.receive(message(i * PERIOD_NS, np.eye(4)))
        assert estimator.add(i * PERIOD_NS, np.full((4, 4), np.nan)) is None
    assert 'waiting for odometry' in estimator.status


def test_odometry_is_interpolated_but_not_over_gaps(odometry):
    for stamp_ns, T in [
        (1 * 10**9, planar(0.0, 0.0, 0.0)),
        (1_400_000_000, planar(1.0, 0.0, np.pi / 2)),
        (3 * 10**9, planar(9.0, 0.0, 0.0)),
    ]:
        odometry.receive(message(stamp_ns, T))
    halfway = odometry.at(1_200_000_000)
    np.testing.assert_allclose(halfway, planar(0.5, 0.0, np.pi / 4), atol=1e-12)
    np.testing.assert_allclose(odometry.at(3 * 10**9), planar(9.0, 0.0, 0.0), atol=1e-12)
    for outside_ns in (10**9 - 1, 2 * 10**9, 3 * 10**9 + 1):
        assert odometry.at(outside_ns) is None


def test_old_and_broken_odometry_is_ignored_and_a_jump_starts_anew(odometry):
    odometry.receive(message(100 * 10**9, planar(1.0, 0.0, 0.0)))
    odometry.receive(message(99 * 10**9, planar(5.0, 0.0, 0.0)))
    broken = message(101 * 10**9, np.eye(4))
    broken.pose.pose.position.x = np.nan
    odometry.receive(broken)
    assert odometry.newest_ns == 100 * 10**9
    assert odometry.at(99 * 10**9) is None
    odometry.receive(message(10**9, planar(5.0, 0.0, 0.0)))  # 99 s back: the bag began again
    assert odometry.newest_ns == 10**9
    assert odometry.at(100 * 10**9) is None


def test_only_the_last_minute_is_kept(odometry):
    for second in range(1, 301):
        odometry.receive(message(second * 10**9, np.eye(4)))
    assert odometry.at(300 * 10**9) is not None
    assert odometry.at(245 * 10**9) is not None
    assert odometry.at(100 * 10**9) is None
