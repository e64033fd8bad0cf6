"""Result files of a replay: trajectory.tum, map.ply, map.png and summary.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
import json
from pathlib import Path
import platform

from lingbot_map.evaluation.map_picture import render_map
from lingbot_map.evaluation.metrics import Ate, ate, path_length
from lingbot_map.evaluation.scoring import match
from lingbot_map.mapping.export import write_bytes, write_ply, write_tum
from lingbot_map.recordings.pose_files import PoseTrack
from lingbot_map.recordings.source import Source
from lingbot_map_ros.frame import SUPERSEDED
from lingbot_map_ros.replay.player import Player
import numpy as np

_TRUTH_TOLERANCE_S = 0.02
_ON_THE_WAY = 'on_the_way'  # sent, but not received by the node
_PACKAGES = ('lingbot_map_ros', 'torch', 'numpy', 'rclpy')


@dataclass(frozen=True)
class Comparison:
    """Comparison of the trajectory with ground truth."""

    ate: Ate
    path_length: float  # of the matched true poses
    truth_xyz: np.ndarray  # (K, 3), aligned to the map frame

    @property
    def percent_of_path(self) -> float:
        return 100 * self.ate.error.rmse / self.path_length

    def line(self) -> str:
        error = self.ate.error
        return (
            f'ATE after Sim(3) alignment: rmse {error.rmse:.3f} m, median {error.median:.3f} '
            f'm, max {error.max:.3f} m over {error.count} poses; '
            f'{self.percent_of_path:.1f} % of the {self.path_length:.2f} m path; '
            f'scale {self.ate.alignment.scale:.3f} m per map unit'
        )

    def values(self) -> dict[str, float]:
        return asdict(self.ate.error) | {
            'scale': self.ate.alignment.scale,
            'path_length': self.path_length,
            'percent_of_path': self.percent_of_path,
        }


@dataclass(frozen=True)
class Summary:
    """The content of summary.json."""

    frames_sent: int
    frames_out: int
    lost: int  # sent, without an expected pose
    dropped: dict[str, int]  # count by reason, and lost in transport to the node
    skipped: int  # not sent, since their stamps do not increase
    latency_ms: dict[str, float]  # from sending an image to receiving its odometry
    rate_hz: float
    heard: dict[str, int]  # received outputs
    ate: dict[str, float] | None  # against ground truth
    versions: dict[str, str]
    settings: dict[str, object]

    def line(self) -> str:
        words = [f'{self.frames_sent} images sent, {self.frames_out} poses, {self.lost} lost']
        words += [f'{count} dropped ({reason})' for reason, count in self.dropped.items()]
        if self.skipped:
            words.append(f'{self.skipped} skipped (their stamps do not increase)')
        if self.latency_ms:
            words.append(
                f'{self.rate_hz:.1f} Hz, latency p50 {self.latency_ms["p50"]:.0f} ms, '
                f'p99 {self.latency_ms["p99"]:.0f} ms'
            )
        return ', '.join(words)


@dataclass(frozen=True)
class Drawing:
    """Trajectory T_map_cam (N, 4, 4), map points and comparison with ground truth."""

    stamps_ns: list[int]
    T_map_cam: np.ndarray
    points: np.ndarray
    comparison: Comparison | None


def compare(stamps_ns: list[int], T_map_cam: np.ndarray, truth: PoseTrack) -> Comparison:
    """Compare with ground truth after Sim(3) alignment; raise MetricsError if impossible."""
    matched = match(stamps_ns, T_map_cam, truth, _TRUTH_TOLERANCE_S)
    truth_xyz = matched.T_true[:, :3, 3]
    error = ate(matched.T[:, :3, 3], truth_xyz, 'sim3')
    return Comparison(error, path_length(truth_xyz), error.alignment.inverse()(truth_xyz))


def summarize(
    player: Player, source: Source, comparison: Comparison | None, settings: dict[str, object]
) -> Summary:
    """Return the figures of a replay; with queue lossless, superseded images count as lost."""
    dropped = {
        key.removeprefix('dropped.'): count
        for key, count in player.node_counts.items()
        if key.startswith('dropped.') and count
    }
    received = [stamp for stamp in player.received if stamp in player.sent]
    expected = len(player.sent)
    if settings['queue'] == 'latest':
        on_the_way = expected - player.node_counts['images_in']
        if on_the_way > 0:  # best effort: the middleware only keeps the newest image
            dropped[_ON_THE_WAY] = on_the_way
        expected -= dropped.get(SUPERSEDED, 0) + dropped.get(_ON_THE_WAY, 0)
    return Summary(
        frames_sent=len(player.sent),
        frames_out=len(received),
        lost=expected - len(received),
        dropped=dropped,
        skipped=source.skipped,
        latency_ms=_latency_percentiles(player, received),
        rate_hz=_rate(player, received),
        heard={
            'odometry': len(player.received),
            'transforms': len(player.transforms),
            'path_poses': player.path_poses,
            'clouds': player.clouds,
            'cloud_points': player.cloud_points,
        },
        ate=comparison and comparison.values(),
        versions=_versions(),
        settings=settings,
    )


def write(out: Path, title: str, summary: Summary, drawing: Drawing) -> None:
    """Write all files to the folder `out`, which is created if missing; writes are atomic."""
    truth_xyz = None if drawing.comparison is None else drawing.comparison.truth_xyz
    picture = render_map(drawing.points, drawing.T_map_cam[:, :3, 3], truth_xyz, title)
    out.mkdir(parents=True, exist_ok=True)
    write_tum(out / 'trajectory.tum', drawing.stamps_ns, drawing.T_map_cam)
    write_ply(out / 'map.ply', drawing.points)
    write_bytes(out / 'map.png', picture)
    write_bytes(out / 'summary.json', (json.dumps(asdict(summary), indent=2) + '\n').encode())


def _latency_percentiles(player: Player, received: list[int]) -> dict[str, float]:
    if not received:
        return {}
    latencies_ms = [1e3 * (player.received[stamp] - player.sent[stamp]) for stamp in received]
    return {f'p{p}': round(float(np.percentile(latencies_ms, p)), 2) for p in (50, 95, 99)}


def _rate(player: Player, received: list[int]) -> float:
    if not received:
        return 0.0
    seconds = max(player.received[stamp] for stamp in received) - min(player.sent.values())
    return round(len(received) / seconds, 2)


def _versions() -> dict[str, str]:
    versions = {'python': platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # from a ROS distribution, unknown to pip
            versions[package] = 'unknown'
    return versions
