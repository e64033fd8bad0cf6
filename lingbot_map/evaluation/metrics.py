"""
Trajectory errors: similarity alignment, absolute (ATE) and relative (RPE) errors.

Positions are (N, 3) and poses `T` (N, 4, 4), numpy arrays. Row n of estimate and truth has the
same time (`associate` finds such pairs). Errors are in the unit of the truth.
"""

from dataclasses import dataclass

from lingbot_map.errors import UserError
import numpy as np

ALIGNMENTS = ('none', 'se3', 'sim3')
_LENGTH_TOLERANCE = 0.1  # of the length of a segment
_DEGENERATE = 1e-12  # variance of positions below which a path does not move


class MetricsError(UserError):
    """Two trajectories cannot be compared; the text is one line with the reason."""


@dataclass(frozen=True)
class Alignment:
    """Alignment transform: maps a point p to `scale * R @ p + t`."""

    scale: float
    R: np.ndarray  # (3, 3)
    t: np.ndarray  # (3,)

    def __call__(self, points: np.ndarray) -> np.ndarray:
        """Return the transformed points (N, 3)."""
        return self.scale * points @ self.R.T + self.t

    def inverse(self) -> 'Alignment':
        """Return the inverse transform."""
        R = self.R.T
        return Alignment(1.0 / self.scale, R, -(R @ self.t) / self.scale)


@dataclass(frozen=True)
class ErrorStatistics:
    """Summary of a list of errors."""

    rmse: float
    mean: float
    median: float
    max: float
    count: int


@dataclass(frozen=True)
class Ate:
    """Absolute trajectory error after an alignment."""

    error: ErrorStatistics  # distances of positions, unit of the truth
    alignment: Alignment  # from estimate to truth


@dataclass(frozen=True)
class Rpe:
    """Relative pose error."""

    translation: ErrorStatistics  # unit of the truth
    rotation_deg: ErrorStatistics


def umeyama(source: np.ndarray, target: np.ndarray, with_scale: bool = True) -> Alignment:
    """
    Return the least-squares similarity from source (N, 3) to target (N, 3).

    Source: Umeyama, PAMI 1991. For collinear or fewer than three points the rotation is not
    unique; the result is one of the optimal ones. Raises MetricsError if the scale is undefined.
    """
    source, target = _paired(source, target)
    source_mean, target_mean = source.mean(axis=0), target.mean(axis=0)
    source_0, target_0 = source - source_mean, target - target_mean
    U, singular, Vt = np.linalg.svd(target_0.T @ source_0 / len(source))
    mirror = np.array([1.0, 1.0, np.sign(np.linalg.det(U) * np.linalg.det(Vt))])
    R = U * mirror @ Vt
    scale = _scale(source_0, target_0, singular @ mirror) if with_scale else 1.0
    return Alignment(scale, R, target_mean - scale * R @ source_mean)


def _scale(source_0: np.ndarray, target_0: np.ndarray, covariance: float) -> float:
    for name, points in (('estimated', source_0), ('true', target_0)):
        if np.square(points).sum(axis=1).mean() <= _DEGENERATE:
            raise MetricsError(f'the {name} path does not move: no scale can be found')
    scale = covariance / np.square(source_0).sum(axis=1).mean()
    if scale <= 0:
        raise MetricsError('the two paths have nothing in common: no positive scale fits')
    return float(scale)


def ate(estimate: np.ndarray, truth: np.ndarray, alignment: str = 'sim3') -> Ate:
    """
    Return the absolute trajectory error of positions (N, 3) after aligning estimate to truth.

    `alignment` is one of ALIGNMENTS. Raises MetricsError for paths that cannot be aligned.
    """
    if alignment not in ALIGNMENTS:
        raise ValueError(f"alignment is '{alignment}': set it to one of {', '.join(ALIGNMENTS)}")
    estimate, truth = _paired(estimate, truth)
    if alignment == 'none':
        similarity = Alignment(1.0, np.eye(3), np.zeros(3))
    else:
        similarity = umeyama(estimate, truth, with_scale=alignment == 'sim3')
    errors = np.linalg.norm(similarity(estimate) - truth, axis=1)
    return Ate(_statistics(errors), similarity)


def rpe(estimate: np.ndarray, truth: np.ndarray, delta: int = 1) -> Rpe:
    """
    Return the relative pose error of poses (N, 4, 4) over steps of `delta` poses.

    Poses are body-to-world and must have the same scale; their world frames may differ.
    """
    if delta < 1:
        raise ValueError(f'delta is {delta}: set it to 1 or more')
    if len(truth) <= delta:
        raise MetricsError(f'{len(truth)} poses are too few for a step of {delta}')
    first = np.arange(len(truth) - delta)
    return _rpe(estimate, truth, first, first + delta)


def rpe_over_path(estimate: np.ndarray, truth: np.ndarray, length: float) -> Rpe:
    """
    Return the relative pose error of poses (N, 4, 4) over path segments of `length`.

    A segment goes from each pose to the later pose whose distance along the true path is closest
    to `length` (unit of the truth); segments that are off by more than 10 % are skipped.
    """
    if not length > 0:
        raise ValueError(f'length is {length}: set it to a positive number')
    steps = np.linalg.norm(np.diff(truth[:, :3, 3], axis=0), axis=1)
    along = np.concatenate(([0.0], np.cumsum(steps)))
    first = np.arange(len(truth) - 1)
    second = np.searchsorted(along, along[first] + length).clip(max=len(truth) - 1)
    before = np.maximum(second - 1, first + 1)
    deviation = np.abs(along[np.stack((before, second))] - along[first] - length)
    second = np.where(deviation[0] <= deviation[1], before, second)
    fits = deviation.min(axis=0) <= _LENGTH_TOLERANCE * length
    if not fits.any():
        raise MetricsError(f'the path of {along[-1]:.3g} is too short for a segment of {length:g}')
    return _rpe(estimate, truth, first[fits], second[fits])


def _rpe(estimate: np.ndarray, truth: np.ndarray, first: np.ndarray, second: np.ndarray) -> Rpe:
    if estimate.shape != truth.shape or estimate.shape[1:] != (4, 4):
        raise MetricsError(
            f'poses have shapes {estimate.shape} and {truth.shape}: both need (N, 4, 4)'
        )
    if not (np.isfinite(estimate).all() and np.isfinite(truth).all()):
        raise MetricsError('a pose is not finite')
    step_estimate = np.linalg.inv(estimate[first]) @ estimate[second]
    step_truth = np.linalg.inv(truth[first]) @ truth[second]
    difference = np.linalg.inv(step_truth) @ step_estimate
    return Rpe(
        _statistics(np.linalg.norm(difference[:, :3, 3], axis=1)),
        _statistics(rotation_angles_deg(difference[:, :3, :3])),
    )


def path_length(positions: np.ndarray) -> float:
    """Return the length of the polyline through positions (N, 3)."""
    return float(np.linalg.norm(np.diff(positions, axis=0), axis=1).sum())


def associate(
    stamps_ns: np.ndarray, other_stamps_ns: np.ndarray, tolerance_ns: int
) -> tuple[np.ndarray, np.ndarray]:
    """
    Return index arrays (i, j) such that other_stamps_ns[j] is nearest to stamps_ns[i].

    Stamps are int64 nanoseconds, `other_stamps_ns` ascending. Stamps without a partner within
    `tolerance_ns` are skipped.
    """
    stamps, others = np.asarray(stamps_ns, np.int64), np.asarray(other_stamps_ns, np.int64)
    if not len(stamps) or not len(others):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    after = np.searchsorted(others, stamps).clip(max=len(others) - 1)
    before = (after - 1).clip(min=0)
    nearest = np.where(stamps - others[before] <= others[after] - stamps, before, after)
    near = np.flatnonzero(np.abs(others[nearest] - stamps) <= tolerance_ns)
    return near, nearest[near]


def rotation_angles_deg(R: np.ndarray) -> np.ndarray:
    """Return the angles (N,) of rotations (N, 3, 3); atan2 is accurate for all angles."""
    axis = np.stack((R[:, 2, 1] - R[:, 1, 2], R[:, 0, 2] - R[:, 2, 0], R[:, 1, 0] - R[:, 0, 1]), 1)
    cosine = np.trace(R, axis1=1, axis2=2) - 1
    return np.degrees(np.arctan2(np.linalg.norm(axis, axis=1), cosine))


def _paired(estimate: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    estimate, truth = np.asarray(estimate, np.float64), np.asarray(truth, np.float64)
    if estimate.shape != truth.shape or estimate.ndim != 2 or estimate.shape[1] != 3:
        raise MetricsError(
            f'positions have shapes {estimate.shape} and {truth.shape}: both need (N, 3)'
        )
    if not len(estimate):
        raise MetricsError('there are no pairs of positions to compare')
    if not (np.isfinite(estimate).all() and np.isfinite(truth).all()):
        raise MetricsError('a position is not finite')
    return estimate, truth


def _statistics(errors: np.ndarray) -> ErrorStatistics:
    return ErrorStatistics(
        rmse=float(np.sqrt(np.mean(np.square(errors)))),
        mean=float(errors.mean()),
        median=float(np.median(errors)),
        max=float(errors.max()),
        count=len(errors),
    )
