"""lingbot_map_evaluate end to end: files, figures, several recordings, resuming, repeating."""

import csv
from html.parser import HTMLParser
import json
import os
import signal
import subprocess
import sys

from evaluate_rig import (
    camera_info,
    curved,
    draw_nothing,
    FILES,
    FIRST_S,
    images,
    metrics,
    record,
    run,
    SECOND,
    truth,
    truth_bag,
    use_fake,
)  # fmt: skip
from lingbot_map.evaluation import cli as evaluate
import numpy as np
from PIL import Image
from plyfile import PlyData
import pytest
import yaml

from bag_writer import write_bag  # isort: skip


@pytest.fixture
def engines(monkeypatch):
    """Let evaluations use an engine that moves along `curved`; return those that were made."""
    made = []
    use_fake(monkeypatch, made, pose=curved)
    return made


class Page(HTMLParser):
    """Collects what a page refers to, its pictures and its text."""

    def __init__(self, text):
        super().__init__()
        self.references, self.text = [], ''
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.references += [value for name, value in attrs if name in ('src', 'href')]

    def handle_data(self, data):
        self.text += data


def test_a_bag_with_ground_truth(tmp_path, monkeypatch, capsys):
    use_fake(monkeypatch, [], draws=True, pose=curved)
    bag = truth_bag(tmp_path / 'walk')
    assert run(tmp_path / 'out', bag) == 0
    folder = tmp_path / 'out' / 'walk'
    assert {f.name for f in folder.iterdir()} == FILES
    assert [f.name for f in (tmp_path / 'out').iterdir()] == ['walk']
    found = metrics(folder)
    assert (found['images'], found['poses'], found['coverage_percent']) == (9, 9, 100.0)
    assert found['scale'] == pytest.approx(3.0)
    assert found['ate']['sim3']['rmse'] == pytest.approx(0.0, abs=1e-9)
    assert found['ground_truth']['matched'] == 9
    rows = np.loadtxt(folder / 'trajectory.tum')
    assert rows[:, 0].tolist() == list(range(FIRST_S, FIRST_S + 9))
    np.testing.assert_allclose(
        np.loadtxt(folder / 'trajectory.kitti').reshape(-1, 3, 4)[:, :, 3], rows[:, 1:4], atol=1e-8
    )
    assert PlyData.read(folder / 'map.ply')['vertex'].count > 100
    times = json.loads((folder / 'timing.json').read_text())
    assert times['fps'] > 0 and times['latency_ms']['p50'] <= times['latency_ms']['p99']
    out = capsys.readouterr().out
    assert '* /cam (sensor_msgs/msg/Image, 9 messages)' in out
    assert '  /ground_truth (nav_msgs/msg/Odometry, 9 messages)' in out
    assert 'walk: 9 images, 9 poses' in out and 'scale 3.0000 m per map unit' in out
    assert "about 'body', the images are of 'cam7_optical'" in out  # the mount is not told
    assert_report_is_whole(folder)


def assert_report_is_whole(folder):
    page = Page((folder / 'report.html').read_text())
    assert len(page.references) == 4
    assert all(r.startswith('data:image/png;base64,') for r in page.references)
    assert all(len(r) > 5000 for r in page.references)
    for words in ('walk: 9 poses', 'weights are random', 'ate / sim3 / rmse', 'latency_ms / p95',
                  'versions / torch', 'settings / keyframe_interval'):  # fmt: skip
        assert words in page.text
    for name in ('map.png', 'trajectory.png', 'error.png', 'frames.png'):
        assert Image.open(folder / name).size[0] > 400


def test_a_recording_without_truth(tmp_path, engines):
    bag = write_bag(tmp_path / 'walk', images(5))
    assert run(tmp_path / 'out', bag) == 0
    folder = tmp_path / 'out' / 'walk'
    assert {f.name for f in folder.iterdir()} == FILES - {'error.png'}
    assert metrics(folder)['ground_truth'] is None and 'ate' not in metrics(folder)
    assert not engines[0]._params.motion_gate  # which would leave out images


def test_results_inside_the_recording_are_no_part_of_it(tmp_path, engines, capsys):
    for i in range(3):
        Image.new('RGB', (56, 42), (i, 0, 0)).save(tmp_path / f'{i}.png')
    assert run(tmp_path / 'results', tmp_path) == 0
    assert run(tmp_path / 'results', tmp_path) == 0
    assert 'finished before, skipped' in capsys.readouterr().out


def test_the_report_names_any_recording(tmp_path, engines):
    name = '<b>&amp; run_$a_{1$'
    bag = write_bag(tmp_path / 'bag', images(3)).rename(tmp_path / name)
    assert run(tmp_path / 'out', bag) == 0
    assert name in Page((tmp_path / 'out' / name / 'report.html').read_text()).text


@pytest.mark.parametrize(('poses', 'said'), [(2, True), (5, False)])
def test_truth_about_a_small_part_is_said(poses, said, tmp_path, engines, capsys):
    bag = write_bag(tmp_path / 'walk', images(9) + truth(poses))
    assert run(tmp_path / 'out', bag) == 0
    line = f'Only {poses} of 9 images have a true pose'
    assert any(line in note for note in metrics(tmp_path / 'out' / 'walk')['notes']) == said
    assert (line in capsys.readouterr().out) == said


def test_what_is_chosen_and_exported(tmp_path, engines):
    bag = truth_bag(tmp_path / 'walk')
    options = ['--every', '2', '--start', '1', '--max-frames', '3', '--colmap', '--depth', 'png']
    assert run(tmp_path / 'out', bag, *options, '--num-scale-frames', '1') == 0
    folder = tmp_path / 'out' / 'walk'
    assert np.loadtxt(folder / 'trajectory.tum')[:, 0].tolist() == [51, 53, 55]
    assert len(list((folder / 'depth').glob('*.png'))) == 3
    assert (folder / 'colmap' / 'sparse' / '0' / 'points3D.txt').read_text().count('\n') > 100
    assert record(folder)['settings']['every'] == 2


def test_truth_from_a_file_with_an_offset(tmp_path, engines):
    bag = write_bag(tmp_path / 'walk', images(9))
    rows = [(s * 1e-9 + 1000, *(getattr(m.pose.pose.position, a) for a in 'xyz'), 0, 0, 0, 1)
            for _, s, m in truth(9)]  # fmt: skip
    np.savetxt(tmp_path / 'truth.tum', rows)
    options = ['--ground-truth', tmp_path / 'truth.tum', '--gt-offset', '-1000']
    assert run(tmp_path / 'out', bag, *options) == 0
    found = metrics(tmp_path / 'out' / 'walk')
    assert found['scale'] == pytest.approx(3.0)
    assert found['ate']['sim3']['rmse'] == pytest.approx(0.0, abs=1e-6)


def test_a_camera_that_is_mounted_on_the_body(tmp_path, monkeypatch):
    """The body turns on the spot, so its camera, half a metre ahead, runs along a circle."""

    def pose(index):
        c, s = np.cos(0.2 * index), np.sin(0.2 * index)
        T = np.array([[c, 0, s, 0.5 * s], [0, 1, 0, 0], [-s, 0, c, 0.5 * c], [0, 0, 0, 1]])
        return turned_world @ T

    turned_world = curved(3)
    use_fake(monkeypatch, [], pose=pose)
    bag = write_bag(tmp_path / 'walk', images(9))
    lines = [f'{FIRST_S + i} 5 6 7 0 0 {np.sin(-0.1 * i)} {np.cos(-0.1 * i)}' for i in range(9)]
    (tmp_path / 'truth.tum').write_text('\n'.join(lines))
    options = ['--ground-truth', tmp_path / 'truth.tum']
    mount = ['--body-to-camera', '0.5', '0', '0', '-0.5', '0.5', '-0.5', '0.5']
    assert run(tmp_path / 'out', bag, *options, *mount) == 0
    found = metrics(tmp_path / 'out' / 'walk')
    assert found['scale'] == pytest.approx(1.0)
    assert found['ate']['se3']['max'] == pytest.approx(0.0, abs=1e-6)
    assert found['rpe']['se3']['frames']['1']['rotation_deg']['max'] == pytest.approx(0, abs=1e-4)


def test_distortion_is_removed_as_the_node_does_it(tmp_path, engines):
    bent = camera_info(distortion=(-0.4, 0.1, 0, 0, 0))
    run(tmp_path / 'out', write_bag(tmp_path / 'bent', [*images(3), bent]))
    run(tmp_path / 'out', write_bag(tmp_path / 'plain', images(3)))
    run(tmp_path / 'out2', tmp_path / 'bent', '--camera-info', 'none')
    rectified, raw, declined = (engine.pictures[0] for engine in engines)
    assert (rectified != raw).any()
    np.testing.assert_array_equal(declined, raw)


def test_intrinsics_of_camera_info_on_request(tmp_path, engines):
    bag = write_bag(tmp_path / 'walk', [*images(3), camera_info(focal=77.0)])
    assert run(tmp_path / 'out', bag, '--use-camera-info', '--colmap') == 0
    cameras = tmp_path / 'out' / 'walk' / 'colmap' / 'sparse' / '0' / 'cameras.txt'
    assert '1 PINHOLE 56 42 77 77 28 21' in cameras.read_text().splitlines()


def test_several_recordings_have_a_table(tmp_path, monkeypatch):
    lengths = {'a': 6, 'b': 8, 'c': 13}
    use_fake(monkeypatch, [], pose=curved)
    bags = [truth_bag(tmp_path / name, count) for name, count in lengths.items()]
    assert run(tmp_path / 'out', *bags) == 0
    out = tmp_path / 'out'
    assert {f.name for f in out.iterdir()} == {'a', 'b', 'c', 'table.csv'}
    rows = list(csv.DictReader((out / 'table.csv').open()))
    assert [row['name'] for row in rows] == ['a', 'b', 'c', 'mean', 'median']
    assert [float(row['images']) for row in rows] == [6, 8, 13, 9, 8]
    assert float(rows[3]['scale']) == pytest.approx(3.0)
    metrics = json.loads((out / 'b' / 'metrics.json').read_text())
    assert float(rows[1]['scale']) == metrics['scale']


def test_finished_ones_are_skipped_and_the_rest_is_done(tmp_path, engines, capsys):
    bags = [truth_bag(tmp_path / name) for name in 'ab']
    out = tmp_path / 'out'
    assert run(out, bags[0]) == 0
    before = (out / 'a' / 'report.html').stat().st_mtime_ns
    (out / '.b.part').mkdir()  # what a killed evaluation leaves
    (out / '.b.part' / 'trajectory.tum').write_text('half')
    capsys.readouterr()
    assert run(out, *bags) == 0
    assert 'a: finished before, skipped' in capsys.readouterr().out
    assert (out / 'a' / 'report.html').stat().st_mtime_ns == before
    assert sum(engine.pushed for engine in engines) == 18
    assert {f.name for f in out.iterdir()} >= {'a', 'b', 'table.csv'}
    assert not (out / '.b.part').exists()
    assert run(out, *bags, '--overwrite') == 0
    assert sum(engine.pushed for engine in engines) == 36


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_is_done(number, tmp_path, monkeypatch, capsys):
    def before_push(n):
        if n == 9 + 5:  # in the second of three
            os.kill(os.getpid(), number)

    use_fake(monkeypatch, [], pose=curved, before_push=before_push)
    bags = [truth_bag(tmp_path / name) for name in 'abc']
    out = tmp_path / 'out'
    assert run(out, *bags) == 1
    err = capsys.readouterr().err
    assert 'b: interrupted, the next call starts it again' in err
    assert f"1 of 3 recordings are finished and kept in '{out}'" in err and 'Traceback' not in err
    assert [f.name for f in out.iterdir()] == ['a']
    use_fake(monkeypatch, [], pose=curved)
    assert run(out, *bags) == 0
    assert {f.name for f in out.iterdir() if f.is_dir()} == {'a', 'b', 'c'}


def test_one_bad_recording_does_not_stop_the_others(tmp_path, engines, capsys):
    late = truth_bag(tmp_path / 'late', offset_s=10**6)
    assert run(tmp_path / 'out', late, truth_bag(tmp_path / 'good')) == 1
    assert [f.name for f in (tmp_path / 'out').iterdir()] == ['good']
    err = capsys.readouterr().err
    assert 'late: no pose of' in err and '1 of 2 recordings are finished' in err


def test_the_same_command_gives_the_same_bytes_and_so_does_its_record(
    tmp_path, monkeypatch, capsys
):
    """With the real network; the record alone says all, from any folder."""
    draw_nothing(monkeypatch)
    bag = truth_bag(tmp_path / 'walk', 14)
    options = ['--sliding-window', '3', '--num-scale-frames', '4', '--every', '1']
    assert run(tmp_path / 'a', bag, *options) == run(tmp_path / 'b', bag, *options) == 0
    config = str(tmp_path / 'a' / 'walk' / 'run.yaml')
    assert evaluate.main(['--config', config, '--out', str(tmp_path / 'c')]) == 0
    for name in ('trajectory.tum', 'metrics.json', 'map.ply', 'trajectory.kitti'):
        first, *others = ((tmp_path / f / 'walk' / name).read_bytes() for f in 'abc')
        assert others == [first, first], name
    assert np.ptp(np.loadtxt(tmp_path / 'a' / 'walk' / 'trajectory.tum')[:, 1]) > 1e-3
    kept = record(tmp_path / 'c' / 'walk')
    assert kept['settings']['sliding_window'] == 3
    assert kept['kernels']['deterministic_algorithms'] is True
    assert kept['weights_sha256'] == 'random, seed 0' and kept['versions']['torch']
    assert 'results may differ' not in capsys.readouterr().err


def test_a_record_of_other_versions_is_said_and_flags_go_first(tmp_path, engines, capsys):
    run(tmp_path / 'out', truth_bag(tmp_path / 'walk'))
    path = tmp_path / 'out' / 'walk' / 'run.yaml'
    content = yaml.safe_load(path.read_text())
    content['versions']['torch'] = '1.0'
    (tmp_path / 'old.yaml').write_text(yaml.safe_dump(content))
    arguments = ['--config', str(tmp_path / 'old.yaml'), '--out', str(tmp_path / 'new')]
    assert evaluate.main([*arguments, '--every', '3']) == 0
    assert 'made with torch 1.0 (now' in capsys.readouterr().err
    assert metrics(tmp_path / 'new' / 'walk')['images'] == 3


def test_nothing_of_ros_is_needed(tmp_path):
    """A machine without ROS: importing any of its packages fails, and an evaluation runs."""
    folder = tmp_path / 'walk'
    folder.mkdir()
    for i, (_, _, message) in enumerate(images(3)):
        Image.fromarray(message.data.reshape(42, 56, 3)).save(folder / f'{i}.png')
    code = (
        'import sys\n'
        "for name in ('rclpy', 'rcl_interfaces', 'sensor_msgs', 'std_msgs', 'geometry_msgs',\n"
        "             'nav_msgs', 'tf2_ros', 'cv_bridge', 'builtin_interfaces'):\n"
        '    sys.modules[name] = None\n'
        'from lingbot_map.evaluation.cli import main\n'
        'sys.exit(main(sys.argv[1:]))\n'
    )
    arguments = [str(folder), '--model', 'tiny', '--checkpoint', 'random', '--out', str(tmp_path)]
    done = subprocess.run(
        [sys.executable, '-c', code, *arguments[:-1], str(tmp_path / 'out')],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = np.loadtxt(tmp_path / 'out' / 'walk' / 'trajectory.tum')
    np.testing.assert_allclose(rows[:, 0] * SECOND, [1e8, 2e8, 3e8])
    assert '3/3' in done.stderr  # the progress bar


def test_a_rerun_recording(tmp_path, engines):
    pytest.importorskip('rerun', reason='rerun-sdk is not installed')
    bag = truth_bag(tmp_path / 'walk')
    assert run(tmp_path / 'out', bag, '--rerun', tmp_path / 'walk.rrd') == 0
    command = [sys.executable, '-m', 'rerun_cli', 'rrd', 'print', str(tmp_path / 'walk.rrd')]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    for name in ('/map/camera/image/depth', '/map/camera/image/rgb', f'/map/cloud/{50 * SECOND}',
                 '/map/estimate', '/map/ground_truth/now'):  # fmt: skip
        assert name in told
    assert not (tmp_path / '.walk.rrd.part').exists()
