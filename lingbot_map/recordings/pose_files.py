"""
Where the camera truly was: stamped poses from topics of a bag, from files, from a data set.

Poses are body-to-world. Files: TUM (stamp x y z qx qy qz qw, seconds), KITTI (twelve numbers a
line, one line per image) and EuRoC (commas; stamp in nanoseconds, x y z qw qx qy qz).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lingbot_map.geometry import quaternion_to_matrix, rigid
from lingbot_map.recordings.source import SourceError
import numpy as np
import torch

END_NS = 2**31 * 10**9  # stamps of ROS end there, in 2038
_FARTHEST = 1e9  # metres from the origin: larger numbers are no positions
_SKEW = 0.1  # of the columns of a rotation, which files round


@dataclass(frozen=True)
class PoseTrack:
    """Stamped poses of one body, ascending in time; SourceError for numbers that are no pose."""

    name: str  # topic or file
    stamps_ns: np.ndarray  # (N,) int64
    T: np.ndarray  # (N, 4, 4) float64, body to world
    body: str = ''  # frame id of the body, where it is known

    def __post_init__(self):
        wrong = np.flatnonzero(~are_poses(self.T))
        if len(wrong):
            raise _no_pose(self.name, self.stamps_ns[wrong[0]], self.T[wrong[0], :3].ravel())

    def moved_to(self, T_body_cam: np.ndarray) -> 'PoseTrack':
        """Return the poses of a camera that is mounted on the body at `T_body_cam` (4, 4)."""
        return replace(self, T=self.T @ T_body_cam)

    def shifted(self, offset_ns: int) -> 'PoseTrack':
        """Return the poses with `offset_ns` added to their stamps."""
        return replace(self, stamps_ns=self.stamps_ns + offset_ns)


def pose_track(name: str, rows: Sequence[tuple], body: str = '') -> PoseTrack:
    """
    Return the track of rows (stamp [ns], x, y, z, qx, qy, qz, qw) in any order.

    Raises SourceError for none, and for numbers that are no pose.
    """
    if not len(rows):
        raise SourceError(f"'{name}' holds no poses")
    rows = sorted(rows, key=lambda row: row[0])
    for stamp_ns in (rows[0][0], rows[-1][0]):
        if abs(stamp_ns) >= END_NS:
            raise SourceError(
                f"'{name}' has a pose at {stamp_ns * 1e-9:.3g} s: stamps are in seconds, those of "
                'EuRoC in nanoseconds'
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
    """Tell which of `T` (N, 4, 4) are rotations and positions that can be, (N,) bool."""
    R, position = T[:, :3, :3], T[:, :3, 3]
    with np.errstate(all='ignore'):
        skew = np.abs(R @ np.swapaxes(R, 1, 2) - np.eye(3)).max(axis=(1, 2))
        near = np.abs(position).max(axis=1) < _FARTHEST
        return near & (skew < _SKEW) & (np.linalg.det(R) > 0)


def _no_pose(name: str, stamp_ns: int, numbers: Sequence[float]) -> SourceError:
    shown = ' '.join(f'{number:g}' for number in numbers)
    return SourceError(
        f"'{name}' has no pose at {stamp_ns * 1e-9:.3f} s but the numbers {shown}: take out what "
        'is no pose'
    )


def read_truth_file(path: Path, image_stamps_ns: Sequence[int]) -> PoseTrack:
    """Return the poses of a TUM, KITTI or EuRoC file; raise SourceError if it is none of them."""
    rows, has_commas = _fields(path)
    if not rows:
        raise SourceError(f"'{path}' holds no poses")
    columns = {len(row) for row in rows}
    try:
        # The trackers of EuRoC (vicon0, mocap0) leave out what follows the quaternion.
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
        raise SourceError(f"'{path}' is not a file of poses: {error}") from None
    raise SourceError(
        f"'{path}' is not a file of poses: its lines need 8 numbers (TUM), 12 (KITTI) or the "
        'commas of EuRoC'
    )


def read_table(path: Path) -> list[list[str]]:
    """Return the fields of all lines that hold data; separated by commas if there are any."""
    return _fields(path)[0]


def _fields(path: Path) -> tuple[list[list[str]], bool]:
    """Return the fields of all lines that hold data, and whether commas separate them."""
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
    """Return decimal seconds exactly; a float would keep only microseconds of today's stamps."""
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
            'stamps, so there must be one line per image'
        )
    T = np.tile(np.eye(4), (len(rows), 1, 1))
    T[:, :3] = np.reshape(rows, (-1, 3, 4))
    return PoseTrack(str(path), np.array(stamps_ns, np.int64), T)
