"""The scale in the running node: fixed, or found once from the topic odom."""

from types import SimpleNamespace

from diagnostic_msgs.msg import DiagnosticStatus
from fake_engine import DEPTH, Gate, STEP
from geometry_msgs.msg import PoseStamped, Quaternion, TransformStamped
from lingbot_map.mapping.map_frame import MapFrame
from lingbot_map.mapping.map_store import MapStore
from lingbot_map.mapping.points import POINT_DTYPE
from lingbot_map_ros.frame import to_stamp
from lingbot_map_ros.input.admission import Admission
from lingbot_map_ros.mapping import scale as scale_estimation
from lingbot_map_ros.mapping.ledger import Ledger
from lingbot_map_ros.mapping.map_session import MapSession
from lingbot_map_ros.output.conversions import pose_stamped
from lingbot_map_ros.output.trajectory import Trajectory
from lingbot_map_ros.parameters import NodeParams
from nav_msgs.msg import Odometry
from node_rig import running, to_time, WAIT_S
import numpy as np
import pytest
from std_msgs.msg import Header
from tf2_ros import StaticTransformBroadcaster

over_dds = pytest.mark.usefixtures('ros')
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


@over_dds
def test_odometry_gives_the_scale_once_and_all_that_is_stored_follows(capfd, monkeypatch):
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
        send_one_by_one(rig, (1.0,))
        assert rig.state() == 'WAITING_FOR_SCALE'
        assert rig.diagnostic('scale') == 'waiting for odometry on /odom'
        with monkeypatch.context() as impatient:
            impatient.setattr(scale_estimation, '_PATIENCE_S', 0.0)
            send_one_by_one(rig, (2.0,))
            assert "no odometry on /odom: remap 'odom'" in rig.diagnostic('trouble')
            assert rig.heard['diagnostics'][-1].status[0].level == DiagnosticStatus.ERROR
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
    log = capfd.readouterr().err
    assert 'the scale is estimated from odometry' in log
    assert log.count('no scale yet') == 1
    assert log.count('scale is 0.25 m per network unit') == 1


@over_dds
def test_the_scale_stays_until_a_reset_and_is_found_anew_then():
    gate = Gate(at=9)
    params = {'scale_source': 'odometry', 'num_scale_frames': 1}
    with running(**params, engine={'before_push': gate}) as rig:
        wheels = Wheels(rig)
        wheels.tell(METRES_PER_STEP, 1.0)
        wheels._pub.publish(wheels.message(1e200, 1.5))  # no pose
        wheels.tell(METRES_PER_STEP, *range(2, 12))
        received_s = [stamp_ns // 10**9 for stamp_ns in rig.node.pipeline.odometry._stamps_ns]
        assert received_s == list(range(1, 12))
        send_one_by_one(rig, range(1, 9))
        old = rig.node.pipeline.session
        rig.send(9.0)  # gives the scale
        assert gate.reached.wait(WAIT_S)
        rig.call('reset')
        new, rescaled, rescale = rig.node.pipeline.session, [], MapSession.rescale
        new.rescale = lambda *values: (rescaled.append(values), rescale(new, *values))
        gate.open()
        rig.wait(lambda: old.scale_status == f'{METRES_PER_STEP:g} (odometry)')
        rig.wait_counts(9, 8, reset=1)
        assert rescaled == []  # a scale that is found after a reset changes the old map only
        _, poses = old.trajectory.export()
        assert poses[-1][0, 3] == pytest.approx(7 * METRES_PER_STEP)
        wheels.tell(METRES_PER_STEP, *range(12, 36))
        send_one_by_one(rig, range(21, 31))
        assert rig.state() == 'TRACKING'
        assert len(rescaled) == 1
        wheels.tell(2.0, *range(36, 46))  # the wheels slip from here on
        send_one_by_one(rig, range(36, 40))
        assert rig.diagnostic('scale') == f'{METRES_PER_STEP:g} (odometry)'
        rig.call('reset')
        rig.wait(lambda: rig.diagnostic('scale') == 'not begun')
        count = len(robot_transforms(rig))
        send_one_by_one(rig, (40.0, 41.0))
        assert rig.state() == 'WAITING_FOR_SCALE'
        assert len(robot_transforms(rig)) == count
        wheels.tell(0.5, *range(46, 66))
        send_one_by_one(rig, range(46, 65))
        assert rig.diagnostic('scale') == '0.5 (odometry)'


def test_odometry_of_another_clock_is_an_error(monkeypatch):
    monkeypatch.setattr(scale_estimation, '_PATIENCE_S', 0.0)
    odometry = SimpleNamespace(topic='/odom', newest_ns=1000_100_000_000, at=lambda stamp_ns: None)
    estimator = scale_estimation.ScaleEstimator(odometry, None, NodeParams(), 'cam')
    for second in (1, 2):
        assert estimator.add(second * 10**9, np.eye(4)) is None
    assert 'the newest is 998.1 s newer than the newest image' in estimator.trouble
    assert estimator.status == estimator.trouble


@pytest.mark.parametrize(
    ('values', 'words', 'shown'),
    [
        ({}, 'scale is relative', '1 (relative)'),
        ({'scale': 2.5}, 'scale is 2.5 map units', '2.5'),
        (
            {'scale': 2.5, 'scale_source': 'odometry'},
            "(the parameter 'scale', 2.5, is not used)",
            'not begun',
        ),
    ],
)
def test_what_the_scale_is_gets_announced(values, words, shown):
    params = NodeParams.from_values(values)
    assert words in scale_estimation.scale_notice(params)
    odometry = object() if params.scale_source == 'odometry' else None
    counts = Ledger(None).counts()
    session = MapSession(0, params, Admission(params), counts, None, odometry)
    assert session.scale_status == shown


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
