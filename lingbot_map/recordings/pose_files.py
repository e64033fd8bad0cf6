"""
Ground-truth poses: stamped tracks, and the TUM, KITTI and EuRoC files that hold them.

Poses are body-to-world. TUM: stamp [s] x y z qx qy qz qw. KITTI: twelve numbers per line, one
line per image. EuRoC: comma-separated stamp [ns], x, y, z, qw, qx, qy, qz.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lingbot_map.geometry import quaternion_to_matrix, rigid
from lingbot_map.recordings.source import SourceError
import numpy as np
import torch

END_NS = 2**31 * 10**9  # end of ROS stamps, in 2038
_MAX_COORDINATE = 1e9  # [m]; anything larger is not a position
_MAX_SKEW = 0.1  # of R @ R.T from identity; files round their numbers


@dataclass(frozen=True)
class PoseTrack:
    """Stamped poses of one body, ascending in time; raises SourceError for an invalid pose."""

    name: str  # topic or file
    stamps_ns: np.ndarray  # (N,) int64
    T: np.ndarray  # (N, 4, 4) float64, body to world
    body: str = ''  # frame id of the body, '' if unknown

    def __post_init__(self):
        wrong = np.flatnonzero(~are_poses(self.T))
        if len(wrong):
            raise _no_pose(self.name, self.stamps_ns[wrong[0]], self.T[wrong[0], :3].ravel())

    def moved_to(self, T_body_cam: np.ndarray) -> 'PoseTrack':
        """Return the poses of a camera with the extrinsics `T_body_cam` (4, 4)."""
        return replace(self, T=self.T @ T_body_cam)

    def shifted(self, offset_ns: int) -> 'PoseTrack':
        """Return the poses with `offset_ns` added to their stamps."""
        return replace(self, stamps_ns=self.stamps_ns + offset_ns)


def pose_track(name: str, rows: Sequence[tuple], body: str = '') -> PoseTrack:
    """
    Return a track from rows (stamp [ns], x, y, z, qx, qy, qz, qw) in any order.

    Raises SourceError if there are no rows or a row is not a pose.
    """
    if not len(rows):
        raise SourceError(f"'{name}' has no poses")
    rows = sorted(rows, key=lambda row: row[0])
    for stamp_ns in (rows[0][0], rows[-1][0]):
        if abs(stamp_ns) >= END_NS:
            raise SourceError(
                f"'{name}' has a pose at {stamp_ns * 1e-9:.3g} s: stamps are in seconds (EuRoC: "
                'nanoseconds)'
            )
    values = torch.tensor([row[1:] for row in rows], dtype=torch.float64)
    lengths = values[:, 3:].norm(dim=1)
    wrong = ~(values.isfinite().all(1) & (lengths > 0.5) & (lengths < 2.0))
    if wrong.any():
        row = rows[int(wrong.nonzero()[0])]
        raise _no_pose(name, row[0], row[1:])
    T = rigid(quaternion_to_matrix(values[:, 3:]), values[:, :3])
    return PoseTrack(name, np.array([row[0] for row in rows], np.int64), T.numpy(), body)


def are_poses(T: np.ndarray) -> np.ndarray:
    """Return (N,) bool: which of `T` (N, 4, 4) are valid poses."""
    R, position = T[:, :3, :3], T[:, :3, 3]
    with np.errstate(all='ignore'):
        skew = np.abs(R @ np.swapaxes(R, 1, 2) - np.eye(3)).max(axis=(1, 2))
        near = np.abs(position).max(axis=1) < _MAX_COORDINATE
        return near & (skew < _MAX_SKEW) & (np.linalg.det(R) > 0)


def _no_pose(name: str, stamp_ns: int, numbers: Sequence[float]) -> SourceError:
    shown = ' '.join(f'{number:g}' for number in numbers)
    return SourceError(
        f"'{name}' has an invalid pose at {stamp_ns * 1e-9:.3f} s ({shown}): remove invalid poses"
    )


def read_truth_file(path: Path, image_stamps_ns: Sequence[int]) -> PoseTrack:
    """Return the poses of a TUM, KITTI or EuRoC file; raise SourceError for any other file."""
    rows, has_commas = _fields(path)
    if not rows:
        raise SourceError(f"'{path}' has no poses")
    columns = {len(row) for row in rows}
    try:
        # EuRoC tracker files (vicon0, mocap0) end after the quaternion: 8 columns, as in TUM.
        if has_commas and columns == {8} and abs(to_nanoseconds(rows[0][0])) >= END_NS:
            return _euroc_track(path, rows)
        if columns == {8}:
            return pose_track(
                str(path), [(to_nanoseconds(r[0]), *map(float, r[1:])) for r in rows]
            )
        if columns == {12}:
            return _kitti_track(path, [[float(v) for v in r] for r in rows], image_stamps_ns)
        if len(columns) == 1 and columns.pop() > 12:
            return _euroc_track(path, rows)
    except SourceError:
        raise
    except (ValueError, OverflowError) as error:
        raise SourceError(f"'{path}' is not a pose file: {error}") from None
    raise SourceError(
        f"'{path}' is not a pose file: lines need 8 numbers (TUM), 12 numbers (KITTI) or "
        'comma-separated fields (EuRoC)'
    )


def read_table(path: Path) -> list[list[str]]:
    """Return the fields of all data lines, split at commas if the file has any, else at spaces."""
    return _fields(path)[0]


def _fields(path: Path) -> tuple[list[list[str]], bool]:
    """Return the fields of all data lines, and whether commas separate them."""
    try:
        text = path.read_text(encoding='utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"'{path}' cannot be read: {error}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.lstrip().startswith('#')]
    has_commas = any(',' in line for line in lines)
    separator = ',' if has_commas else None
    return [[field.strip() for field in line.split(separator)] for line in lines], has_commas


def to_nanoseconds(seconds: str) -> int:
    """Convert decimal seconds exactly; a float keeps only microseconds of today's stamps."""
    whole, _, fraction = seconds.partition('.')
    if not (whole.isdecimal() and (fraction.isdecimal() or not fraction)):
        return round(float(seconds) * 1e9)
    return int(whole) * 10**9 + int(fraction[:9].ljust(9, '0'))


def _euroc_track(path: Path, rows: list[list[str]]) -> PoseTrack:
    reordered = [(int(r[0]), *map(float, (*r[1:4], *r[5:8], r[4]))) for r in rows]
    return pose_track(str(path), reordered)


def _kitti_track(path: Path, rows: list[list[float]], stamps_ns: Sequence[int]) -> PoseTrack:
    if len(rows) != len(stamps_ns):
        raise SourceError(
            f"'{path}' has {len(rows)} poses for {len(stamps_ns)} images: KITTI files have no "
            'stamps, so they need one line per image'
        )
    T = np.tile(np.eye(4), (len(rows), 1, 1))
    T[:, :3] = np.reshape(rows, (-1, 3, 4))
    return PoseTrack(str(path), np.array(stamps_ns, np.int64), T)
