"""
Read data sets in their published layouts: TUM RGB-D, EuRoC, KITTI odometry, 7-Scenes.

They include stamps and ground-truth poses. The path is the folder of a sequence; for EuRoC and
KITTI it may also be the folder of one camera of the sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lingbot_map.recordings.pose_files import (
    are_poses,
    END_NS,
    PoseTrack,
    read_table,
    read_truth_file,
    to_nanoseconds,
)
from lingbot_map.recordings.source import even_stamps, FileSource, image_files, SourceError
import numpy as np
import yaml

SEVEN_SCENES_FPS = 30.0
_KITTI_CAMERAS = ('image_2', 'image_0', 'image_3', 'image_1')


@dataclass(frozen=True)
class Layout:
    """Files, stamps and ground truth of one sequence."""

    files: list[Path]
    stamps_ns: list[int]
    truth: Callable[[], PoseTrack] | None


class DatasetSource(FileSource):
    """Read the images of a data set; `truth()` returns the camera's true poses or None."""

    def __init__(self, path: Path, layout: Layout):
        _check(path, layout)
        # 0 means "not set" in ROS
        super().__init__(layout.files, [max(stamp_ns, 1) for stamp_ns in layout.stamps_ns])
        self._truth = layout.truth

    def truth(self) -> PoseTrack | None:
        return self._truth() if self._truth else None


def open_dataset(path: Path, fps: float = 0.0) -> DatasetSource | None:
    """
    Return the sequence in the folder `path`, or None if the layout is unknown.

    `fps` [Hz] is for layouts without stamps. Raises SourceError if files are missing or invalid.
    """
    for read_layout in (_tum, _euroc, _kitti):
        layout = read_layout(path)
        if layout is not None:
            if fps:
                raise SourceError(f"'{path}' has stamps of its own: remove fps")
            return DatasetSource(path, layout)
    layout = _seven_scenes(path, fps or SEVEN_SCENES_FPS)
    return None if layout is None else DatasetSource(path, layout)


def _check(path: Path, layout: Layout) -> None:
    if not layout.files:
        raise SourceError(f"'{path}' lists no images")
    if len(layout.files) != len(layout.stamps_ns):
        raise SourceError(
            f"'{path}' has {len(layout.files)} images and {len(layout.stamps_ns)} stamps"
        )
    missing = next((file for file in layout.files if not file.is_file()), None)
    if missing is not None:
        raise SourceError(f"'{path}' lists '{missing}', which does not exist")
    for before, after in pairwise(layout.stamps_ns):
        if after <= before:
            raise SourceError(
                f"'{path}' has stamps that do not increase: {before * 1e-9:.6f} s is followed by "
                f'{after * 1e-9:.6f} s'
            )
    for stamp_ns in (layout.stamps_ns[0], layout.stamps_ns[-1]):
        if not 0 <= stamp_ns < END_NS:
            raise SourceError(
                f"'{path}' has an image at {stamp_ns * 1e-9:.3g} s: stamps are in seconds (EuRoC: "
                'nanoseconds) and not negative'
            )


def _tum(path: Path) -> Layout | None:
    index = path / 'rgb.txt'
    if not index.is_file():
        return None
    rows = read_table(index)
    stamps_ns = [_stamp(index, row[0]) for row in rows]
    truth = path / 'groundtruth.txt'
    return Layout([path / row[-1] for row in rows], stamps_ns, _from_file(truth, stamps_ns))


def _euroc(path: Path) -> Layout | None:
    cameras = (path / 'mav0' / 'cam0', path / 'cam0', path)
    camera = next((c for c in cameras if (c / 'data.csv').is_file()), None)
    if camera is None or not (camera / 'data').is_dir():
        return None
    index = camera / 'data.csv'
    rows = read_table(index)
    stamps_ns = [_number(index, row[0], int) for row in rows]
    truth = camera.parent / 'state_groundtruth_estimate0' / 'data.csv'
    read = _from_file(truth, stamps_ns)
    if read is None:
        return Layout([camera / 'data' / row[-1] for row in rows], stamps_ns, None)
    return Layout(
        [camera / 'data' / row[-1] for row in rows],
        stamps_ns,
        lambda: read().moved_to(_euroc_extrinsics(camera / 'sensor.yaml')),
    )


def _euroc_extrinsics(path: Path) -> np.ndarray:
    """Return the extrinsics T_body_cam (4, 4) from sensor.yaml."""
    try:
        T = np.array(yaml.safe_load(path.read_text())['T_BS']['data'], float).reshape(4, 4)
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError):
        T = np.zeros((4, 4))
    if not are_poses(T[None]).all():
        raise SourceError(f"'{path}' has no valid camera extrinsics T_BS")
    return T


def _kitti(path: Path) -> Layout | None:
    sequence = path.parent if path.name in _KITTI_CAMERAS else path
    times = sequence / 'times.txt'
    names = (path.name,) if sequence != path else _KITTI_CAMERAS
    camera = next((n for n in names if (sequence / n).is_dir()), None)
    if camera is None or not times.is_file():
        return None
    stamps_ns = [_stamp(times, row[0]) for row in read_table(times)]
    truth = sequence.parent.parent / 'poses' / f'{sequence.name}.txt'
    read = _from_file(truth, stamps_ns)
    files = image_files(sequence / camera)
    if read is None:
        return Layout(files, stamps_ns, None)
    return Layout(files, stamps_ns, lambda: read().moved_to(_kitti_extrinsics(sequence, camera)))


def _kitti_extrinsics(sequence: Path, camera: str) -> np.ndarray:
    """Return T_cam0_cam (4, 4) of a rectified camera; the poses are those of camera 0."""
    T_cam0_cam = np.eye(4)
    number = camera.removeprefix('image_')
    calibration = sequence / 'calib.txt'
    if not calibration.is_file():
        if number != '0':
            raise SourceError(
                f"'{calibration}' is missing: it has the extrinsics of {camera}, the poses are "
                'those of image_0'
            )
        return T_cam0_cam
    for row in read_table(calibration):
        if row[0] == f'P{number}:' and len(row) == 13:
            P = np.array([_number(calibration, value, float) for value in row[1:]]).reshape(3, 4)
            if np.isfinite(P).all() and np.linalg.det(P[:, :3]):
                T_cam0_cam[:3, 3] = -np.linalg.solve(P[:, :3], P[:, 3])
                return T_cam0_cam
    raise SourceError(
        f"'{calibration}' has no line P{number} with the twelve numbers of a projection matrix"
    )


def _seven_scenes(path: Path, fps: float) -> Layout | None:
    files = sorted(path.glob('frame-*.color.png'))
    if not files:
        return None
    stamps_ns = even_stamps(len(files), fps)
    poses = [file.with_name(file.name.replace('.color.png', '.pose.txt')) for file in files]
    if not any(pose.is_file() for pose in poses):
        return Layout(files, stamps_ns, None)

    def truth() -> PoseTrack:
        T = np.stack([_seven_scenes_pose(pose) for pose in poses])
        return PoseTrack(f'{path}/frame-*.pose.txt', np.array(stamps_ns, np.int64), T)

    return Layout(files, stamps_ns, truth)


def _seven_scenes_pose(path: Path) -> np.ndarray:
    try:
        T = np.array(path.read_text().split(), float).reshape(4, 4)
    except (OSError, ValueError):
        T = np.zeros((4, 4))
    if not are_poses(T[None]).all():
        raise SourceError(f"'{path}' does not contain a 4x4 pose matrix")
    return T


def _from_file(path: Path, stamps_ns: list[int]) -> Callable[[], PoseTrack] | None:
    return (lambda: read_truth_file(path, stamps_ns)) if path.is_file() else None


def _stamp(path: Path, seconds: str) -> int:
    return _number(path, seconds, to_nanoseconds)


def _number(path: Path, text: str, convert: Callable[[str], float]) -> float:
    try:
        return convert(text)
    except (ValueError, OverflowError):
        raise SourceError(f"'{path}' has '{text}' instead of a number") from None
