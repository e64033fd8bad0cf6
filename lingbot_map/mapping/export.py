"""
Write trajectories, point clouds and depth as files for other tools.

Writes are atomic: each file is written under a temporary name and then renamed, so `path` always
has the old or the complete new file. Poses are (4, 4) camera-to-world, clouds are POINT_DTYPE.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
import os
from pathlib import Path
from typing import BinaryIO

from lingbot_map.geometry import matrix_to_quaternion
from lingbot_map.mapping.points import POINT_DTYPE
import numpy as np
from PIL import Image
import torch

_PLY_DTYPE = np.dtype(
    [
        ('x', '<f4'),
        ('y', '<f4'),
        ('z', '<f4'),
        ('red', 'u1'),
        ('green', 'u1'),
        ('blue', 'u1'),
        ('confidence', '<f4'),
    ]
)
_PLY_TYPES = {'<f4': 'float', '|u1': 'uchar'}


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Open a temporary file in the folder of `path`; rename it to `path` if the block succeeds."""
    path = Path(path)
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.part')
    try:
        with open(temporary, 'wb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Write a file atomically."""
    with replacing(path) as file:
        file.write(data)


def write_tum(
    path: str | os.PathLike, stamps_ns: Sequence[int], T_list: Sequence[np.ndarray]
) -> None:
    """Write lines `stamp tx ty tz qx qy qz qw`; stamps in seconds with nine decimals."""
    lines = [
        f'{stamp // 10**9}.{stamp % 10**9:09d} ' + ' '.join(f'{v:.9g}' for v in (*xyz, *q_xyzw))
        for stamp, xyz, q_xyzw in zip(stamps_ns, *_positions_and_quaternions(T_list), strict=True)
    ]
    _write_lines(path, lines)


def write_kitti(path: str | os.PathLike, T_list: Sequence[np.ndarray]) -> None:
    """Write the upper three rows of each pose as a line of twelve numbers."""
    lines = (' '.join(f'{v:.9g}' for v in T[:3].ravel()) for T in T_list)
    _write_lines(path, lines)


def write_ply(path: str | os.PathLike, points: np.ndarray) -> None:
    """Write a binary little-endian PLY with x y z red green blue confidence."""
    vertices = np.empty(len(points), _PLY_DTYPE)
    for name in ('x', 'y', 'z', 'confidence'):
        vertices[name] = points[name]
    for name, shift in (('red', 16), ('green', 8), ('blue', 0)):
        vertices[name] = points['rgb'] >> shift & 0xFF
    properties = ''.join(
        f'property {_PLY_TYPES[_PLY_DTYPE[name].str]} {name}\n' for name in _PLY_DTYPE.names
    )
    header = (
        f'ply\nformat binary_little_endian 1.0\nelement vertex {len(points)}\n'
        f'{properties}end_header\n'
    )
    with replacing(path) as file:
        file.write(header.encode())
        file.write(vertices)


def write_pcd(path: str | os.PathLike, points: np.ndarray) -> None:
    """Write a binary PCD 0.7 with x y z rgb confidence; rgb is packed into a float as in PCL."""
    assert points.dtype == POINT_DTYPE, f'points have dtype {points.dtype}'
    count = len(POINT_DTYPE.names)
    header = (
        f'# .PCD v0.7 - Point Cloud Data file format\nVERSION 0.7\n'
        f'FIELDS {" ".join(POINT_DTYPE.names)}\nSIZE{" 4" * count}\nTYPE{" F" * count}\n'
        f'COUNT{" 1" * count}\nWIDTH {len(points)}\nHEIGHT 1\nVIEWPOINT 0 0 0 1 0 0 0\n'
        f'POINTS {len(points)}\nDATA binary\n'
    )
    with replacing(path) as file:
        file.write(header.encode())
        file.write(np.ascontiguousarray(points))


def write_depth_png(
    path: str | os.PathLike, depth: np.ndarray, steps_per_unit: float = 1000.0
) -> None:
    """
    Write depth (H, W) as a 16-bit grey PNG with `steps_per_unit` grey levels per unit of depth.

    Depth that is not finite, not positive or too large for 16 bits becomes 0.
    """
    with np.errstate(invalid='ignore'):
        levels = np.rint(np.asarray(depth, np.float64) * steps_per_unit)
        levels = np.where((levels > 0) & (levels <= 65535), levels, 0)
    with replacing(path) as file:
        Image.fromarray(levels.astype(np.uint16)).save(file, format='PNG')


def _write_lines(path: str | os.PathLike, lines: Iterable[str]) -> None:
    write_bytes(path, ''.join(f'{line}\n' for line in lines).encode())


def _positions_and_quaternions(T_list: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    T = np.asarray(T_list, np.float64).reshape(-1, 4, 4)
    return T[:, :3, 3], matrix_to_quaternion(torch.from_numpy(T[:, :3, :3].copy())).numpy()
