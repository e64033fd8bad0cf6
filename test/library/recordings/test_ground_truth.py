"""True poses from files, and which of them belong to a recording."""

from bag_writer import odometry, raw_image, write_bag
from lingbot_map.recordings.open import find_truth, open_source
from lingbot_map.recordings.pose_files import read_truth_file, to_nanoseconds
from lingbot_map.recordings.source import SourceError
import numpy as np
from PIL import Image
import pytest

SECOND = 10**9
QUARTER = np.array([[0, -1, 0, 1], [1, 0, 0, 2], [0, 0, 1, 3], [0, 0, 0, 1.0]])  # about z


def test_tum_file_in_any_order_with_comments(tmp_path):
    path = tmp_path / 'truth.txt'
    path.write_text(
        '# time x y z qx qy qz qw\n\n'
        '1700000001.5 4 5 6 0 0 0 1\n1700000000.123456789 1 2 3 0 0 0.70710678 0.70710678\n'
    )
    track = read_truth_file(path, [])
    assert track.stamps_ns.tolist() == [1_700_000_000_123_456_789, 1_700_000_001_500_000_000]
    np.testing.assert_allclose(track.T[0], QUARTER, atol=1e-7)
    np.testing.assert_array_equal(track.T[1, :3, 3], [4, 5, 6])


def test_kitti_file_has_the_stamps_of_the_images(tmp_path):
    path = tmp_path / '00.txt'
    path.write_text('1 0 0 0 0 1 0 0 0 0 1 0\n0 -1 0 1 1 0 0 2 0 0 1 3\n')
    track = read_truth_file(path, [5, 9])
    assert track.stamps_ns.tolist() == [5, 9]
    np.testing.assert_array_equal(track.T[1], QUARTER)


def test_euroc_file_has_w_first(tmp_path):
    path = tmp_path / 'data.csv'
    path.write_text(
        '#timestamp, p..., q...\n1403636580838555648,1,2,3,0.5,0.1,0.2,0.3,9,9,9,9,9\n'
    )
    track = read_truth_file(path, [])
    assert track.stamps_ns.tolist() == [1_403_636_580_838_555_648]
    w, x, y, z = np.array([0.5, 0.1, 0.2, 0.3]) / np.linalg.norm([0.5, 0.1, 0.2, 0.3])
    assert track.T[0, 2, 1] == pytest.approx(2 * (y * z + x * w))


def test_the_trackers_of_euroc_have_w_first_too(tmp_path):
    path = tmp_path / 'data.csv'
    path.write_text('1403636580838555648,1,2,3,0.70710678,0,0,0.70710678\n')
    track = read_truth_file(path, [])
    assert track.stamps_ns.tolist() == [1_403_636_580_838_555_648]
    np.testing.assert_allclose(track.T[0], QUARTER, atol=1e-7)


@pytest.mark.parametrize('comment', ['# time, x, y, z, quaternion', '\ufeff# of another system'])
def test_comments_do_not_tell_how_numbers_are_separated(tmp_path, comment):
    path = tmp_path / 'truth.txt'
    path.write_text(f'{comment}\n1 1 2 3 0 0 0.70710678 0.70710678\n', encoding='utf-8')
    np.testing.assert_allclose(read_truth_file(path, []).T[0], QUARTER, atol=1e-7)


def test_a_mounted_camera(tmp_path):
    path = tmp_path / 'truth.txt'
    path.write_text('1 1 2 3 0 0 0.70710678 0.70710678\n')
    mount = np.eye(4)
    mount[:3, 3] = 10, 0, 0  # ahead of a body that looks along y
    track = read_truth_file(path, []).moved_to(mount)
    np.testing.assert_allclose(track.T[0, :3, 3], [1, 12, 3], atol=1e-6)


@pytest.mark.parametrize(
    ('text', 'nanoseconds'),
    [('1.000000001', 1_000_000_001), ('2', 2 * SECOND), ('1.5e-1', 150_000_000), ('-1.5', -1.5e9)],
)
def test_seconds_are_read_exactly(text, nanoseconds):
    assert to_nanoseconds(text) == nanoseconds


@pytest.mark.parametrize(
    ('content', 'words'),
    [
        (b'', 'has no poses'),
        (b'# only a comment\n', 'has no poses'),
        (b'1 2 3\n', 'not a pose file.*8 numbers'),
        (b'1 2 3 4 5 6 7 8\n1 2 3\n', 'not a pose file'),
        (b'a b c d e f g h\n', "not a pose file: .*'a'"),
        (b'1 0 0 0 0 0 0 0\n', r'invalid pose at 1.000 s'),
        (b'1 nan 0 0 0 0 0 1\n', r'invalid pose at 1.000 s'),
        (b'1 0 0 0 0 1 0 0 0 0 1 0\n', '1 poses for 2 images'),
        (b'1 0 0 0 0 1 0 0 0 0 1 inf\n' * 2, 'invalid pose at .*1 inf'),
        (b'0 0 0 0 0 0 0 0 0 0 0 0\n' * 2, 'invalid pose at'),
        (b'2 0 0 0 0 2 0 0 0 0 2 0\n' * 2, 'invalid pose at'),
        (b'1 0 0 0 0 1 0 0 0 0 -1 0\n' * 2, 'invalid pose at'),
        (b'1 1e300 0 0 0 0 0 1\n', r'invalid pose at 1.000 s'),
        (b'1305031102175304000 0 0 0 0 0 0 1\n', 'stamps are in seconds'),
        (b'1403636580838555648000,1,2,3,1,0,0,0\n', 'stamps are in seconds'),
        (bytes(range(128, 255)), 'cannot be read'),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, content, words):
    path = tmp_path / 'truth.txt'
    path.write_bytes(content)
    with pytest.raises(SourceError, match=words) as raised:
        read_truth_file(path, [1, 2])
    assert '\n' not in str(raised.value) and 'truth.txt' in str(raised.value)


@pytest.fixture
def bag(tmp_path):
    pixels = np.zeros((4, 6, 3), np.uint8)
    return write_bag(
        tmp_path / 'bag',
        [('/image', s * SECOND, raw_image(s * SECOND, pixels)) for s in (1, 2)]
        + [('/ground_truth', s * SECOND, odometry(s * SECOND, (s, 0, 0))) for s in (1, 2)],
    )


def test_what_comes_with_a_bag_is_found_and_can_be_declined(bag):
    source = open_source(bag)
    assert find_truth(bag, source).T[:, 0, 3].tolist() == [1, 2]
    assert find_truth(bag, source, 'none') is None


def test_a_file_goes_before_the_topics_of_a_bag(bag, tmp_path):
    path = tmp_path / 'poses.txt'
    path.write_text('1 0 0 7 0 1 0 0 0 0 1 0\n1 0 0 8 0 1 0 0 0 0 1 0\n')
    track = find_truth(bag, open_source(bag), str(path))
    assert track.T[:, 0, 3].tolist() == [7, 8]
    assert track.stamps_ns.tolist() == [SECOND, 2 * SECOND]


def test_pictures_without_a_bag_have_no_topics(tmp_path):
    Image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(tmp_path / '0.png')
    source = open_source(tmp_path)
    assert find_truth(tmp_path, source) is None
    with pytest.raises(SourceError, match="'/pose' is not a file, and .* is not a bag"):
        find_truth(tmp_path, source, '/pose')
