"""lingbot_map_replay end to end: real node, real DDS, made pictures, an engine of known poses."""

from contextlib import redirect_stdout
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

from bag_writer import odometry, raw_image, tf_message, transform_stamped, write_bag
from evaluate_rig import blank_png, draw_nothing
from fake_engine import DEPTH, FakeEngine, turned
from geometry_msgs.msg import Quaternion, TransformStamped, Vector3
from lingbot_map.errors import UserError
from lingbot_map.evaluation import cli as evaluate
from lingbot_map.mapping.points import POINT_DTYPE
from lingbot_map.recordings.pose_files import PoseTrack
from lingbot_map_ros.node import LingbotMapNode
from lingbot_map_ros.replay import cli as replay
from lingbot_map_ros.replay import results
from lingbot_map_ros.replay.player import Player
import numpy as np
from PIL import Image
from plyfile import PlyData
import pytest
import rclpy
from rclpy.executors import SingleThreadedExecutor
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image as ImageMessage
from tf2_ros import StaticTransformBroadcaster
import yaml

SECOND = 10**9
TURN_XYZW = (-0.5, 0.5, -0.5, 0.5)  # of a level camera's optical frame in the map


def use_fake(monkeypatch, **options):
    """Make replays use a FakeEngine with the given options, and draw nothing."""
    monkeypatch.setattr(results, 'render_map', blank_png)
    make = functools.partial(FakeEngine, **options)
    monkeypatch.setattr(replay, 'LingbotMapNode', functools.partial(LingbotMapNode, make))


@pytest.fixture
def fake_engine(monkeypatch):
    """Return a function that makes the next replay use a FakeEngine with the given options."""
    return functools.partial(use_fake, monkeypatch)


@pytest.fixture
def folder(tmp_path):
    """Return a function that writes images, the first `still` of them alike."""

    def write(count, size=(56, 42), still=1):
        (tmp_path / 'walk').mkdir()
        for i in range(count):
            random = np.random.default_rng(max(0, i - still + 1))
            noise = random.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
            Image.fromarray(noise).save(tmp_path / 'walk' / f'{i:03}.png')
        return tmp_path / 'walk'

    return write


def write_params(folder, node='lingbot_map', **values):
    """Write a parameter file with a small scale batch by default; return its path."""
    path = folder / 'params.yaml'
    values = {'num_scale_frames': 2} | values
    path.write_text(yaml.safe_dump({node: {'ros__parameters': values}}))
    return str(path)


@pytest.fixture
def params(tmp_path):
    """Return a function that writes a parameter file."""
    return functools.partial(write_params, tmp_path)


def run(source, tmp_path, *options):
    """Return exit code, summary (None: none written) and poses (stamp, xyz, xyzw)."""
    out = tmp_path / 'out'
    code = replay.main([str(source), '--out', str(out), *options])
    if not out.exists():
        return code, None, None
    assert sorted(f.name for f in out.iterdir()) == [
        'map.ply',
        'map.png',
        'summary.json',
        'trajectory.tum',
    ]
    rows = np.loadtxt(out / 'trajectory.tum', ndmin=2).reshape(-1, 8)
    return code, json.loads((out / 'summary.json').read_text()), rows


def test_the_real_network_maps_a_folder_as_the_evaluation_does(
    folder, params, tmp_path, monkeypatch, capsys
):
    draw_nothing(monkeypatch)
    walk, flags = folder(20, still=5), ['--model', 'tiny', '--checkpoint', 'random']
    assert evaluate.main([str(walk), '--out', str(tmp_path / 'evaluated'), *flags]) == 0
    capsys.readouterr()
    settings = params(num_scale_frames=8, motion_gate=True)  # the gate is for the node alone
    code, summary, poses = run(walk, tmp_path, '--params', settings, *flags)
    assert code == 0
    assert (summary['frames_sent'], summary['frames_out'], summary['lost']) == (20, 20, 0)
    assert summary['dropped'] == {}
    np.testing.assert_allclose(poses[:, 0], np.arange(1, 21) / 10, atol=1e-9)
    heard = summary['heard']
    assert (heard['odometry'], heard['transforms'], heard['path_poses']) == (20, 20, 20)
    assert heard['clouds'] == 20 and heard['cloud_points'] > 0  # keyframes, all of them
    assert summary['latency_ms']['p50'] <= summary['latency_ms']['p99']
    assert PlyData.read(tmp_path / 'out' / 'map.ply')['vertex'].count > 0
    assert Image.open(tmp_path / 'out' / 'map.png').format == 'PNG'
    assert 'weights are random' in capsys.readouterr().out
    evaluated = np.loadtxt(tmp_path / 'evaluated' / 'walk' / 'trajectory.tum')
    assert evaluated.shape == (20, 8)
    moved = np.abs(evaluated[:, 1:4]).max()
    assert moved > 1e-4
    np.testing.assert_allclose(poses[:, :4], evaluated[:, :4], atol=1e-5 * moved)


def test_images_of_a_folder_have_a_frame_id(folder):
    job = replay._check(replay._parser().parse_args([str(folder(1))]))
    assert job.source.frame_id == 'camera_optical_frame'


def test_an_evaluation_is_never_overwritten(folder, tmp_path, capsys):
    out = tmp_path / 'evaluated'
    out.mkdir()
    (out / 'run.yaml').write_text('{}')
    assert replay.main([str(folder(2)), '--out', str(out)]) == 2
    assert f"'{out}' contains an evaluation: choose another folder" in capsys.readouterr().err
    assert [file.name for file in out.iterdir()] == ['run.yaml']


@pytest.fixture
def mount():
    """Publish on /tf_static, from a process of its own as it were, where the camera is mounted."""
    context = rclpy.Context()
    rclpy.init(context=context)
    node = rclpy.create_node('robot_state_publisher', context=context)
    where = TransformStamped(child_frame_id='cam7')
    where.header.frame_id = 'base_link'
    where.transform.translation = Vector3(x=0.3, y=0.0, z=1.0)
    x, y, z, w = TURN_XYZW
    where.transform.rotation = Quaternion(x=x, y=y, z=z, w=w)
    StaticTransformBroadcaster(node).sendTransform(where)
    yield node
    node.destroy_node()
    rclpy.shutdown(context=context)


def test_ros_arguments_reach_the_node_and_the_trajectory_is_the_cameras_if_odometry_is_the_robots(
    folder, params, tmp_path, fake_engine, mount
):
    def wait_for_listeners(_):
        while mount.count_subscribers('/tf_static') < 2:  # node and player
            time.sleep(0.01)
        time.sleep(0.05)

    fake_engine(before_push=wait_for_listeners)
    of_node = params('/**', tf_mode='map_to_base', scale=2.0, num_scale_frames=16)
    ros = ['-r', 'image:=/front/image', '-r', '__ns:=/robot', '-p', 'map_frame:=site']
    code, summary, poses = run(
        folder(12), tmp_path, '--params', of_node, '--frame-id', 'cam7', '--ros-args', *ros
    )
    assert code == 0 and summary['settings']['map_frame'] == 'site'
    assert summary['settings']['num_scale_frames'] == 16  # the batch is not full: it is flushed
    assert summary['frames_out'] == summary['heard']['transforms'] == len(poses) == 12
    expected = np.outer(np.arange(12), (2, 0, 0)) + (0.3, 0, 1.0)
    np.testing.assert_allclose(poses[:, 1:4], expected, atol=1e-6)
    np.testing.assert_allclose(poses[:, 4:] * np.sign(poses[:, 5:6]), [TURN_XYZW] * 12, atol=1e-6)


@pytest.fixture
def clock_times():
    """Collect the times [s] of /clock from outside, while the test runs."""
    context = rclpy.Context()
    context.init()
    node = rclpy.create_node('clock_listener', context=context)
    times = []
    node.create_subscription(
        Clock, '/clock', lambda m: times.append(m.clock.sec + 1e-9 * m.clock.nanosec), 100
    )
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(node)
    thread = threading.Thread(target=executor.spin)
    thread.start()
    yield times
    executor.shutdown()
    thread.join()
    context.shutdown()


def test_real_time_begins_warm_has_a_clock_and_lets_the_newest_win(
    folder, params, tmp_path, fake_engine, clock_times, monkeypatch
):
    sent, sent_when_warm = [], []
    send, warm_up = Player.send, FakeEngine.warm_up
    monkeypatch.setattr(Player, 'send', lambda *a: (sent.append(1), send(*a)))

    def slow_warm_up(engine, height, width):
        time.sleep(0.2)  # time enough for the second image of a player that does not wait
        warm_up(engine, height, width)
        sent_when_warm.append(len(sent))

    monkeypatch.setattr(FakeEngine, 'warm_up', slow_warm_up)
    fake_engine(before_push=lambda n: time.sleep(0.05))
    arguments = ['--params', params(), '--rate', '5', '--ros-args', '-p', 'use_sim_time:=true']
    code, summary, poses = run(folder(30, size=(56, 84)), tmp_path, *arguments)
    assert sent_when_warm == [0, 1]  # once while loading, once for the size of the images
    superseded = summary['dropped']['superseded']
    assert code == 0 and summary['lost'] == 0 and superseded > 0
    assert summary['frames_sent'] == 30
    assert summary['frames_out'] + sum(summary['dropped'].values()) == 30
    assert len(poses) == summary['frames_out']
    assert poses[-1, 0] == pytest.approx(3.0)  # the newest image is never the one to go
    assert summary['latency_ms']['p50'] > 0
    assert clock_times == sorted(clock_times) and len(clock_times) > 1  # few on a busy machine
    assert clock_times[0] >= 0.1 and clock_times[-1] >= 2.0


def stand_in(count, missing=(), **node_counts):
    """Return what a player knows that has sent `count` images a second apart."""
    sent = {i * SECOND: float(i) for i in range(count)}
    received = {s: at_s + 0.01 for i, (s, at_s) in enumerate(sent.items()) if i not in missing}
    T = np.tile(np.eye(4), (len(received), 1, 1))
    T[:, 0, 3] = np.array(list(received)) / SECOND
    return SimpleNamespace(
        sent=sent,
        received=received,
        transforms=set(received),
        clouds=1,
        cloud_points=2,
        path_poses=3,
        node_counts=node_counts,
        trajectory=lambda: (list(received), T),
    )


def summarize(player, queue='lossless', skipped=0):
    return results.summarize(player, SimpleNamespace(skipped=skipped), None, {'queue': queue})


def test_a_lost_image_is_counted_with_its_reason():
    counts = {'images_in': 12, 'dropped.worker_error': 1, 'dropped.reset': 0}
    summary = summarize(stand_in(12, missing=[9], **counts), skipped=3)
    assert summary.dropped == {'worker_error': 1} and summary.lost == 1
    assert (summary.frames_sent, summary.frames_out, summary.skipped) == (12, 11, 3)
    assert summary.latency_ms == {'p50': 10.0, 'p95': 10.0, 'p99': 10.0}
    assert summary.rate_hz == 1.0  # 11 poses in 11.01 s
    assert summary.line() == (
        '12 images sent, 11 poses, 1 lost, 1 dropped (worker_error), '
        '3 skipped (their stamps do not increase), 1.0 Hz, latency p50 10 ms, p99 10 ms'
    )


def test_in_real_time_only_images_that_should_have_a_pose_are_lost():
    counts = {'images_in': 10, 'dropped.superseded': 3, 'dropped.bad_image': 1}
    player = stand_in(12, missing=range(3, 9), **counts)
    summary = summarize(player, 'latest')
    assert summary.dropped == {'superseded': 3, 'bad_image': 1, 'on_the_way': 2}
    assert summary.lost == 1
    assert summarize(player).lost == 6  # lossless: superseded images as well
    nothing = summarize(stand_in(2, missing=[0, 1], images_in=2))
    assert (nothing.latency_ms, nothing.rate_hz, nothing.lost) == ({}, 0.0, 2)


@pytest.mark.parametrize(
    ('missing', 'interrupted', 'code'), [((), False, 0), ([1], False, 1), ((), True, 1)]
)
def test_the_exit_code_says_whether_every_image_has_a_pose(
    missing, interrupted, code, tmp_path, monkeypatch
):
    monkeypatch.setattr(results, 'render_map', blank_png)
    job = replay.ReplayJob(SimpleNamespace(skipped=0), 'walk', None, tmp_path / 'out', 0.0)
    settings = {'queue': 'lossless', 'checkpoint': ''}
    player, points = stand_in(4, missing), np.empty(0, POINT_DTYPE)
    assert replay._conclude(job, player, points, settings, interrupted) == code


def curved(index):
    """Return a camera that runs along an arc, seen from the same turned world as `straight`."""
    T = np.eye(4)
    T[:3, 3] = np.sin(0.3 * index), 0.2 * np.cos(index), 1 - np.cos(0.3 * index)
    return turned() @ T


def curved_in_map(index):
    """Return `curved` in map axes, relative to the first camera: x forward, y left, z up."""
    x, y, z = (np.linalg.inv(curved(0)) @ curved(index))[:3, 3]
    return np.array([z, -x, -y])


def truth_bag(path, truth_offset_ns=0):
    messages = []
    for i in range(9):
        stamp = (50 + i) * SECOND
        messages.append(('/cam', stamp, raw_image(stamp, np.full((42, 56, 3), i, np.uint8))))
        xyz = 3.0 * curved_in_map(i)[[1, 2, 0]] + (7, 8, 9)  # another scale, other axes
        messages.append(('/ground_truth', stamp, odometry(stamp + truth_offset_ns, xyz)))
    return write_bag(path, messages, 'mcap')


def true_track(position, offset_ns=0):
    """Return ground truth with the stamps of `stand_in`."""
    stamps_ns = np.arange(9) * SECOND
    T = np.tile(np.eye(4), (9, 1, 1))
    T[:, :3, 3] = [position(i) for i in range(9)]
    return PoseTrack('/ground_truth', stamps_ns + offset_ns, T)


@pytest.fixture(scope='module')
def bag_replay(tmp_path_factory):
    """Replay a bag with ground truth once, with map units of twice the network's."""
    folder = tmp_path_factory.mktemp('bag_replay')
    bag = truth_bag(folder / 'bag', truth_offset_ns=10**6)
    sent, sent_at_push, send = [], {}, Player.send

    def before_push(n):
        time.sleep(0.03)  # time enough for a player that does not wait
        sent_at_push[n] = len(sent)

    of_node = write_params(folder, scale=2.0, image_transport='compressed')  # it gets raw images
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(Player, 'send', lambda *a: (sent.append(1), send(*a)))
        use_fake(patch, pose=curved, before_push=before_push)
        code, summary, poses = run(bag, folder, '--params', of_node)
    assert code == 0 and summary['frames_out'] == 9
    return SimpleNamespace(
        summary=summary,
        poses=poses,
        printed=printed.getvalue(),
        map=PlyData.read(folder / 'out' / 'map.ply')['vertex'],
        sent_at_push=sent_at_push,
    )


def test_trajectory_is_the_optical_frame_in_the_map(bag_replay):
    poses = bag_replay.poses
    assert poses[:, 0].tolist() == list(range(50, 59))
    np.testing.assert_allclose(poses[:, 1:4], [2 * curved_in_map(i) for i in range(9)], atol=1e-6)
    np.testing.assert_allclose(poses[:, 4:] * np.sign(poses[:, 5:6]), [TURN_XYZW] * 9, atol=1e-6)


def test_the_map_holds_what_the_depth_says(bag_replay):
    vertex = bag_replay.map
    depths = np.unique(np.round(vertex['x'], 3))
    expected = sorted(2.0 * (DEPTH + curved_in_map(i)[0]) for i in range(9))
    np.testing.assert_allclose(depths, expected, atol=1e-3)
    assert set(vertex['red']) == set(vertex['green']) == set(vertex['blue']) == {128}


def test_lossless_never_has_more_than_one_image_waiting(bag_replay):
    assert len(bag_replay.sent_at_push) == 9
    assert all(count <= n + replay.IN_FLIGHT for n, count in bag_replay.sent_at_push.items())


def test_a_bag_is_compared_with_its_ground_truth(bag_replay):
    ate = bag_replay.summary['ate']
    assert ate['rmse'] == pytest.approx(0.0, abs=1e-6)
    assert ate['scale'] == pytest.approx(1.5) and ate['count'] == 9
    assert 'ATE after Sim(3) alignment: rmse 0.000 m' in bag_replay.printed


def test_a_frame_of_a_tf_topic_is_chosen(tmp_path):
    messages = []
    for i in range(9):
        stamp = (50 + i) * SECOND
        messages.append(('/cam', stamp, raw_image(stamp, np.full((42, 56, 3), i, np.uint8))))
        both = [
            transform_stamped(stamp, (1 + size) * curved_in_map(i), child)
            for size, child in enumerate(('hand', 'camera'))
        ]
        messages.append(('/ground_truth', stamp, tf_message(*both)))
    arguments = [str(write_bag(tmp_path / 'bag', messages)), '--out', str(tmp_path / 'out')]
    with pytest.raises(UserError, match='choose one with --gt-frame: camera, hand'):
        replay._check(replay._parser().parse_args(arguments))
    job = replay._check(replay._parser().parse_args([*arguments, '--gt-frame', 'camera']))
    stamps_ns = [(50 + i) * SECOND for i in range(9)]
    T = true_track(curved_in_map).T
    assert results.compare(stamps_ns, T, job.truth).values()['scale'] == pytest.approx(2.0)


def test_poses_from_before_the_scale_was_found_are_those_that_the_node_has_rescaled():
    row, rescaled = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0], np.eye(4)
    rescaled[0, 3] = 0.25
    kept = SimpleNamespace(export=lambda: ([SECOND], [rescaled]))
    outputs = SimpleNamespace(current=SimpleNamespace(trajectory=kept))
    player = SimpleNamespace(
        _rows={2 * SECOND: row, SECOND: row},
        _bodies={SECOND: 'cam', 2 * SECOND: 'cam'},
        _extrinsics=lambda body: np.eye(4),
        _is_rescaled=True,
        _target=SimpleNamespace(pipeline=SimpleNamespace(outputs=outputs)),
    )
    stamps_ns, T = Player.trajectory(player)
    assert stamps_ns == [SECOND, 2 * SECOND]
    assert T[:, 0, 3].tolist() == [0.25, 1.0]


def test_a_wrong_path_has_an_error():
    truth = true_track(lambda i: 3.0 * curved_in_map(i))
    compared = results.compare(*stand_in(9).trajectory(), truth)
    assert compared.values()['rmse'] > 0.1


def test_ground_truth_of_another_time_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, 'render_map', blank_png)
    truth = true_track(curved_in_map, offset_ns=3600 * SECOND)
    job = replay.ReplayJob(SimpleNamespace(skipped=0), 'bag', truth, tmp_path / 'out', 0.0)
    settings = {'queue': 'lossless', 'checkpoint': ''}
    points = np.empty(0, POINT_DTYPE)
    assert replay._conclude(job, stand_in(9), points, settings, interrupted=False) == 0
    assert json.loads((tmp_path / 'out' / 'summary.json').read_text())['ate'] is None
    told = capsys.readouterr().err
    assert 'no comparison with /ground_truth: ' in told and 'another time base' in told


def test_a_signal_finishes_what_was_sent(folder, params, tmp_path, fake_engine, capsys):
    fake_engine(before_push=lambda n: n == 6 and os.kill(os.getpid(), signal.SIGTERM))
    code, summary, poses = run(folder(40), tmp_path, '--params', params())
    assert code == 1
    assert 6 <= summary['frames_sent'] == summary['frames_out'] == len(poses) < 40
    assert 'interrupted after' in capsys.readouterr().err


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_image_writes_nothing(number, tmp_path, monkeypatch, capsys):
    def interrupt(args):
        os.kill(os.getpid(), number)
        time.sleep(10)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replay, '_check', interrupt)
    assert replay.main(['walk']) == 1
    assert capsys.readouterr().err == f'{replay.PROGRAM}: interrupted, nothing was written\n'
    assert list(tmp_path.iterdir()) == []


def test_a_lost_image_and_those_before_a_damaged_one_are_accounted_for(
    folder, params, tmp_path, fake_engine, capsys
):
    def before_push(n):
        if n == 3:
            raise RuntimeError('out of luck')

    walk = folder(9)
    (walk / '006.png').rename(walk / '006.jpg')  # Pillow goes by the content
    Image.open(walk / '006.jpg').save(walk / '006.jpg')
    jpeg = (walk / '006.jpg').read_bytes()
    (walk / '006.jpg').write_bytes(jpeg[: len(jpeg) * 3 // 4])  # its head is whole
    fake_engine(before_push=before_push)
    code, summary, poses = run(walk, tmp_path, '--params', params())
    assert code == 1
    assert summary['dropped'] == {'worker_error': 1} and summary['lost'] == 1
    assert summary['frames_sent'] == 6
    assert poses[:, 0].round(6).tolist() == [0.1, 0.2, 0.4, 0.5, 0.6]
    told = capsys.readouterr()
    assert "006.jpg' is not an image or is damaged: finishing the 6" in told.err
    assert '6 images sent, 5 poses, 1 lost, 1 dropped (worker_error)' in told.out


def test_another_camera_on_the_topic_is_refused(folder, tmp_path, monkeypatch, capsys):
    context = rclpy.Context()
    context.init()
    intruder = rclpy.create_node('intruder', context=context)
    intruder.create_publisher(ImageMessage, '/image', 1)
    nodes = []

    def load_once_discovered(engine_params):
        while nodes[0].count_publishers('/image') == 0:
            time.sleep(0.02)
        return FakeEngine(engine_params)

    def make_node(**options):
        nodes.append(LingbotMapNode(load_once_discovered, **options))
        return nodes[0]

    monkeypatch.setattr(replay, 'LingbotMapNode', make_node)
    try:
        code, summary, _ = run(folder(3), tmp_path)
    finally:
        context.shutdown()
    assert code == 1 and summary is None
    assert 'another process publishes on /image' in capsys.readouterr().err


def bad_inputs(tmp_path, folder):
    """Return name -> (arguments, what the line must say)."""
    walk = str(folder(2))
    (tmp_path / 'taken').write_text('a file')
    (tmp_path / 'bad.yaml').write_text('{ not: [yaml')
    (tmp_path / 'off.yaml').write_text(
        yaml.safe_dump({'/**': {'ros__parameters': {'points.stride': 0}}})
    )
    (tmp_path / 'empty').mkdir()
    return {
        'missing': ([str(tmp_path / 'nowhere')], 'nowhere.* does not exist'),
        'empty': ([str(tmp_path / 'empty')], 'contains no images'),
        'rate': ([walk, '--rate', '-1'], '--rate is -1.0'),
        'rate nan': ([walk, '--rate', 'nan'], '--rate is nan'),
        'rate too small': ([walk, '--rate', '1e-300'], '--rate is 1e-300'),
        'rate too large': ([walk, '--rate', '1e300'], '--rate is 1e.300'),
        'ROS arguments': ([walk, '--ros-args', '-p', 'scale'], "'-p scale'"),
        'params file': ([walk, '--params', 'none.yaml'], "'none.yaml' is not a file"),
        'params text': ([walk, '--params', str(tmp_path / 'bad.yaml')], 'bad.yaml'),
        'params value': ([walk, '--params', str(tmp_path / 'off.yaml')], 'points.stride'),
        'out': ([walk, '--out', str(tmp_path / 'taken')], 'taken.* is not a writable folder'),
        'out of no disk': ([walk, '--out', '/proc/results'], "'/proc' is not a writable folder"),
        'checkpoint': (
            [walk, '--model', 'tiny', '--checkpoint', 'no.pt'],
            "'no.pt' is not a file",
        ),
        'topic': ([walk, '--image-topic', '/x'], 'not a bag'),
        'truth': ([walk, '--ground-truth', '/x'], 'not a file, and.*not a bag'),
    }


@pytest.mark.parametrize(
    'name',
    [
        'missing',
        'empty',
        'rate',
        'rate nan',
        'rate too small',
        'rate too large',
        'ROS arguments',
        'params file',
        'params text',
        'params value',
        'out',
        'out of no disk',
        'checkpoint',
        'topic',
        'truth',
    ],
)
def test_bad_input_is_one_line_and_2(name, folder, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, words = bad_inputs(tmp_path, folder)[name]
    check_one_line_and_2(arguments, words, tmp_path, capfd)


def test_a_recording_that_begins_damaged_is_one_line_and_2(folder, tmp_path, capfd, monkeypatch):
    image = folder(1) / '000.png'
    image.write_bytes(image.read_bytes()[:900])
    monkeypatch.chdir(tmp_path)
    player = SimpleNamespace(sent={}, wait_for_processed=lambda in_flight: None)
    monkeypatch.setattr(replay, '_replay', lambda job, args: replay._play(player, job))
    check_one_line_and_2([str(tmp_path / 'walk')], '000.png.*damaged', tmp_path, capfd)


def check_one_line_and_2(arguments, words, tmp_path, capfd):
    before = sorted(tmp_path.iterdir())
    assert replay.main(arguments) == 2
    assert sorted(tmp_path.iterdir()) == before  # no results/
    captured = capfd.readouterr()
    not_ours = ('[INFO]', '[WARN]', '[rcl]', 'replay:  ')  # the last one is the progress bar
    lines = [
        line
        for line in captured.err.replace('\r', '\n').splitlines()
        if line and not any(word in line for word in not_ours)
    ]
    assert captured.out == '' and len(lines) == 1, lines
    assert 'Traceback' not in captured.err
    assert re.search(words, lines[0])


def test_the_program_ends_with_its_code_and_no_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, '-m', 'lingbot_map_ros.replay.cli', str(tmp_path / 'nowhere')],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stdout == ''
    assert done.stderr == f"lingbot_map_replay: '{tmp_path / 'nowhere'}' does not exist\n"
