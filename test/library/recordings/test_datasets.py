"""Data sets written in the layouts of their publishers, read back with stamps and true poses."""

from lingbot_map.recordings.datasets import open_dataset
from lingbot_map.recordings.open import find_truth, open_source
from lingbot_map.recordings.source import SourceError
import numpy as np
from PIL import Image
import pytest

SECOND = 10**9


def save(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    rgb = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    Image.fromarray(rgb).save(path)
    return rgb


def tum(folder):
    """Write three images out of the order of their names, and poses at other times."""
    lines = ['# color images', '# timestamp filename']
    for i, name in enumerate(('b', 'a', 'c')):
        save(folder / 'rgb' / f'{name}.png', i)
        lines.append(f'{1305031452.791720 + i:.6f} rgb/{name}.png')
    (folder / 'rgb.txt').write_text('\n'.join(lines) + '\n')
    (folder / 'groundtruth.txt').write_text(
        '# ground truth\n1305031452.7900 1 2 3 0 0 0 1\n1305031453.7900 2 2 3 0 0 0 1\n'
    )
    return folder


def euroc(folder):
    for camera, x in (('cam0', 0.5), ('cam1', -0.5)):
        lines = ['#timestamp [ns],filename']
        for i in range(3):
            stamp = 1403636579763555584 + i * 50_000_000
            save(folder / 'mav0' / camera / 'data' / f'{stamp}.png', i)
            lines.append(f'{stamp},{stamp}.png')
        (folder / 'mav0' / camera / 'data.csv').write_text('\r\n'.join(lines))
        (folder / 'mav0' / camera / 'sensor.yaml').write_text(
            f'sensor_type: camera\nT_BS:\n  cols: 4\n  rows: 4\n  data: [0.0, -1.0, 0.0, {x},\n'
            '         1.0, 0.0, 0.0, 0.0,\n         0.0, 0.0, 1.0, 0.0,\n'
            '         0.0, 0.0, 0.0, 1.0]\n'
        )
    truth = folder / 'mav0' / 'state_groundtruth_estimate0'
    truth.mkdir()
    (truth / 'data.csv').write_text(
        '#timestamp, p_RS_R_x [m]\n1403636579763555584,10,0,0,1,0,0,0,0,0,0,0,0,0,0,0,0\n'
    )
    return folder


def kitti(folder):
    sequence = folder / 'sequences' / '07'
    for i in range(3):
        for camera in ('image_0', 'image_2'):
            save(sequence / camera / f'{i:06}.png', i + 10 * (camera == 'image_2'))
    (sequence / 'times.txt').write_text('0.000000e+00\n1.037359e-01\n2.074718e-01\n')
    (sequence / 'calib.txt').write_text(
        'P0: 700 0 600 0 0 700 180 0 0 0 1 0\nP2: 700 0 600 42 0 700 180 0 0 0 1 0\n'
    )
    (folder / 'poses').mkdir()
    (folder / 'poses' / '07.txt').write_text(
        ''.join(f'1 0 0 0 0 1 0 0 0 0 1 {z}\n' for z in range(3))
    )
    return sequence


def seven_scenes(folder):
    for i in range(3):
        save(folder / f'frame-{i:06}.color.png', i)
        save(folder / f'frame-{i:06}.depth.png', 99)
        np.savetxt(folder / f'frame-{i:06}.pose.txt', np.diag([1, 1, 1, 1.0]) + i * E03)
    return folder


E03 = np.zeros((4, 4))
E03[0, 3] = 1.0


def test_tum(tmp_path):
    source = open_source(tum(tmp_path))
    stamps, images = zip(*source, strict=True)
    assert stamps == tuple(1305031452791720000 + i * SECOND for i in range(3))
    for seed, image in enumerate(images):
        np.testing.assert_array_equal(image, save(tmp_path / 'x' / 'x.png', seed))
    track = find_truth(tmp_path, source)
    assert track.stamps_ns.tolist() == [1305031452790000000, 1305031453790000000]
    assert track.T[:, 0, 3].tolist() == [1, 2]


@pytest.mark.parametrize(
    ('inside', 'position'),
    [('', (10.5, 0, 0)), ('mav0', (10.5, 0, 0)), ('mav0/cam1', (9.5, 0, 0))],
)
def test_euroc_poses_are_those_of_the_camera(tmp_path, inside, position):
    source = open_source(euroc(tmp_path) / inside)
    assert [stamp for stamp, _ in source] == [
        1403636579763555584 + i * 50_000_000 for i in range(3)
    ]
    T = find_truth(tmp_path, source).T[0]
    np.testing.assert_allclose(T[:3, 3], position)
    np.testing.assert_allclose(T[:3, 0], (0, 1, 0))


def test_kitti_takes_the_colour_camera_and_its_place(tmp_path):
    source = open_source(kitti(tmp_path))
    stamps, images = zip(*source, strict=True)
    assert stamps == (1, 103_735_900, 207_471_800)
    np.testing.assert_array_equal(images[1], save(tmp_path / 'x.png', 11))
    # x_image = 700 (x + 0.06) / z + 600: the camera is 6 cm to the left of camera 0
    np.testing.assert_allclose(find_truth(tmp_path, source).T[:, 0, 3], -0.06)


def test_kitti_camera_can_be_named(tmp_path):
    source = open_source(kitti(tmp_path) / 'image_0')
    np.testing.assert_array_equal(next(iter(source))[1], save(tmp_path / 'x.png', 0))
    np.testing.assert_array_equal(source.truth().T[:, :3, 3], [[0, 0, 0], [0, 0, 1], [0, 0, 2]])


def test_seven_scenes_takes_colour_at_30_hz(tmp_path):
    source = open_source(seven_scenes(tmp_path))
    stamps, images = zip(*source, strict=True)
    assert stamps == (33_333_333, 66_666_667, 100_000_000)
    np.testing.assert_array_equal(images[2], save(tmp_path / 'x' / 'x.png', 2))
    assert source.truth().T[:, 0, 3].tolist() == [0, 1, 2]
    assert [s for s, _ in open_source(tmp_path, fps=10)] == [SECOND // 10 * i for i in (1, 2, 3)]


def test_a_data_set_without_poses(tmp_path):
    (tum(tmp_path) / 'groundtruth.txt').unlink()
    assert find_truth(tmp_path, open_source(tmp_path)) is None


def test_a_stamp_of_zero_is_one_that_ros_takes_for_set(tmp_path):
    (tum(tmp_path) / 'rgb.txt').write_text('0.0 rgb/b.png\n0.1 rgb/a.png\n')
    assert [stamp for stamp, _ in open_source(tmp_path)] == [1, SECOND // 10]


def test_an_ordinary_folder_is_none(tmp_path):
    save(tmp_path / 'a.png', 0)
    assert open_dataset(tmp_path) is None
    assert len(open_source(tmp_path)) == 1


def break_missing_image(folder):
    (tum(folder) / 'rgb' / 'a.png').unlink()


def break_stamps(folder):
    tum(folder)
    lines = (folder / 'rgb.txt').read_text().splitlines()
    (folder / 'rgb.txt').write_text('\n'.join([*lines, lines[2]]))


def break_number(folder):
    (tum(folder) / 'rgb.txt').write_text('soon rgb/a.png\n')


def break_empty(folder):
    (tum(folder) / 'rgb.txt').write_text('# nothing\n')


def break_times(folder):
    (kitti(folder) / 'times.txt').write_text('0.1\n0.2\n')
    return folder / 'sequences' / '07'


def break_calibration(folder):
    (kitti(folder) / 'calib.txt').unlink()
    return folder / 'sequences' / '07'


def break_mount(folder):
    (euroc(folder) / 'mav0' / 'cam0' / 'sensor.yaml').write_text('T_BS: [1, 2]\n')


def break_mount_singular(folder):
    (euroc(folder) / 'mav0' / 'cam0' / 'sensor.yaml').write_text(f'T_BS: {{data: {[0] * 16}}}\n')


def break_calibration_singular(folder):
    (kitti(folder) / 'calib.txt').write_text('P2:' + ' 0' * 12 + '\n')
    return folder / 'sequences' / '07'


def break_unit_of_stamps(folder):
    index = tum(folder) / 'rgb.txt'
    index.write_text('1305031452791720000 rgb/b.png\n1305031453791720000 rgb/a.png\n')


def break_first_stamp(folder):
    (tum(folder) / 'rgb.txt').write_text('-1.25 rgb/b.png\n')


def break_first_pose(folder):
    (seven_scenes(folder) / 'frame-000000.pose.txt').unlink()


def break_rotation(folder):
    np.savetxt(seven_scenes(folder) / 'frame-000001.pose.txt', np.zeros((4, 4)))


def break_pose(folder):
    (seven_scenes(folder) / 'frame-000001.pose.txt').write_text('1 2 3\n')


@pytest.mark.parametrize(
    ('damage', 'words'),
    [
        (break_missing_image, 'lists .*a.png.* does not exist'),
        (break_stamps, 'stamps that do not increase'),
        (break_number, "rgb.txt' has 'soon'"),
        (break_empty, 'lists no images'),
        (break_times, '3 images and 2 stamps'),
        (break_calibration, 'calib.txt.* missing'),
        (break_mount, 'sensor.yaml.*T_BS'),
        (break_mount_singular, 'sensor.yaml.*T_BS'),
        (break_calibration_singular, 'calib.txt.* no line P2'),
        (break_unit_of_stamps, 'image at 1.31e.18 s: stamps are in seconds'),
        (break_first_stamp, 'image at -1.25 s'),
        (break_first_pose, 'frame-000000.pose.txt.*4x4'),
        (break_rotation, 'frame-000001.pose.txt.*4x4'),
        (break_pose, 'frame-000001.pose.txt.*4x4'),
    ],
)
def test_what_is_wrong_is_named(tmp_path, damage, words):
    path = damage(tmp_path) or tmp_path
    with pytest.raises(SourceError, match=words) as raised:
        find_truth(path, open_source(path))
    assert '\n' not in str(raised.value)


def test_fps_is_refused_where_there_are_stamps(tmp_path):
    with pytest.raises(SourceError, match='stamps of its own'):
        open_source(tum(tmp_path), fps=5)
