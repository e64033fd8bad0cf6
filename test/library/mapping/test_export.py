"""Exported files read back by readers that are not ours where there is one."""

import os

import cv2
from lingbot_map.mapping.export import (
    replacing,
    write_depth_png,
    write_kitti,
    write_pcd,
    write_ply,
    write_tum,
)
from lingbot_map.mapping.points import POINT_DTYPE
import numpy as np
from PIL import Image
from plyfile import PlyData
import pytest


@pytest.fixture
def points():
    return np.array(
        [(1.5, -2.0, 3.0, 0xFF8001, 1.25), (0.0, 0.5, -1e9, 0x0000FF, 7.0)], POINT_DTYPE
    )


def turned():
    """Return a quarter turn about z, quaternion (0, 0, sqrt(1/2), sqrt(1/2)), and a shift."""
    T = np.eye(4)
    T[:3, :3] = [[0, -1, 0], [1, 0, 0], [0, 0, 1]]
    T[:3, 3] = 1, 2, 3
    return T


def test_tum_lines(tmp_path):
    write_tum(tmp_path / 'a.tum', [1_700_000_000_000_000_001, 5], [np.eye(4), turned()])
    lines = (tmp_path / 'a.tum').read_text().splitlines()
    assert lines[0] == '1700000000.000000001 0 0 0 0 0 0 1'
    assert lines[1].split()[0] == '0.000000005'
    np.testing.assert_allclose(
        [float(v) for v in lines[1].split()[1:]],
        [1, 2, 3, 0, 0, np.sqrt(0.5), np.sqrt(0.5)],
        atol=1e-8,
    )


def test_empty_tum(tmp_path):
    write_tum(tmp_path / 'a.tum', [], [])
    assert (tmp_path / 'a.tum').read_text() == ''


def test_kitti_lines(tmp_path):
    write_kitti(tmp_path / 'a.kitti', [np.eye(4), turned()])
    rows = np.loadtxt(tmp_path / 'a.kitti').reshape(-1, 3, 4)
    np.testing.assert_array_equal(rows[1], turned()[:3])


def test_ply_as_plyfile_reads_it(tmp_path, points):
    write_ply(tmp_path / 'a.ply', points)
    vertex = PlyData.read(tmp_path / 'a.ply')['vertex']
    for name in ('x', 'y', 'z', 'confidence'):
        np.testing.assert_array_equal(vertex[name], points[name])
    assert [tuple(int(vertex[c][i]) for c in ('red', 'green', 'blue')) for i in (0, 1)] == [
        (255, 128, 1),
        (0, 0, 255),
    ]


def test_pcd_header_and_bytes(tmp_path, points):
    write_pcd(tmp_path / 'a.pcd', points)
    header, data = (tmp_path / 'a.pcd').read_bytes().split(b'DATA binary\n')
    fields = dict(line.split(' ', 1) for line in header.decode().splitlines()[1:])
    assert fields['FIELDS'] == 'x y z rgb confidence'
    assert fields['SIZE'] == '4 4 4 4 4' and fields['TYPE'] == 'F F F F F'
    assert fields['WIDTH'] == fields['POINTS'] == '2' and fields['HEIGHT'] == '1'
    assert data == points.tobytes()


def test_empty_clouds(tmp_path):
    write_ply(tmp_path / 'a.ply', np.empty(0, POINT_DTYPE))
    write_pcd(tmp_path / 'a.pcd', np.empty(0, POINT_DTYPE))
    assert PlyData.read(tmp_path / 'a.ply')['vertex'].count == 0
    assert b'POINTS 0\n' in (tmp_path / 'a.pcd').read_bytes()


def test_depth_png_as_opencv_reads_it(tmp_path):
    depth = np.array([[1.0, 0.0004, 65.535], [np.nan, np.inf, 70.0], [-1.0, 0.0, 0.0006]])
    write_depth_png(tmp_path / 'a.png', depth)
    levels = cv2.imread(str(tmp_path / 'a.png'), cv2.IMREAD_UNCHANGED)
    assert levels.dtype == np.uint16
    np.testing.assert_array_equal(levels, [[1000, 0, 65535], [0, 0, 0], [0, 0, 1]])
    write_depth_png(tmp_path / 'b.png', depth, steps_per_unit=100)
    assert np.asarray(Image.open(tmp_path / 'b.png'))[0, 0] == 100


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / 'map.ply'
    target.write_text('old')
    with pytest.raises(RuntimeError, match='disk on fire'), replacing(target) as file:
        file.write(b'half')
        raise RuntimeError('disk on fire')
    assert target.read_text() == 'old'
    assert os.listdir(tmp_path) == ['map.ply']


def test_nobody_sees_a_half_written_file(tmp_path):
    target = tmp_path / 'map.ply'
    with replacing(target) as file:
        file.write(b'half')
        file.flush()
        assert not target.exists()
    assert target.read_bytes() == b'half'
    assert os.listdir(tmp_path) == ['map.ply']


def test_a_missing_folder_is_an_os_error_with_its_name(tmp_path):
    with pytest.raises(OSError, match='nowhere'):
        write_tum(tmp_path / 'nowhere' / 'a.tum', [], [])
