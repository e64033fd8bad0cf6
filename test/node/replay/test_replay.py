"""lingbot_map_replay end to end: real node, real DDS, made pictures, an engine of known poses."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

from bag_writer import odometry, raw_image, tf_message, transform_stamped, write_bag
from evaluate_rig import blank_png, draw_nothing
from fake_engine import DEPTH, FakeEngine, straight, turned
from geometry_msgs.msg import Quaternion, TransformStamped, Vector3
from lingbot_map.evaluation import cli as evaluate
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


@pytest.fixture
def fake_engine(monkeypatch):
    """Return a function that makes the next replay use a FakeEngine with the given options."""

    def use(**options):
        monkeypatch.setattr(results, 'render_map', blank_png)
        make = functools.partial(FakeEngine, **options)
        monkeypatch.setattr(replay, 'LingbotMapNode', functools.partial(LingbotMapNode, make))

    return use


@pytest.fixture
def folder(tmp_path):
    """Return a function that writes pictures and returns their folder."""

    def write(count, size=(56, 42), still=False):
        (tmp_path / 'walk').mkdir()
        for i in range(count):
            random = np.random.default_rng(0 if still else i)
            noise = random.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
            Image.fromarray(noise).save(tmp_path / 'walk' / f'{i:03}.png')
        return tmp_path / 'walk'

    return write


@pytest.fixture
def params(tmp_path):
    """Return a function that writes a parameter file; the scale batch is small by default."""

    def write(**values):
        path = tmp_path / 'params.yaml'
        values = {'num_scale_frames': 2} | values
        path.write_text(yaml.safe_dump({'lingbot_map': {'ros__parameters': values}}))
        return str(path)

    return write


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


def test_the_real_network_maps_a_folder(folder, tmp_path, capsys):
    code, summary, poses = run(folder(10), tmp_path, '--model', 'tiny', '--checkpoint', 'random')
    assert code == 0
    assert (summary['frames_sent'], summary['frames_out'], summary['lost']) == (10, 10, 0)
    assert summary['dropped'] == {}
    np.testing.assert_allclose(poses[:, 0], np.arange(1, 11) / 10, atol=1e-9)
    heard = summary['heard']
    assert (heard['odometry'], heard['transforms'], heard['path_poses']) == (10, 10, 10)
    assert heard['clouds'] == 10 and heard['cloud_points'] > 0
    assert summary['latency_ms']['p50'] <= summary['latency_ms']['p99']
    assert PlyData.read(tmp_path / 'out' / 'map.ply')['vertex'].count > 0
    assert Image.open(tmp_path / 'out' / 'map.png').format == 'PNG'
    assert 'weights are random' in capsys.readouterr().out


def test_lossless_replay_equals_the_evaluation(folder, tmp_path, monkeypatch):
    draw_nothing(monkeypatch)
    monkeypatch.setattr(results, 'render_map', blank_png)
    walk, flags = folder(20), ['--model', 'tiny', '--checkpoint', 'random']
    assert evaluate.main([str(walk), '--out', str(tmp_path / 'evaluated'), *flags]) == 0
    code, _, poses = run(walk, tmp_path, *flags)
    evaluated = np.loadtxt(tmp_path / 'evaluated' / 'walk' / 'trajectory.tum')
    assert code == 0 and evaluated.shape == (20, 8)
    moved = np.abs(evaluated[:, 1:4]).max()
    assert moved > 1e-4
    np.testing.assert_allclose(poses[:, :4], evaluated[:, :4], atol=1e-5 * moved)


def test_an_evaluation_is_never_overwritten(folder, tmp_path, capsys):
    out = tmp_path / 'evaluated'
    out.mkdir()
    (out / 'run.yaml').write_text('{}')
    assert replay.main([str(folder(2)), '--out', str(out)]) == 2
    assert f"'{out}' contains an evaluation: choose another folder" in capsys.readouterr().err
    assert [file.name for file in out.iterdir()] == ['run.yaml']


def test_a_camera_that_stands_still_gets_all_its_poses(folder, params, tmp_path):
    model = ('--model', 'tiny', '--checkpoint', 'random')
    settings = params(motion_gate=True)  # for the node alone
    code, summary, poses = run(folder(5, still=True), tmp_path, '--params', settings, *model)
    assert code == 0 and summary['dropped'] == {}
    assert len(poses) == summary['heard']['clouds'] == 5  # keyframes, all of them


def test_trajectory_is_the_optical_frame_in_the_map(folder, params, tmp_path, fake_engine):
    fake_engine()
    code, summary, poses = run(folder(12), tmp_path, '--params', params())
    assert code == 0 and summary['frames_out'] == 12
    np.testing.assert_allclose(poses[:, 1:4], np.outer(np.arange(12), (1, 0, 0)), atol=1e-6)
    np.testing.assert_allclose(poses[:, 4:] * np.sign(poses[:, 5:6]), [TURN_XYZW] * 12, atol=1e-6)


@pytest.fixture
def mount():
    """Publish on /tf_static, from a process of its own as it were, where the camera is mounted."""
    context = rclpy.Context()
    rclpy.init(context=context)
    node = rclpy.create_node('robot_state_publisher', context=context)
    where = TransformStamped(child_frame_id='camera_optical_frame')
    where.header.frame_id = 'base_link'
    where.transform.translation = Vector3(x=0.3, y=0.0, z=1.0)
    x, y, z, w = TURN_XYZW
    where.transform.rotation = Quaternion(x=x, y=y, z=z, w=w)
    StaticTransformBroadcaster(node).sendTransform(where)
    yield node
    node.destroy_node()
    rclpy.shutdown(context=context)


def test_trajectory_is_the_cameras_also_if_odometry_is_the_robots(
    folder, params, tmp_path, fake_engine, mount
):
    def wait_for_listeners(_):
        while mount.count_subscribers('/tf_static') < 2:  # node and player
            time.sleep(0.01)
        time.sleep(0.05)

    fake_engine(before_push=wait_for_listeners)
    options = params(tf_mode='map_to_base', scale=2.0, num_scale_frames=4)
    code, summary, poses = run(folder(12), tmp_path, '--params', options)
    assert code == 0 and summary['frames_out'] == summary['heard']['transforms'] == 12
    expected = np.outer(np.arange(12), (2, 0, 0)) + (0.3, 0, 1.0)
    np.testing.assert_allclose(poses[:, 1:4], expected, atol=1e-6)
    np.testing.assert_allclose(poses[:, 4:] * np.sign(poses[:, 5:6]), [TURN_XYZW] * 12, atol=1e-6)


def test_a_scale_batch_that_is_not_full_is_flushed(folder, params, tmp_path, fake_engine):
    fake_engine()
    code, summary, poses = run(folder(5), tmp_path, '--params', params(num_scale_frames=8))
    assert (code, summary['frames_out'], len(poses)) == (0, 5, 5)


def test_the_map_holds_what_the_depth_says(folder, params, tmp_path, fake_engine):
    fake_engine()
    run(folder(3), tmp_path, '--params', params(scale=2.0))
    vertex = PlyData.read(tmp_path / 'out' / 'map.ply')['vertex']
    depths = np.unique(np.round(vertex['x'], 3))
    np.testing.assert_allclose(depths, 2.0 * (DEPTH + np.arange(3)), atol=1e-3)
    assert set(vertex['red']) == set(vertex['green']) == set(vertex['blue']) == {128}


def test_lossless_never_has_more_than_one_image_waiting(
    folder, params, tmp_path, fake_engine, monkeypatch
):
    sent, sent_at_push = [], {}
    send = Player.send
    monkeypatch.setattr(Player, 'send', lambda *a: (sent.append(1), send(*a)))

    def before_push(n):
        time.sleep(0.03)  # time enough for a player that does not wait
        sent_at_push[n] = len(sent)

    fake_engine(before_push=before_push)
    code, summary, _ = run(folder(12), tmp_path, '--params', params())
    assert (code, summary['frames_out'], len(sent_at_push)) == (0, 12, 12)
    assert all(count <= n + replay.IN_FLIGHT for n, count in sent_at_push.items())


def test_real_time_lets_the_newest_win_and_accounts_for_all(folder, params, tmp_path, fake_engine):
    fake_engine(before_push=lambda n: time.sleep(0.05))
    code, summary, poses = run(folder(30), tmp_path, '--params', params(), '--rate', '10')
    superseded = summary['dropped']['superseded']
    assert code == 0 and summary['lost'] == 0 and superseded > 0
    assert summary['frames_sent'] == 30
    assert summary['frames_out'] + sum(summary['dropped'].values()) == 30
    assert len(poses) == summary['frames_out']
    assert poses[-1, 0] == pytest.approx(3.0)  # the newest image is never the one to go


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


def test_real_time_has_a_clock(folder, params, tmp_path, fake_engine, clock_times):
    fake_engine()
    arguments = ['--params', params(), '--rate', '2', '--ros-args', '-p', 'use_sim_time:=true']
    code, summary, _ = run(folder(20), tmp_path, *arguments)
    assert code == 0 and summary['latency_ms']['p50'] > 0
    assert clock_times == sorted(clock_times) and len(clock_times) > 1  # few on a busy machine
    assert clock_times[0] >= 0.1 and clock_times[-1] >= 2.0


def test_real_time_begins_when_the_node_is_warm(
    folder, params, tmp_path, fake_engine, monkeypatch
):
    sent, sent_when_warm = [], []
    send, warm_up = Player.send, FakeEngine.warm_up
    monkeypatch.setattr(Player, 'send', lambda *a: (sent.append(1), send(*a)))

    def slow_warm_up(engine, height, width):
        time.sleep(0.2)  # time enough for the second image of a player that does not wait
        warm_up(engine, height, width)
        sent_when_warm.append(len(sent))

    monkeypatch.setattr(FakeEngine, 'warm_up', slow_warm_up)
    fake_engine()
    run(folder(4, size=(56, 84)), tmp_path, '--params', params(), '--rate', '10')
    assert sent_when_warm == [0, 1]  # once while loading, once for the size of the images


def test_a_lost_image_is_counted_and_ends_in_1(folder, params, tmp_path, fake_engine, capsys):
    def before_push(n):
        if n == 9:
            raise RuntimeError('out of luck')

    fake_engine(before_push=before_push)
    code, summary, poses = run(folder(12), tmp_path, '--params', params())
    assert code == 1
    assert summary['dropped'] == {'worker_error': 1} and summary['lost'] == 1
    assert len(poses) == 11 and 0.9 not in poses[:, 0].round(6)
    assert '12 images sent, 11 poses, 1 lost, 1 dropped (worker_error)' in capsys.readouterr().out


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


def test_a_bag_is_compared_with_its_ground_truth(params, tmp_path, fake_engine, capsys):
    fake_engine(pose=curved)
    code, summary, poses = run(
        truth_bag(tmp_path / 'bag', truth_offset_ns=10**6), tmp_path, '--params', params()
    )
    assert code == 0
    assert poses[:, 0].tolist() == list(range(50, 59))
    np.testing.assert_allclose(poses[:, 1:4], [curved_in_map(i) for i in range(9)], atol=1e-6)
    assert summary['ate']['rmse'] == pytest.approx(0.0, abs=1e-6)
    assert summary['ate']['scale'] == pytest.approx(3.0) and summary['ate']['count'] == 9
    assert 'ATE after Sim(3) alignment: rmse 0.000 m' in capsys.readouterr().out


def test_a_frame_of_a_tf_topic_is_chosen(params, tmp_path, fake_engine, capsys):
    fake_engine(pose=curved)
    messages = []
    for i in range(9):
        stamp = (50 + i) * SECOND
        messages.append(('/cam', stamp, raw_image(stamp, np.full((42, 56, 3), i, np.uint8))))
        both = [
            transform_stamped(stamp, (1 + size) * curved_in_map(i), child)
            for size, child in enumerate(('hand', 'camera'))
        ]
        messages.append(('/ground_truth', stamp, tf_message(*both)))
    bag = write_bag(tmp_path / 'bag', messages)
    assert run(bag, tmp_path, '--params', params())[0] == 2
    assert 'choose one with --gt-frame: camera, hand' in capsys.readouterr().err
    code, summary, _ = run(bag, tmp_path, '--params', params(), '--gt-frame', 'camera')
    assert code == 0 and summary['ate']['scale'] == pytest.approx(2.0)


def test_pictures_come_raw_whatever_the_robot_sends(folder, params, tmp_path, fake_engine):
    fake_engine()
    code, summary, _ = run(folder(3), tmp_path, '--params', params(image_transport='compressed'))
    assert code == 0 and summary['frames_out'] == 3


def test_a_wrong_path_has_an_error(params, tmp_path, fake_engine):
    fake_engine(pose=straight)
    _, summary, _ = run(truth_bag(tmp_path / 'bag'), tmp_path, '--params', params())
    assert summary['ate']['rmse'] > 0.1


def test_ground_truth_of_another_time_is_said(params, tmp_path, fake_engine, capsys):
    fake_engine(pose=curved)
    bag = truth_bag(tmp_path / 'bag', truth_offset_ns=3600 * SECOND)
    code, summary, _ = run(bag, tmp_path, '--params', params())
    assert code == 0 and summary['ate'] is None
    assert 'another time base' in capsys.readouterr().err


def test_ros_arguments_and_frame_id_reach_the_node(folder, params, tmp_path, fake_engine):
    fake_engine()
    code, summary, _ = run(
        folder(3),
        tmp_path,
        '--params',
        params(),
        '--frame-id',
        'cam7',
        '--ros-args',
        '-r',
        'image:=/front/image',
        '-r',
        '__ns:=/robot',
        '-p',
        'map_frame:=site',
    )
    assert code == 0 and summary['settings']['map_frame'] == 'site'
    assert summary['frames_out'] == summary['heard']['transforms'] == 3


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_what_was_sent(number, folder, params, tmp_path, fake_engine, capsys):
    fake_engine(before_push=lambda n: n == 6 and os.kill(os.getpid(), number))
    code, summary, poses = run(folder(40), tmp_path, '--params', params())
    assert code == 1
    assert 6 <= summary['frames_sent'] == summary['frames_out'] == len(poses) < 40
    assert 'interrupted after' in capsys.readouterr().err


def test_a_damaged_image_finishes_those_before_it(folder, params, tmp_path, fake_engine, capsys):
    walk = folder(9)
    (walk / '006.png').rename(walk / '006.jpg')  # Pillow goes by the content
    Image.open(walk / '006.jpg').save(walk / '006.jpg')
    jpeg = (walk / '006.jpg').read_bytes()
    (walk / '006.jpg').write_bytes(jpeg[: len(jpeg) * 3 // 4])  # its head is whole
    fake_engine()
    code, summary, poses = run(walk, tmp_path, '--params', params())
    assert code == 1
    assert summary['frames_sent'] == summary['frames_out'] == len(poses) == 6
    assert "006.jpg' is not an image or is damaged: finishing the 6" in capsys.readouterr().err


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
    (tmp_path / 'cut').mkdir()
    (tmp_path / 'cut' / 'a.png').write_bytes((tmp_path / 'walk' / '000.png').read_bytes()[:900])
    tiny = ['--model', 'tiny']
    return {
        'missing': ([str(tmp_path / 'nowhere')], 'nowhere.* does not exist'),
        'empty': ([str(tmp_path / 'empty')], 'contains no images'),
        'damaged': ([str(tmp_path / 'cut'), *tiny, '--checkpoint', 'random'], 'a.png.*damaged'),
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
        'checkpoint': ([walk, *tiny, '--checkpoint', 'no.pt'], "'no.pt' is not a file"),
        'topic': ([walk, '--image-topic', '/x'], 'not a bag'),
        'truth': ([walk, '--ground-truth', '/x'], 'not a file, and.*not a bag'),
    }


@pytest.mark.parametrize(
    'name',
    [
        'missing',
        'empty',
        'damaged',
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
