"""
Score a trajectory against ground truth, as plain values for metrics.json.

The estimate is in map units, the truth in metres. The figures depend only on the poses: the same
poses give the same bytes.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from lingbot_map.evaluation.metrics import (
    Alignment,
    ALIGNMENTS,
    associate,
    Ate,
    ate,
    MetricsError,
    path_length,
    rotation_angles_deg,
    rpe,
    rpe_over_path,
)
from lingbot_map.recordings.pose_files import PoseTrack
import numpy as np


@dataclass(frozen=True)
class ScoreOptions:
    """Settings of the scores."""

    tolerance_s: float = 0.02  # between the stamps of an image and its true pose
    rpe_frames: Sequence[int] = (1, 10)
    rpe_metres: Sequence[float] = (1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Matched:
    """Poses (camera to map) and, row by row, their true poses (camera to the truth's world)."""

    stamps_ns: np.ndarray  # (M,) int64
    T: np.ndarray  # (M, 4, 4)
    T_true: np.ndarray  # (M, 4, 4)
    largest_gap_s: float  # largest time difference of a pair


def match(
    stamps_ns: Sequence[int], T: np.ndarray, truth: PoseTrack, tolerance_s: float
) -> Matched:
    """
    Match poses with true poses by time, closest pairs first; each pose is used at most once.

    Raises MetricsError with both time ranges if there is no pair.
    """
    stamps_ns = np.asarray(stamps_ns, np.int64)
    ours, theirs = _pairs(stamps_ns, truth.stamps_ns, round(tolerance_s * 1e9))
    if not len(ours):
        raise MetricsError(
            f"no pose of '{truth.name}' is within {tolerance_s:g} s of an image: images "
            f'{_span(stamps_ns)}, poses {_span(truth.stamps_ns)}; do they use another time base?'
        )
    gaps = np.abs(stamps_ns[ours] - truth.stamps_ns[theirs])
    return Matched(stamps_ns[ours], T[ours], truth.T[theirs], float(gaps.max() * 1e-9))


def _pairs(
    stamps_ns: np.ndarray, true_stamps_ns: np.ndarray, tolerance_ns: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return index arrays of matched stamps (ascending) and their partners, without repeats."""
    ours, theirs = np.arange(len(stamps_ns)), np.arange(len(true_stamps_ns))
    partner = np.full(len(stamps_ns), -1)
    while True:
        i, j = associate(stamps_ns[ours], true_stamps_ns[theirs], tolerance_ns)
        if not len(i):
            found = np.flatnonzero(partner >= 0)
            return found, partner[found]
        nearest = np.full(len(theirs), -1)
        their_i, our_i = associate(true_stamps_ns[theirs], stamps_ns[ours], tolerance_ns)
        nearest[their_i] = our_i
        mutual = nearest[j] == i  # the others are matched again among the remaining stamps
        i, j = i[mutual], j[mutual]
        partner[ours[i]] = theirs[j]
        ours, theirs = np.delete(ours, i), np.delete(theirs, j)


def _span(stamps_ns: np.ndarray) -> str:
    if not len(stamps_ns):
        return 'none'
    return f'{stamps_ns[0] * 1e-9:.3f} to {stamps_ns[-1] * 1e-9:.3f} s'


def score(matched: Matched, options: ScoreOptions) -> tuple[dict, list[str]]:
    """Return the figures, None where undefined, and a note about each undefined one."""
    notes: list[str] = []
    positions, true_positions = matched.T[:, :3, 3], matched.T_true[:, :3, 3]
    errors = {
        alignment: _or_none(lambda a=alignment: ate(positions, true_positions, a), notes)
        for alignment in ALIGNMENTS
    }
    sim3 = errors['sim3']
    relative = {'se3': _relative(matched.T, matched.T_true, options), 'sim3': None}
    if sim3 is not None:
        scaled = matched.T.copy()
        scaled[:, :3, 3] *= sim3.alignment.scale
        relative['sim3'] = _relative(scaled, matched.T_true, options)
    length = path_length(true_positions)
    figures = {
        'path_length_m': length,
        'scale': None if sim3 is None else sim3.alignment.scale,
        'ate': {name: _plain(error) for name, error in errors.items()},
        'ate_percent_of_path': {
            name: 100 * error.error.rmse / length if error is not None and length else None
            for name, error in errors.items()
        },
        'rpe': relative,
        'drift_percent': {name: _drift(value) for name, value in relative.items()},
    }
    return figures, list(dict.fromkeys(notes))


def pose_errors(matched: Matched, alignment: Alignment) -> tuple[np.ndarray, np.ndarray]:
    """Return position errors (M,) [m] and rotation errors (M,) [deg] after the alignment."""
    distances = np.linalg.norm(alignment(matched.T[:, :3, 3]) - matched.T_true[:, :3, 3], axis=1)
    aligned = alignment.R @ matched.T[:, :3, :3]
    difference = np.swapaxes(matched.T_true[:, :3, :3], 1, 2) @ aligned
    return distances, rotation_angles_deg(difference)


def _or_none(measure: Callable[[], object], notes: list[str]):
    try:
        return measure()
    except MetricsError as error:
        notes.append(str(error))
        return None


def _plain(error: Ate | None) -> dict | None:
    return None if error is None else asdict(error.error)


def _relative(T: np.ndarray, T_true: np.ndarray, options: ScoreOptions) -> dict[str, dict]:
    """Return the relative errors by step, except steps longer than the path."""

    def measured(measure, steps):
        results = {}
        for step in steps:
            with suppress(MetricsError):
                results[f'{step:g}'] = asdict(measure(T, T_true, step))
        return results

    return {
        'frames': measured(rpe, options.rpe_frames),
        'metres': measured(rpe_over_path, options.rpe_metres),
    }


def _drift(relative: dict | None) -> float | None:
    """Return the mean translation error [% of length], averaged over the segment lengths."""
    if not relative or not relative['metres']:
        return None
    shares = [
        100 * error['translation']['mean'] / float(length)
        for length, error in relative['metres'].items()
    ]
    return float(np.mean(shares))
