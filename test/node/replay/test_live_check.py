"""Live against lossless: /clock in real time, and two trajectories of one recording."""

import functools
import json
import threading
import time

from fake_engine import FakeEngine, straight, turned
from lingbot_map.evaluation import cli as evaluate
from lingbot_map.evaluation.metrics import MetricsError
from lingbot_map.mapping.export import write_tum
from lingbot_map_ros.node import LingbotMapNode
from lingbot_map_ros.replay import cli as replay
from lingbot_map_ros.replay.live_check import compare_with_lossless
import numpy as np
from PIL import Image
import pytest
import rclpy
from rclpy.executors import SingleThreadedExecutor
from rosgraph_msgs.msg import Clock

SECOND = 10**9


@pytest.fixture
def walk(tmp_path):
    (tmp_path / 'walk').mkdir()
    for i in range(20):
        noise = np.random.default_rng(i).integers(0, 256, (42, 56, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / 'walk' / f'{i:03}.png')
    return tmp_path / 'walk'


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


def use_fake(monkeypatch, **options):
    make = functools.partial(FakeEngine, **options)
    monkeypatch.setattr(replay, 'LingbotMapNode', functools.partial(LingbotMapNode, make))


def run(source, out, *options):
    code = replay.main([str(source), '--out', str(out), *options])
    return code, json.loads((out / 'summary.json').read_text())


def line_of_poses(count, step=1.0):
    """Return what FakeEngine's straight motion is in the map: along x, turned as a camera is."""
    first = np.eye(4)
    first[:3, :3] = [[0, 0, 1], [-1, 0, 0], [0, -1, 0]]
    poses = np.tile(first, (count, 1, 1))
    poses[:, 0, 3] = step * np.arange(count)
    return poses


def test_lossless_replay_equals_the_evaluation(walk, tmp_path, capsys):
    flags = ['--model', 'tiny', '--checkpoint', 'random']
    assert evaluate.main([str(walk), '--out', str(tmp_path / 'evaluated'), *flags]) == 0
    code, summary = run(
        walk, tmp_path / 'out', *flags, '--compare', str(tmp_path / 'evaluated' / 'walk')
    )
    check = summary['live_check']
    assert code == 0
    assert check['lossless_poses'] == check['common_poses'] == 20
    assert check['path_length'] > 1e-3
    assert check['ate']['max'] < 1e-6 * check['path_length']
    assert 'against lossless: 20 of 20 poses' in capsys.readouterr().out


def test_real_time_has_a_clock_and_is_compared(walk, tmp_path, clock_times, monkeypatch):
    use_fake(monkeypatch, before_push=lambda n: time.sleep(0.06))
    write_tum(
        tmp_path / 'trajectory.tum', [i * SECOND // 10 for i in range(1, 21)], line_of_poses(20)
    )
    code, summary = run(
        walk, tmp_path / 'out', '--rate', '2', '--compare', str(tmp_path),
        '--ros-args', '-p', 'num_scale_frames:=1', '-p', 'use_sim_time:=true',
    )  # fmt: skip
    dropped = sum(summary['dropped'].values())
    assert code == 0 and summary['dropped']['superseded'] > 0
    check = summary['live_check']
    assert (check['lossless_poses'], check['common_poses']) == (20, 20 - dropped)
    # the engine counts images, so each one dropped leaves the live path one step behind
    assert check['ate']['max'] == pytest.approx(dropped, abs=1e-6)
    assert clock_times == sorted(clock_times) and len(clock_times) > 10
    assert clock_times[0] >= 0.1 and clock_times[-1] >= 2.0
    assert summary['latency_ms']['p50'] > 0


def test_figures_of_two_known_paths(tmp_path):
    stamps = [i * SECOND for i in range(1, 6)]
    write_tum(tmp_path / 'trajectory.tum', stamps, line_of_poses(5, 2.0))
    live = line_of_poses(5, 2.5)[[0, 1, 3, 4]]  # the third image was dropped
    check = compare_with_lossless([stamps[i] for i in (0, 1, 3, 4)], live, tmp_path)
    assert (check.lossless_poses, check.common_poses, check.path_length) == (5, 4, 8.0)
    assert check.ate.max == pytest.approx(2.0)  # 4 steps of half a unit
    assert check.ate_sim3.rmse == pytest.approx(0.0, abs=1e-9)


def test_another_recording_is_said(tmp_path):
    write_tum(tmp_path / 'trajectory.tum', [100 * SECOND], line_of_poses(1))
    with pytest.raises(MetricsError, match='images 1.000 to 2.000 s, poses 100.000'):
        compare_with_lossless([SECOND, 2 * SECOND], line_of_poses(2), tmp_path)


def test_a_comparison_that_is_impossible_ends_in_1(walk, tmp_path, monkeypatch, capsys):
    use_fake(monkeypatch)
    write_tum(tmp_path / 'trajectory.tum', [100 * SECOND], line_of_poses(1))
    code, summary = run(walk, tmp_path / 'out', '--compare', str(tmp_path))
    assert code == 1 and summary['live_check'] is None and summary['frames_out'] == 20
    assert 'another time base' in capsys.readouterr().err


def test_a_folder_without_a_trajectory_is_refused(walk, tmp_path, capsys):
    arguments = [str(walk), '--out', str(tmp_path / 'out'), '--compare', str(walk)]
    assert replay.main(arguments) == 2
    assert 'holds no trajectory.tum' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_an_evaluation_is_never_overwritten(walk, tmp_path, capsys):
    (tmp_path / 'run.yaml').write_text('{}')
    (tmp_path / 'trajectory.tum').write_text('')
    assert replay.main([str(walk), '--out', str(tmp_path), '--compare', str(tmp_path)]) == 2
    assert f"'{tmp_path}' contains an evaluation: choose another folder" in capsys.readouterr().err
    assert (tmp_path / 'trajectory.tum').read_text() == ''


def test_line_of_poses_is_what_the_fake_engine_does():
    start = np.linalg.inv(turned())
    for i, pose in enumerate(line_of_poses(3)):
        np.testing.assert_allclose(pose[0, 3], (start @ straight(i))[2, 3], atol=1e-12)
