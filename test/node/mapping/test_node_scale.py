"""The scale in the running node: fixed, or found once from the topic odom."""

from diagnostic_msgs.msg import DiagnosticStatus
from fake_engine import DEPTH, Gate, STEP
from geometry_msgs.msg import PoseStamped, Quaternion, TransformStamped
from lingbot_map.mapping.map_frame import MapFrame
from lingbot_map.mapping.map_store import MapStore
from lingbot_map.mapping.points import POINT_DTYPE
from lingbot_map_ros.frame import to_stamp
from lingbot_map_ros.mapping import scale as scale_estimation
from lingbot_map_ros.output.conversions import pose_stamped
from lingbot_map_ros.output.trajectory import Trajectory
from nav_msgs.msg import Odometry
from node_rig import running, to_time, WAIT_S
import numpy as np
import pytest
from std_msgs.msg import Header
from tf2_ros import StaticTransformBroadcaster

pytestmark = pytest.mark.usefixtures('ros')
METRES_PER_STEP = 0.25  # of odometry; the fake engine says 1 network unit
COUNT = 12


class Wheels:
    """Publishes on odom how far the robot has come."""

    def __init__(self, rig):
        self._rig = rig
        self._pub = rig.publisher(Odometry, '/odom')

    def tell(self, metres_per_s, *times_s):
        for time_s in times_s:
            self._pub.publish(self.message(metres_per_s, time_s))
        odometry = self._rig.node.pipeline.odometry
        self._rig.wait(lambda: odometry.newest_ns >= int(times_s[-1] * 1e9))

    @staticmethod
    def message(metres_per_s, time_s):
        message = Odometry(child_frame_id='base_link')
        message.header.frame_id, message.header.stamp = 'odom', to_time(time_s)
        message.pose.pose.position.x = metres_per_s * time_s
        return message


def mount(rig):
    where = TransformStamped(child_frame_id='cam')
    where.header.frame_id = 'base_link'
    where.transform.translation.x = 0.5
    where.transform.rotation = Quaternion(x=-0.5, y=0.5, z=-0.5, w=0.5)
    StaticTransformBroadcaster(rig.probe).sendTransform(where)
    rig.wait(lambda: 'cam' in rig.node.pipeline.tree.parents)


def send_one_by_one(rig, stamps_s):
    for stamp in stamps_s:
        count = len(rig.heard['odometry'])
        rig.send(stamp)
        rig.wait_for('odometry', count + 1)


def positions(messages):
    return [m.pose.pose.position.x for m in messages]


def robot_transforms(rig):
    return [t for m in rig.heard['tf'] for t in m.transforms if t.header.frame_id == 'map']


def test_odometry_gives_the_scale_once_and_all_that_is_stored_follows(capfd):
    params = {
        'tf_mode': 'map_to_base',
        'scale_source': 'odometry',
        'num_scale_frames': 1,
        'points__stride': 1,
        'path__publish_rate': 50.0,
    }
    half_seconds = [0.5 * i for i in range(1, 2 * COUNT + 4)]
    with running(('path', 'points', 'depth'), **params) as rig:
        mount(rig)
        send_one_by_one(rig, (1.0, 2.0))
        assert rig.state() == 'WAITING_FOR_SCALE'
        assert rig.diagnostic('scale') == 'waiting for odometry on /odom'
        Wheels(rig).tell(METRES_PER_STEP, *half_seconds)
        send_one_by_one(rig, range(3, COUNT + 1))
        assert rig.state() == 'TRACKING'
        assert rig.diagnostic('scale') == f'{METRES_PER_STEP:g} (odometry)'
        rig.call('flush')
        heard = positions(rig.heard['odometry'])
        # 8 steps of 0.25 m are enough: the ninth image is the first in metres
        expected = [i * (STEP if i < 8 else METRES_PER_STEP) for i in range(COUNT)]
        assert heard == pytest.approx(expected, abs=1e-6)
        rig.wait(lambda: len(robot_transforms(rig)) == COUNT - 8)  # none before
        moves = [t.transform.translation.x for t in robot_transforms(rig)]
        assert moves == pytest.approx(expected[8:], abs=1e-6)
        metric = pytest.approx([i * METRES_PER_STEP for i in range(COUNT)], abs=1e-6)
        rig.wait(lambda: len(rig.heard['path'][-1].poses) == COUNT)
        assert [p.pose.position.x for p in rig.heard['path'][-1].poses] == metric
        stamps_ns, poses = rig.node.pipeline.session.trajectory.export()
        assert [T[0, 3] - 0.5 for T in poses] == metric  # the camera is 0.5 m ahead
        depth = np.frombuffer(rig.wait_for('depth', COUNT)[-1].data, '<f4')
        np.testing.assert_allclose(depth, DEPTH * METRES_PER_STEP, rtol=1e-6)
        cloud = np.frombuffer(rig.wait_for('points', COUNT)[-1].data, POINT_DTYPE)
        ahead = 0.5 + (COUNT - 1 + DEPTH) * METRES_PER_STEP
        np.testing.assert_allclose(cloud['x'], ahead, rtol=1e-5)
        walls = np.unique(rig.node.pipeline.session.points.snapshot()['x'].round(4))
        np.testing.assert_allclose(
            walls, [0.5 + (i + DEPTH) * METRES_PER_STEP for i in range(COUNT)], atol=1e-4
        )
    assert capfd.readouterr().err.count('scale is 0.25 m per network unit') == 1


def test_a_scale_that_is_found_after_a_reset_changes_the_old_map_only():
    gate = Gate(at=9)
    params = {'scale_source': 'odometry', 'num_scale_frames': 1}
    with running(**params, engine={'before_push': gate}) as rig:
        Wheels(rig).tell(METRES_PER_STEP, *range(0, 12))
        send_one_by_one(rig, range(1, 9))
        old = rig.node.pipeline.session
        rig.send(9.0)  # gives the scale
        assert gate.reached.wait(WAIT_S)
        rig.call('reset')
        new, rescaled = rig.node.pipeline.session, []
        new.rescale = lambda *values: rescaled.append(values)
        gate.open()
        rig.wait(lambda: old.scale_status == f'{METRES_PER_STEP:g} (odometry)')
        rig.wait_counts(9, 8, reset=1)
        assert rescaled == []
        _, poses = old.trajectory.export()
        assert poses[-1][0, 3] == pytest.approx(7 * METRES_PER_STEP)


def test_the_scale_stays_until_a_reset_and_is_found_anew_then():
    params = {'scale_source': 'odometry', 'num_scale_frames': 1}
    with running(**params) as rig:
        wheels = Wheels(rig)
        wheels.tell(METRES_PER_STEP, *range(0, 15))
        send_one_by_one(rig, range(1, 11))
        assert rig.state() == 'TRACKING'
        wheels.tell(2.0, *range(15, 26))  # the wheels slip from here on
        send_one_by_one(rig, range(15, 20))
        assert rig.diagnostic('scale') == f'{METRES_PER_STEP:g} (odometry)'
        rig.call('reset')
        rig.wait(lambda: rig.diagnostic('scale') == 'not begun')
        count = len(robot_transforms(rig))
        send_one_by_one(rig, (20.0, 21.0))
        assert rig.state() == 'WAITING_FOR_SCALE'
        assert len(robot_transforms(rig)) == count
        wheels.tell(0.5, *range(22, 42))
        send_one_by_one(rig, range(22, 41))
        assert rig.diagnostic('scale') == '0.5 (odometry)'


@pytest.mark.parametrize(
    ('times_s', 'words'),
    [
        ((), "no odometry on /odom: remap 'odom'"),
        ((1000.0, 1000.1), 'the newest is 998.1 s newer than the newest image'),
    ],
)
def test_odometry_that_never_fits_is_an_error(times_s, words, monkeypatch, capfd):
    monkeypatch.setattr(scale_estimation, '_PATIENCE_S', 0.0)
    with running(scale_source='odometry', num_scale_frames=1) as rig:
        wheels = Wheels(rig)
        if times_s:
            wheels.tell(METRES_PER_STEP, *times_s)
        send_one_by_one(rig, (1.0, 2.0))
        assert words in rig.diagnostic('trouble')
        assert rig.heard['diagnostics'][-1].status[0].level == DiagnosticStatus.ERROR
    assert capfd.readouterr().err.count('no scale yet') == 1


def test_odometry_beyond_all_numbers_is_no_pose():
    with running(scale_source='odometry', num_scale_frames=1) as rig:
        wheels = Wheels(rig)
        odometry = rig.node.pipeline.odometry
        wheels.tell(0.0, 1.0)
        wheels._pub.publish(wheels.message(1e200, 2.0))
        wheels.tell(0.0, 3.0)
        assert odometry._stamps_ns == [1 * 10**9 + 7, 3 * 10**9 + 7]


@pytest.mark.parametrize(
    ('params', 'words', 'shown'),
    [
        ({}, 'scale is relative', '1 (relative)'),
        ({'scale': 2.5}, 'scale is 2.5 map units', '2.5'),
        ({'scale': 2.5, 'scale_source': 'odometry'}, "('scale', 2.5, is not used)", 'not begun'),
    ],
)
def test_what_the_scale_is_gets_announced(params, words, shown, capfd):
    with running(**params) as rig:
        assert rig.diagnostic('scale') == shown
    assert words.replace("('scale'", "(the parameter 'scale'") in capfd.readouterr().err


def test_a_trajectory_is_stretched_from_its_origin():
    frame, trajectory = MapFrame(1.0), Trajectory(max_size=3)
    T = np.eye(4)
    body = np.array([10.0, 0.0, 0.0])  # messages may speak of another body than the camera
    for i in range(5):
        T[2, 3] = i
        pose = frame.pose(T)
        message = pose_stamped(Header(stamp=to_stamp(i + 1)), pose)
        message.pose.position.x += body[0]
        trajectory.append(message, pose)
    before: list[PoseStamped] = list(trajectory.newest)
    trajectory.rescale(0.5, np.array([1.0, 0.0, 0.0]))
    stamps_ns, poses = trajectory.export()
    assert [T[0, 3] for T in poses] == [0.5, 1.0, 1.5, 2.0, 2.5]
    assert [p.pose.position.x for p in trajectory.newest] == [11.5, 12.0, 12.5]
    assert [p.header.stamp for p in trajectory.newest] == [to_stamp(i) for i in (3, 4, 5)]
    assert [p.pose.position.x for p in before] == [12.0, 13.0, 14.0]  # may be on their way
    trajectory = Trajectory(3)
    trajectory.rescale(2.0, np.zeros(3))
    assert trajectory.export() == ([], [])


def test_a_map_is_stretched_from_its_origin():
    store = MapStore(voxel_size=1.0, max_points=1000)
    points = np.zeros(3, POINT_DTYPE)
    points['x'], points['y'], points['rgb'] = (1.5, 2.5, 3.5), -1.0, (1, 2, 3)
    store.insert(points)
    store.rescale(10.0, np.array([1.0, -1.0, 0.0]))
    stretched = np.sort(store.snapshot(), order='x')
    np.testing.assert_allclose(stretched['x'], (6, 16, 26))
    np.testing.assert_allclose(stretched['y'], -1)
    assert stretched['rgb'].tolist() == [1, 2, 3]
    store.insert(stretched)
    assert len(store) == 3  # each in the voxel where it belongs
    store.rescale(0.001, np.zeros(3))
    assert len(store) == 1
