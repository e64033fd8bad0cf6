"""What lingbot_map_evaluate says about input that it cannot use: one line, no files."""

from dataclasses import replace
import os
import re
import resource
import sys

from bag_writer import NOETIC, odometry, raw_image, write_bag, write_ros1_bag
from evaluate_rig import camera_info, images, record, run, SECOND, truth_bag, use_fake
from lingbot_map.evaluation import cli as evaluate
from lingbot_map.evaluation import engine as evaluate_engine
from lingbot_map.evaluation.folders import unique_names
from lingbot_map.evaluation.settings import complete, read_node_params, SettingsError
from lingbot_map.recordings.bags import read_camera_info
from lingbot_map.recordings.source import SourceError
from lingbot_map.streaming.loading import load_engine
import numpy as np
from PIL import Image
import pytest
import yaml


def truncated(tmp_path):
    bag = truth_bag(tmp_path / 'bag', 40)
    file = bag / 'bag.mcap'
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return [bag], 'bag.*damaged'


def no_images(tmp_path):
    bag = write_bag(tmp_path / 'bag', [('/odom', SECOND, odometry(SECOND, (0, 0, 0)))])
    return [bag], 'no image topic; its topics: /odom'


def another_time(tmp_path):
    bag = truth_bag(tmp_path / 'bag', offset_s=10**6)
    return [bag], 'bag: no pose of .*images 50.000 to 58.000 s, poses 1000050.000 .*time base'


def two_topics(tmp_path):
    bag = write_bag(tmp_path / 'bag', images(2) + images(2, '/right'))
    return [bag], 'several image topics.*--image-topic: /cam .*, /right'


def unknown_type(tmp_path):
    return [truth_bag(tmp_path / 'bag'), '--image-topic', '/ground_truth'], 'no images on'


def no_truth_topic(tmp_path):
    return [truth_bag(tmp_path / 'bag'), '--ground-truth', '/cam'], "no poses on '/cam'"


def bad_encoding(tmp_path):
    image = raw_image(SECOND, np.zeros((4, 4, 3), np.uint8), 'foo8')
    return [write_bag(tmp_path / 'bag', [('/cam', SECOND, image)])], "encoding 'foo8'"


def bad_truth_file(tmp_path):
    (tmp_path / 'truth.txt').write_text('once upon a time\n')
    arguments = [truth_bag(tmp_path / 'bag'), '--ground-truth', tmp_path / 'truth.txt']
    return arguments, 'truth.txt.* not a pose file'


def damaged_picture(tmp_path):
    """Cut the last one short: it shows when everything else has run."""
    folder = tmp_path / 'walk'
    folder.mkdir()
    for i in range(9):
        noise = np.random.default_rng(i).integers(0, 256, (42, 56, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f'{i}.png')
    data = (folder / '8.png').read_bytes()
    (folder / '8.png').write_bytes(data[: len(data) // 2])
    return [folder], '8.png.* damaged'


def another_size(tmp_path):
    late = [(t, s + 9 * SECOND, raw_image(s + 9 * SECOND, np.zeros((56, 42, 3), np.uint8)))
            for t, s, _ in images(2)]  # fmt: skip
    return [write_bag(tmp_path / 'bag', images(3) + late)], 'at 59.000 s is 42x56'


def nothing_left(tmp_path):
    return [truth_bag(tmp_path / 'bag'), '--start', '100'], 'nothing is left of 9 images'


def missing(tmp_path):
    return [tmp_path / 'nowhere'], 'nowhere.* does not exist'


def empty_folder(tmp_path):
    (tmp_path / 'empty').mkdir()
    return [tmp_path / 'empty'], 'contains no images'


def no_input(tmp_path):
    return [], 'name a recording'


def timed_kernels(tmp_path):
    return [truth_bag(tmp_path / 'bag'), '--compile-mode', 'max-autotune'], 'two runs could differ'


def bad_value(tmp_path):
    return [truth_bag(tmp_path / 'bag'), '--points.stride', '0'], "'points.stride' is 0"


def no_room_to_roll_over(tmp_path):
    return [truth_bag(tmp_path / 'bag'), '--max-keyframes', '12'], (
        "'max_keyframes' is 12; to roll over with 'overlap_keyframes' 8 .* at least 16: raise it"
    )


def memory_that_stops(tmp_path):
    flags = ['--max-keyframes', '4', '--num-scale-frames', '2', '--keyframe-interval', '1']
    bag = truth_bag(tmp_path / 'bag')
    return [bag, *flags, '--on-limit', 'stop'], 'memory is full: raise max_keyframes'


def bad_mount(tmp_path):
    arguments = [truth_bag(tmp_path / 'bag'), '--body-to-camera', *'0000000']
    return arguments, "'body_to_camera' is .*unit quaternion"


def bad_mask(tmp_path):
    return [truth_bag(tmp_path / 'bag'), '--image-mask', '99,0,0,0'], 'mask the whole image'


def bad_camera_info(tmp_path):
    bag = write_bag(tmp_path / 'bag', [*images(3), camera_info(size=(640, 480))])
    return [bag], 'camera_info is for images of 640x480, these are 56x42'


def bad_config(tmp_path):
    (tmp_path / 'run.yaml').write_text('{ not: [yaml')
    return ['--config', tmp_path / 'run.yaml'], 'run.yaml.* cannot be read'


def foreign_config(tmp_path):
    (tmp_path / 'run.yaml').write_text('a: 1\n')
    return ['--config', tmp_path / 'run.yaml'], 'not a run.yaml that an evaluation wrote'


def missing_params(tmp_path):
    arguments = [truth_bag(tmp_path / 'bag'), '--params', tmp_path / 'nope.yaml']
    return arguments, r"^[^']*'[^']*nope\.yaml' cannot be read: no such file or directory$"


def bad_params(tmp_path):
    (tmp_path / 'node.yaml').write_text('[1, 2]\n')
    return [truth_bag(tmp_path / 'bag'), '--params', tmp_path / 'node.yaml'], 'not a ROS parameter'


def bad_param(tmp_path):
    (tmp_path / 'node.yaml').write_text('lingbot_map: {ros__parameters: {points: {stride: 0}}}\n')
    return [
        truth_bag(tmp_path / 'bag'),
        '--params',
        tmp_path / 'node.yaml',
    ], "'points.stride' is 0"


def params_with_a_removed_policy(tmp_path):
    (tmp_path / 'node.yaml').write_text('/**: {ros__parameters: {keyframe_policy: auto}}\n')
    arguments = [truth_bag(tmp_path / 'bag'), '--params', tmp_path / 'node.yaml']
    return arguments, "node.yaml': .*'keyframe_policy: auto' was removed: use 'interval' and set"


def params_with_a_removed_parameter(tmp_path):
    (tmp_path / 'node.yaml').write_text('/**: {ros__parameters: {expected_frames: 9}}\n')
    arguments = [truth_bag(tmp_path / 'bag'), '--params', tmp_path / 'node.yaml']
    return arguments, "'expected_frames' was removed: set 'keyframe_interval' .* 0 does that$"


def removed_value(tmp_path):
    return [truth_bag(tmp_path / 'bag'), '--keyframe-policy', 'auto'], "auto' was removed: use"


def params_of_another_node(tmp_path):
    (tmp_path / 'node.yaml').write_text('/front_map: {ros__parameters: {scale: 2.0}}\n')
    arguments = [truth_bag(tmp_path / 'bag'), '--params', tmp_path / 'node.yaml']
    return arguments, 'nothing for the node lingbot_map: its nodes are /front_map'


def params_that_are_none(tmp_path):
    (tmp_path / 'node.yaml').write_text('/**: {ros__parameters: 5}\n')
    arguments = [truth_bag(tmp_path / 'bag'), '--params', tmp_path / 'node.yaml']
    return arguments, 'not a ROS parameter file'


def endless_length(tmp_path):
    return [truth_bag(tmp_path / 'bag'), '--rpe-metres', '1', 'inf'], "'rpe_metres' .* finite"


def mount_that_is_no_number(tmp_path):
    arguments = [truth_bag(tmp_path / 'bag'), '--body-to-camera', 'nan', *'000001']
    return arguments, "'body_to_camera' .* finite"


def mount_beyond_the_sky(tmp_path):
    arguments = [truth_bag(tmp_path / 'bag'), '--body-to-camera', '1e200', *'000001']
    return arguments, 'invalid pose at 50.000 s'


def offset_beyond_time(tmp_path):
    return [truth_bag(tmp_path / 'bag'), '--gt-offset', '1e10'], "'gt_offset' is"


def unknown_settings(tmp_path):
    content = {'input': {'path': str(truth_bag(tmp_path / 'bag'))},
               'settings': {'speed': 9, 1: 2}, 'resolved': {}, 'versions': {}}  # fmt: skip
    (tmp_path / 'run.yaml').write_text(yaml.safe_dump(content))
    return ['--config', tmp_path / 'run.yaml'], "'1' is not a setting"


def unknown_setting(tmp_path):
    content = {'input': {'path': str(truth_bag(tmp_path / 'bag'))}, 'settings': {'speed': 9},
               'resolved': {}, 'versions': {}}  # fmt: skip
    (tmp_path / 'run.yaml').write_text(yaml.safe_dump(content))
    return ['--config', tmp_path / 'run.yaml'], "'speed' is not a setting"


def one_truth_for_two(tmp_path):
    (tmp_path / 'truth.txt').write_text('50 0 0 0 0 0 0 1\n')
    bags = [truth_bag(tmp_path / name) for name in 'ab']
    return [*bags, '--ground-truth', tmp_path / 'truth.txt'], 'cannot belong to 2 recordings'


def one_rerun_for_two(tmp_path):
    bags = [truth_bag(tmp_path / name) for name in 'ab']
    return [*bags, '--rerun', tmp_path / 'x.rrd'], 'is one file'


def rerun_into_a_folder(tmp_path):
    return [truth_bag(tmp_path / 'bag'), '--rerun', tmp_path], 'is a folder: add the name'


def twice(tmp_path):
    return [truth_bag(tmp_path / 'bag')] * 2, 'given twice'


BAD_INPUTS = (
    truncated, no_images, another_time, two_topics, unknown_type, no_truth_topic, bad_encoding,
    bad_truth_file, damaged_picture, another_size, nothing_left, missing, empty_folder, no_input,
    timed_kernels, bad_value, no_room_to_roll_over, memory_that_stops, bad_mount, bad_mask,
    bad_camera_info, bad_config, foreign_config,
    missing_params, bad_params, params_with_a_removed_policy, params_with_a_removed_parameter,
    removed_value, params_of_another_node, params_that_are_none, endless_length,
    mount_that_is_no_number, mount_beyond_the_sky, offset_beyond_time, bad_param, unknown_setting,
    unknown_settings, one_truth_for_two, one_rerun_for_two,
    rerun_into_a_folder, twice,
)  # fmt: skip


@pytest.mark.parametrize('make', BAD_INPUTS, ids=lambda make: make.__name__)
def test_bad_input_is_one_line_and_2(make, tmp_path, capfd, monkeypatch):
    use_fake(monkeypatch, [])
    arguments, words = make(tmp_path)
    assert run(tmp_path / 'out', *arguments) == 2
    err = capfd.readouterr().err.replace('\r', '\n').splitlines()
    lines = [line for line in err if line.startswith('lingbot_map_evaluate: ')]
    assert re.search(words, lines[0]), err
    assert lines[1:] == []
    assert not any('Traceback' in line for line in err)
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['--points.stride', 'abc'], "invalid int value: 'abc'"),
        (['--speed', '9'], 'unrecognized arguments: --speed 9'),
        (['--body-to-camera', '1', '2'], '--body-to-camera: expected 7 arguments'),
    ],
)
def test_wrong_arguments_are_one_line_and_2(arguments, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        run(tmp_path / 'out', truth_bag(tmp_path / 'bag'), *arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and words in error and error.count('\n') == 1


def test_small_negative_numbers_are_values(tmp_path, monkeypatch):
    use_fake(monkeypatch, [])
    mount = ['-1e-3', '-2.5e-4', '0', '0', '0', '-1e-05', '1']
    flags = ['--gt-offset', '-1e-3', '--body-to-camera', *mount]
    assert run(tmp_path / 'out', truth_bag(tmp_path / 'bag'), *flags) == 0
    settings = record(tmp_path / 'out' / 'bag')['settings']
    assert settings['gt_offset'] == -1e-3 and settings['body_to_camera'] == [*map(float, mount)]


def test_images_without_a_shape_for_the_network(tmp_path, capsys):
    bag = write_bag(tmp_path / 'bag', images(3, size=(500, 4)))
    assert run(tmp_path / 'out', bag) == 2
    assert 'bag: image size 500x4 is too wide' in capsys.readouterr().err


def test_a_folder_where_nothing_can_be_written_shows_before_the_work(
    tmp_path, capsys, monkeypatch
):
    made = []
    use_fake(monkeypatch, made)
    assert run('/proc', truth_bag(tmp_path / 'bag')) == 2
    assert "--out: '/proc' cannot be written" in capsys.readouterr().err and not made


def test_a_disk_that_fills_up_keeps_what_is_done(tmp_path, capsys, monkeypatch):
    use_fake(monkeypatch, [])
    bags, out = [truth_bag(tmp_path / name) for name in 'ab'], tmp_path / 'out'
    assert run(out, bags[0]) == 0
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, most))  # of any file; a report is larger
    try:
        assert run(out, *bags) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    err = capsys.readouterr().err
    assert f"b: '{out}' cannot be written (File too large): make room" in err
    assert '1 of 2 recordings are finished and kept' in err
    assert [f.name for f in out.iterdir()] == ['a']


def test_weights_that_do_not_exist(tmp_path, capsys):
    arguments = [str(truth_bag(tmp_path / 'bag')), '--checkpoint', 'no.pt']
    assert evaluate.main([*arguments, '--out', str(tmp_path / 'out')]) == 2
    assert "'no.pt' is not a file" in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_a_device_without_room_says_what_to_lower(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate_engine, 'load_engine', load_too_large)
    assert run(tmp_path / 'out', truth_bag(tmp_path / 'bag')) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if 'lower' in line]
    assert 'the memory of the device is full' in line and '--max-keyframes' in line


def load_too_large(params):
    """Return an engine that even the memory of a large machine cannot hold."""
    return load_engine(replace(params, max_keyframes=10**9))


def test_a_folder_that_may_not_be_read(tmp_path, capsys):
    folder = tmp_path / 'locked'
    folder.mkdir()
    folder.chmod(0)
    user = os.geteuid()
    if user == 0:  # for whom there are no locks
        os.seteuid(65534)
    try:
        assert run(tmp_path / 'out', folder) == 2
    finally:
        os.seteuid(user)
        folder.chmod(0o700)
    assert "locked' cannot be read: permission denied" in capsys.readouterr().err


def test_results_of_other_settings_are_not_replaced(tmp_path, monkeypatch, capsys):
    use_fake(monkeypatch, [])
    bag, out = truth_bag(tmp_path / 'bag'), tmp_path / 'out'
    assert run(out, bag) == 0
    before = (out / 'bag' / 'metrics.json').read_bytes()
    assert run(out, bag, '--every', '2') == 2
    assert (
        'made with other settings (every 1 -> 2): choose another --out' in capsys.readouterr().err
    )
    assert (out / 'bag' / 'metrics.json').read_bytes() == before
    assert run(out, bag, '--every', '2', '--overwrite') == 0
    assert (out / 'bag' / 'metrics.json').read_bytes() != before
    assert [f.name for f in out.iterdir()] == ['bag']


def test_a_folder_of_somebody_else_is_left_alone(tmp_path, capsys):
    (tmp_path / 'out' / 'bag').mkdir(parents=True)
    (tmp_path / 'out' / 'bag' / 'thesis.tex').write_text('dear')
    assert run(tmp_path / 'out', truth_bag(tmp_path / 'bag')) == 2
    assert 'exists and is not an evaluation' in capsys.readouterr().err
    assert (tmp_path / 'out' / 'bag' / 'thesis.tex').read_text() == 'dear'


def test_a_missing_rerun_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'rerun', None)
    assert run(tmp_path / 'out', truth_bag(tmp_path / 'bag'), '--rerun', tmp_path / 'x.rrd') == 2
    assert "pip install 'rerun-sdk'" in capsys.readouterr().err


def test_names_tell_recordings_apart(tmp_path):
    paths = [tmp_path / 'chess' / 'seq-01', tmp_path / 'fire' / 'seq-01', tmp_path / 'walk.mp4']
    for path in paths[:2]:
        path.mkdir(parents=True)
    assert unique_names(paths[:1]) == ['seq-01']
    assert unique_names(paths)[:2] == ['chess_seq-01', 'fire_seq-01']
    with pytest.raises(SettingsError, match='except for their suffix'):
        unique_names([tmp_path / 'a.mcap', tmp_path / 'a.db3'])


def test_the_parameter_file_of_the_node(tmp_path):
    (tmp_path / 'node.yaml').write_text(
        '/**: {ros__parameters: {model: tiny, tf_mode: off, map.voxel_size: 0.5, scale: 2}}\n'
        '/robot/lingbot_map: {ros__parameters: {points: {stride: 4}, keyframe_interval: 3}}\n'
        'other: {ros__parameters: {scale: 9.0}}\n'
    )
    assert read_node_params(tmp_path / 'node.yaml') == {
        'model': 'tiny', 'map.voxel_size': 0.5, 'scale': 2, 'points.stride': 4,
        'keyframe_interval': 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ('policy', 'interval', 'resolved'), [('interval', 0, 2), ('interval', 9, 9), ('flow', 9, None)]
)
def test_the_keyframe_policy_reaches_the_engine(policy, interval, resolved, tmp_path, monkeypatch):
    made, seen = [], []
    use_fake(monkeypatch, made)
    make = evaluate_engine.load_engine
    monkeypatch.setattr(evaluate_engine, 'load_engine', lambda p: seen.append(p) or make(p))
    settings = {'keyframe-policy': policy, 'keyframe-interval': interval, 'max-keyframes': 6,
                'num-scale-frames': 2, 'overlap-keyframes': 3, 'flow-threshold': 5}  # fmt: skip
    flags = [text for name, value in settings.items() for text in (f'--{name}', value)]
    assert run(tmp_path / 'out', truth_bag(tmp_path / 'walk'), *flags) == 0
    assert (seen[0].keyframe_policy, seen[0].flow_threshold, seen[0].overlap_keyframes) == (
        policy, 5.0, 3)  # fmt: skip
    written = record(tmp_path / 'out' / 'walk')
    assert written['settings']['keyframe_policy'] == policy
    assert written['resolved'].get('keyframe_interval') == resolved
    assert policy == 'flow' or made[0].keyframe_interval == resolved


def test_compilation_and_precision_reach_the_engine_and_are_recorded(tmp_path, monkeypatch):
    seen = []
    use_fake(monkeypatch, [])
    make = evaluate_engine.load_engine
    monkeypatch.setattr(evaluate_engine, 'load_engine', lambda p: seen.append(p) or make(p))
    flags = ['--compile-mode', 'default', '--attention-backend', 'sdpa', '--heads-dtype', 'bf16']
    assert run(tmp_path / 'out', truth_bag(tmp_path / 'walk'), *flags) == 0
    (params,) = seen
    assert (params.compile_mode, params.attention_backend, params.heads_dtype) == (
        'default', 'sdpa', 'bf16')  # fmt: skip
    written = record(tmp_path / 'out' / 'walk')
    assert written['settings']['compile_mode'] == 'default'
    # What the engine came to run with, as after a fallback: this one is always 'off'.
    assert written['resolved']['compile_mode'] == 'off'
    assert written['resolved']['attention_backend'] == 'sdpa'


def test_a_run_of_an_earlier_version_with_policy_auto_is_repeated(tmp_path, monkeypatch):
    use_fake(monkeypatch, [])
    bag, out = truth_bag(tmp_path / 'walk'), tmp_path / 'out'
    flags = ['--max-keyframes', 6, '--num-scale-frames', 2, '--overlap-keyframes', 3]
    assert run(out, bag, *flags) == 0
    file = out / 'walk' / 'run.yaml'
    written = record(out / 'walk')
    written['settings'] |= {'keyframe_policy': 'auto', 'keyframe_interval': 9}
    file.write_text(yaml.safe_dump(written))
    before = file.stat().st_mtime_ns
    assert run(out, bag, *flags) == 0 and file.stat().st_mtime_ns == before  # found finished
    assert run(tmp_path / 'again', '--config', file) == 0
    settings = record(tmp_path / 'again' / 'walk')['settings']
    assert (settings['keyframe_policy'], settings['keyframe_interval']) == ('interval', 2)


def test_settings_of_a_file_have_their_types():
    settings = complete({'scale': 2, 'rpe_metres': [1, 2.5], 'depth': False})
    assert settings['scale'] == 2.0 and settings['rpe_metres'] == [1.0, 2.5]
    assert settings['depth'] == 'off'  # YAML reads an unquoted off as a truth value
    assert settings['keyframe_interval'] == 0 and settings['points.stride'] == 2
    with pytest.raises(SettingsError, match="'rpe_frames' is 'many'"):
        complete({'rpe_frames': 'many'})


def test_camera_info_of_a_ros_1_bag_has_the_names_of_ros_2(tmp_path):
    store = NOETIC.types
    stamp = store['builtin_interfaces/msg/Time'](1, 0)
    info = store['sensor_msgs/msg/CameraInfo'](
        header=store['std_msgs/msg/Header'](0, stamp, 'cam'), height=42, width=56,
        distortion_model='plumb_bob', D=np.array([-0.4, 0, 0, 0, 0]), K=np.eye(3).ravel(),
        R=np.eye(3).ravel(), P=np.eye(3, 4).ravel(), binning_x=0, binning_y=0,
        roi=store['sensor_msgs/msg/RegionOfInterest'](0, 0, 0, 0, False),
    )  # fmt: skip
    bag = write_ros1_bag(tmp_path / 'old.bag', [('/front/camera_info', SECOND, info)])
    assert read_camera_info(bag, '/front/image_raw').d[0] == -0.4
    assert read_camera_info(bag, '/rear/image_raw') is None
    with pytest.raises(SourceError, match="on '/x'; such topics: /front/camera_info"):
        read_camera_info(bag, '/front/image_raw', 'x')
