"""How a live run differs from the lossless evaluation of the same recording."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from lingbot_map.evaluation.metrics import ate, ErrorStatistics, MetricsError, path_length
from lingbot_map.evaluation.scoring import match
from lingbot_map.recordings.pose_files import read_truth_file
import numpy as np

TRAJECTORY = 'trajectory.tum'
_SAME_STAMP_S = 1e-6


@dataclass(frozen=True)
class LiveCheck:
    """Two trajectories of one recording, both in the map frame of the first image."""

    lossless_poses: int
    common_poses: int
    path_length: float  # of the common lossless poses, map units
    ate: ErrorStatistics  # between the two as they are, map units
    ate_sim3: ErrorStatistics | None  # after alignment; None if one of them does not move

    def values(self) -> dict[str, object]:
        return asdict(self)

    def line(self) -> str:
        words = (
            f'against lossless: {self.common_poses} of {self.lossless_poses} poses, ATE '
            f'{self.ate.rmse:.4g} map units over a path of {self.path_length:.4g}'
        )
        if self.ate_sim3 is None:
            return words
        return f'{words}, {self.ate_sim3.rmse:.4g} after Sim(3) alignment'


def compare_with_lossless(stamps_ns: list[int], T_map_cam: np.ndarray, folder: Path) -> LiveCheck:
    """
    Compare a live trajectory with the one that an evaluation left in `folder`.

    Raises SourceError if that cannot be read, MetricsError if the two share no stamps.
    """
    lossless = read_truth_file(folder / TRAJECTORY, [])
    common = match(stamps_ns, T_map_cam, lossless, _SAME_STAMP_S)
    live, reference = common.T[:, :3, 3], common.T_true[:, :3, 3]
    try:
        aligned = ate(live, reference, 'sim3').error
    except MetricsError:
        aligned = None
    return LiveCheck(
        len(lossless.stamps_ns),
        len(live),
        path_length(reference),
        ate(live, reference, 'none').error,
        aligned,
    )
