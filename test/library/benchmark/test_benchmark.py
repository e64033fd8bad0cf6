"""The benchmark prints what it measured, and says what is wrong with an argument."""

import json
import subprocess
import sys

from lingbot_map.benchmark.__main__ import main
from lingbot_map.benchmark.arguments import kept_frames, parse, setup_of
from lingbot_map.benchmark.report import comparison_lines, run_lines
from lingbot_map.benchmark.setup import build, host_weights, noise, room
from lingbot_map.benchmark.speed import Push, Run
import numpy as np
import pytest

SMALL = ['--model', 'tiny', '--image-width', '84', '--image-height', '56', '--device', 'cpu',
         '--num-scale-frames', '2', '--sliding-window', '2']  # fmt: skip
# What a machine with torch, numpy, Pillow and safetensors need not have.
ABSENT = ('rclpy', 'rosbags', 'cv2', 'matplotlib', 'tqdm', 'yaml')


def setup(*arguments):
    return setup_of(parse([*SMALL, *arguments], ''))


def run_of(forward_ms, held=range(2, 10**6), **values):
    """Return a run with these times, whose other figures are round."""
    pushes = [Push(n, 1.0, ms, ms + 2) for n, ms in zip(held, forward_ms, strict=False)]
    values = {'label': 'off, sdpa', 'ready_s': 3.0, 'scale_batch_ms': 100.0, 'peak_gb': 0.0,
              'reserved_gb': 0.0, 'recompiles': 0, 'outside': {}} | values  # fmt: skip
    return Run(setup(), pushes=pushes, **values)


@pytest.mark.parametrize('weights', ['random', 'recipe'])
def test_prints_the_figures_and_writes_them(capsys, tmp_path, weights):
    file = tmp_path / 'run.json'
    command = [*SMALL, '--frames', '9', '--weights', weights, '--json', str(file)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.startswith('python3 -m lingbot_map.benchmark --model tiny')
    assert f'tiny model, {weights} weights, 84x56' in out
    for name in ('host memory to READY', 'scale batch of 2', '7 later frames', 'p99',
                 '5 with a full window', 'around 90 %', 'compilations since READY',
                 'upload and resize of 1280x853', 'cloud of 4704 points'):  # fmt: skip
        assert name in out, name
    written = json.loads(file.read_text())
    assert written['command'].endswith(str(file)) and written['torch'] and written['device']
    (run,) = written['runs']
    assert run['setup']['sliding_window'] == 2 and run['recompiles'] == 0
    times = [frame['forward_ms'] for frame in run['frames']]
    assert len(times) == 7 and min(times) > 0
    assert run['percentiles_ms']['50'] == pytest.approx(np.median(times))
    assert run['fps'] == pytest.approx(9e3 / (run['scale_batch_ms'] + sum(times)))
    assert all(frame['wall_ms'] > frame['forward_ms'] for frame in run['frames'])


def test_the_window_is_full_when_scale_frames_and_window_are_held():
    run = run_of([10.0, 20.0, 30.0, 40.0, 50.0])
    assert list(run.full_ms) == [30.0, 40.0, 50.0]  # 4 and more keyframes are held
    assert run.median_ms == 40.0
    assert run.p99_over_median == pytest.approx(49.8 / 40)
    assert run.fps == pytest.approx(1e3 * 7 / 250)
    never = run_of([10.0, 30.0], held=[2, 3])
    assert (list(never.full_ms), never.median_ms) == ([], 20.0)
    assert 'the window was never full' in '\n'.join(run_lines(never))


def test_positions_and_trace_are_medians_around_their_frames():
    times = np.arange(1000.0)
    times[[470, 520, 98]] = 1e6  # outliers
    run = run_of(times)
    assert run.positions_ms() == {10: 101.0, 50: 501.0, 90: 900.0}
    # Frame 100 is the 98th after the scale batch of 2; three before and after it count.
    assert run.trace_ms()[100] == 99.0
    assert run.trace_ms()[200] == 198.0
    assert list(run.trace_ms()) == [100 * n for n in range(1, 11)]
    assert 'ms at frame 1000 / at 200             5.035' in run_lines(run)
    short = run_of(np.arange(8.0))
    assert short.positions_ms()[10] == 3.5 and short.trace_ms() == {}


def test_a_comparison_tells_how_many_times_as_fast_as_the_first_each_is():
    runs = [run_of([40.0] * 9, ready_s=1.5), run_of([16.0] * 9, recompiles=3, peak_gb=7.25)]
    *_, first, second = comparison_lines(runs, ['off', 'default'])
    assert first.split() == ['off', '1.5', '100.0', '40.00', '1.000', '23.9', '0.00', '0', '1.00']
    assert second.split()[3:] == ['16.00', '1.000', '45.1', '7.25', '3', '2.50']


def test_a_comparison_runs_each_mode_with_a_fresh_engine(capsys, tmp_path):
    file = tmp_path / 'runs.json'
    command = [*SMALL, '--frames', '5', '--compare', 'off,auto', '--json', str(file)]
    assert main(command) == 0
    told = capsys.readouterr()
    assert 'off, sdpa ' in told.out and 'auto -> off, sdpa' in told.out
    assert told.err.count('READY after') == 2
    runs = json.loads(file.read_text())['runs']
    assert [run['setup']['compile_mode'] for run in runs] == ['off', 'auto']
    assert [len(run['frames']) for run in runs] == [3, 3]


def test_a_sweep_gives_each_length_the_memory_that_it_needs(capsys, tmp_path):
    file = tmp_path / 'sweep.json'
    command = [*SMALL, '--sweep', 'frames', '--frames', '299', '--keyframe-interval', '3',
               '--json', str(file)]  # fmt: skip
    assert main(command) == 0
    assert '100 frames, memory for 35' in capsys.readouterr().out
    (run,) = json.loads(file.read_text())['runs']
    assert (run['setup']['max_keyframes'], len(run['frames'])) == (35, 98)


@pytest.mark.parametrize(('frames', 'interval'), [(2, 1), (3, 2), (9, 1), (9, 2), (10, 3)])
def test_so_many_frames_are_kept_as_the_engine_keeps(frames, interval):
    args = parse([*SMALL, '--frames', '11', '--keyframe-interval', str(interval)], '')
    made = setup('--frames', '11', '--keyframe-interval', str(interval))
    engine = build(made, host_weights(made)).engine
    for rgb in noise(made, frames):
        engine.push(rgb)
    assert engine.keyframes == kept_frames(args, frames)


def test_defaults_follow_what_is_measured():
    def told(*arguments):
        args = parse([*SMALL, *arguments], '')
        return args.frames, args.max_keyframes, args.on_limit

    assert told() == (500, 1024, 'stop')
    assert told('--frames', '3000') == (3000, 3000, 'stop')
    assert told('--frames', '3000', '--keyframe-interval', '4') == (3000, 1024, 'stop')
    assert told('--accuracy') == (100, 1024, 'stop')
    assert told('--soak', '5000') == (5000, 320, 'roll_over')


def test_frames_are_the_same_every_time_and_differ_from_each_other():
    made = setup()
    assert all((a == b).all() for a, b in zip(noise(made, 70), noise(made, 70), strict=True))
    walk = room(made, 3)
    assert walk.shape == (3, 56, 84, 3) and walk.dtype == np.uint8
    assert (walk == room(made, 3)).all()
    assert (walk[0] != walk[1]).any()


@pytest.mark.parametrize(('arguments', 'part'), [
    (['--weights', '/nowhere.pt'], "'/nowhere.pt' is not a file"),
    (['--image-width', '85'], '--image-width is 85: it must be a multiple of the patch size'),
    (['--image-height', '98'], '--image-height is 98: the network crops'),
    (['--device', 'cuda:77'], 'CUDA'),
    (['--device', 'abacus'], 'abacus'),
    (['--frames', '2'], '--frames is 2: give more than the 2 of --num-scale-frames'),
    (['--frames', '40', '--max-keyframes', '39'], 'but 40 frames make 40 keyframes: raise it'),
    (['--keyframe-interval', '0'], 'at least 1'),
    (['--compare', 'off,fast'], "'fast' is no compile mode: use auto, off"),
    (['--compare', 'off'], 'give two or more'),
    (['--compare', 'off,auto', '--soak', '9'], '--compare goes with --accuracy'),
    (['--compile-mode', 'cuda-graph'], 'needs a CUDA device'),
    (['--compare', 'off,cuda-graph'], 'needs a CUDA device'),
    (['--attention-backend', 'cudnn'], "'attention_backend' is 'cudnn', which needs"),
    (['--sweep', 'frames', '--frames', '99'], '--sweep needs at least 100'),
    (['--sweep', 'frames', '--max-keyframes', '99'], 'leave out --max-keyframes'),
    (['--sweep', 'frames', '--accuracy'], 'not allowed with'),
    (['--soak', '2'], '--soak is 2: give more'),
    (['--soak', '20', '--max-keyframes', '9'], "'max_keyframes' is 9; to roll over"),
    (['--json', '/nowhere/a.json'], "there is no folder '/nowhere'"),
    (['--json', '/proc/a.json'], "--json '/proc/a.json' cannot be written"),
    (['--json', ''], "--json '.' is a folder"),
    (['--frames', '4', '--max-keyframes', '1000000000'], 'lower --max-keyframes'),
    (['--frames', '99999999999999999999'], 'lower --max-keyframes'),
    (['--compile-cache-dir', '/proc/nowhere'], "'compile_cache_dir' is '/proc/nowhere'"),
    (['--speed'], '--speed')])  # fmt: skip
def test_wrong_arguments_are_one_line_and_2(capsys, arguments, part):
    try:
        code = main([*SMALL, *arguments])
    except SystemExit as left:
        code = left.code
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if not line.startswith('benchmark: ')]
    assert (code, told.out, len(lines)) == (2, '', 1), lines
    assert lines[0].startswith('error: ') and part in lines[0]


def test_a_disk_that_fills_up_meanwhile_costs_the_file_only(capsys):
    assert main([*SMALL, '--frames', '4', '--json', '/dev/full']) == 2
    told = capsys.readouterr()
    assert 'later frames' in told.out
    assert told.err.splitlines()[-1].startswith("error: --json '/dev/full' cannot be written (No")


def test_an_interrupt_is_one_line_and_130(capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr('lingbot_map.benchmark.__main__.measure', interrupt)
    assert main([*SMALL, '--frames', '4']) == 130
    assert capsys.readouterr().err == 'interrupted: nothing was written\n'


def test_the_full_network_on_a_cpu_is_said_to_take_long_before_anything_else(capsys):
    nowhere = ['--device', 'cpu', '--weights', '/nowhere.pt']
    assert main(nowhere) == 2  # full is the default
    first, error = capsys.readouterr().err.splitlines()
    assert first == (
        'benchmark: the full network takes long on a CPU; try --model demo --image-width 168 '
        '--image-height 126 --frames 100'
    )
    assert "'/nowhere.pt' is not a file" in error
    assert main([*nowhere, '--model', 'tiny']) == 2
    assert 'takes long' not in capsys.readouterr().err


def test_it_runs_where_there_is_little_more_than_torch():
    program = (f'import sys; sys.modules.update(dict.fromkeys({ABSENT})); '
               f'from lingbot_map.benchmark.__main__ import main; sys.exit(main({SMALL}'
               " + ['--frames', '4', '--accuracy']))")  # fmt: skip
    run = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True,
                         timeout=300, check=False)  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert 'deviation from float32' in run.stdout
