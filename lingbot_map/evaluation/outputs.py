"""
Write the files of one evaluation: trajectory, map, metrics, plots, report and exports.

`EvaluationFiles` collects frames during the run and writes everything at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import json
from pathlib import Path

from lingbot_map.evaluation.exports import ColmapModel, DepthExport, RerunLog
from lingbot_map.evaluation.folders import RUN_FILE
from lingbot_map.evaluation.map_picture import render_map
from lingbot_map.evaluation.metrics import Alignment, ate, MetricsError, path_length
from lingbot_map.evaluation.plots import (
    draw_errors,
    draw_strip,
    draw_trajectories,
    Preview,
    PreviewKeeper,
)
from lingbot_map.evaluation.recording import Plan, SelectedImages
from lingbot_map.evaluation.report import as_html, Report
from lingbot_map.evaluation.run import EstimatedPath, PlacedFrame
from lingbot_map.evaluation.scoring import match, Matched, score, ScoreOptions
from lingbot_map.mapping.export import write_bytes, write_kitti, write_ply, write_tum
from lingbot_map.mapping.map_store import MapStore
from lingbot_map.mapping.points import PointFilter
import numpy as np
import yaml

RANDOM_NOTE = 'The weights are random: path and map mean nothing.'
_PREVIEWS = 6


class EvaluationFiles:
    """
    Collects what the files of one evaluation need, and writes them to `folder`.

    Call each of `consumers` with every placed frame. Use it as a context manager, so that a failed
    run leaves no file outside of `folder`.
    """

    def __init__(self, folder: Path, planned: Plan):
        settings = planned.settings
        self._folder, self._planned = folder, planned
        self._store = MapStore(settings['map.voxel_size'], settings['map.max_points'])
        self._previews = PreviewKeeper(_evenly(planned.images))
        self.consumers: list[Callable[[PlacedFrame], None]] = [self._previews]
        self._depth = self._colmap = self._rerun = None
        choose = _point_filter(settings)
        if settings['map.voxel_size']:
            self.consumers.append(_into_map(self._store, choose))
        if settings['depth'] != 'off':
            self._depth = DepthExport(folder / 'depth', settings['depth'])
            self.consumers.append(self._depth)
        if settings['colmap']:
            self._colmap = ColmapModel(folder / 'colmap')
            self.consumers.append(self._colmap)
        if planned.rerun is not None:
            self._rerun = RerunLog(planned.rerun, choose)
            self.consumers.append(self._rerun)

    def __enter__(self) -> EvaluationFiles:
        return self

    def __exit__(self, *_) -> None:
        if self._rerun is not None:
            self._rerun.close()

    def write(self, estimate: EstimatedPath, times: dict, record: dict) -> None:
        """Write all files; `times` is the content of timing.json, `record` that of run.yaml."""
        folder, points = self._folder, self._store.snapshot()
        write_tum(folder / 'trajectory.tum', estimate.stamps_ns, estimate.T_map_cam)
        write_kitti(folder / 'trajectory.kitti', estimate.T_map_cam)
        write_ply(folder / 'map.ply', points)
        if self._depth is not None:
            self._depth.write()
        if self._colmap is not None:
            self._colmap.write(points)
        result = measure(self._planned, estimate)
        _write_json(folder / 'metrics.json', result.metrics)
        _write_json(folder / 'timing.json', times)
        text = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
        write_bytes(folder / RUN_FILE, text.encode())
        illustrate(folder, result, points, self._previews.previews, times, record)
        if self._rerun is not None:
            self._rerun.finish(estimate.T_map_cam, result.matched, result.to_truth)


def _evenly(images: SelectedImages) -> list[int]:
    """Return the stamps of a few evenly spaced images, including first and last."""
    positions = np.linspace(0, len(images) - 1, min(_PREVIEWS, len(images))).round().astype(int)
    return [images.stamps_ns[images.chosen[i]] for i in positions]


def _point_filter(settings: dict) -> PointFilter:
    return PointFilter(
        settings['points.min_confidence'],
        settings['points.max_depth'],
        settings['points.stride'],
        settings['points.keep_percentile'],
        settings['points.edge_threshold'],
    )


def _into_map(store: MapStore, choose: PointFilter) -> Callable[[PlacedFrame], None]:
    def insert(placed: PlacedFrame) -> None:
        if placed.frame.is_keyframe:
            store.insert(choose(placed.frame))

    return insert


def _write_json(path: Path, content: dict) -> None:
    write_bytes(path, (json.dumps(content, indent=2, allow_nan=False) + '\n').encode())


@dataclass(frozen=True)
class Result:
    """The metrics of a run, and the data that plots need."""

    name: str
    estimate: EstimatedPath
    metrics: dict
    notes: list[str]
    matched: Matched | None
    to_truth: Alignment | None  # Sim(3) from map to the truth's world


def measure(planned: Plan, estimate: EstimatedPath) -> Result:
    """Return the metrics of a trajectory; they depend only on its poses and the truth."""
    settings, truth = planned.settings, planned.truth
    notes = [RANDOM_NOTE] if settings['checkpoint'] == 'random' else []
    notes += planned.notes
    metrics = {
        'images': estimate.images,
        'poses': len(estimate.stamps_ns),
        'keyframes': int(estimate.is_keyframe.sum()),
        'windows': estimate.windows,
        'coverage_percent': 100 * len(estimate.stamps_ns) / estimate.images,
        'duration_s': (estimate.stamps_ns[-1] - estimate.stamps_ns[0]) * 1e-9,
        'path_length_map_units': path_length(estimate.T_map_cam[:, :3, 3]),
        'ground_truth': None,
    }
    matched = to_truth = None
    if truth is not None:
        matched = match(estimate.stamps_ns, estimate.T_map_cam, truth, settings['tolerance'])
        options = ScoreOptions(
            settings['tolerance'], settings['rpe_frames'], settings['rpe_metres']
        )
        figures, lines = score(matched, options)
        notes += [*_coverage_note(len(matched.stamps_ns), estimate.images), *lines]
        notes += _frame_note(planned)
        to_truth = _alignment(matched)
        metrics['ground_truth'] = {
            'name': truth.name,
            'tolerance_s': settings['tolerance'],
            'offset_s': settings['gt_offset'],
            'matched': len(matched.stamps_ns),
            'matched_percent': 100 * len(matched.stamps_ns) / estimate.images,
            'largest_gap_s': matched.largest_gap_s,
        }
        metrics |= figures
    metrics['notes'] = notes
    return Result(planned.recording.name, estimate, metrics, notes, matched, to_truth)


def _coverage_note(matched: int, images: int) -> list[str]:
    """Return a note if only a small part has true poses, since figures may then look good."""
    if 2 * matched >= images:
        return []
    return [f'Only {matched} of {images} images have a true pose: the figures are about these.']


def _frame_note(planned: Plan) -> list[str]:
    """Return a note if the truth is probably of another frame than the camera's."""
    body, camera = planned.truth.body, planned.recording.source.frame_id
    if not body or body == camera or planned.settings['body_to_camera']:
        return []
    return [
        f"The ground truth is about '{body}', the images are of '{camera}', and body_to_camera is "
        'not set: the distance between the two counts as error, and rotations are not comparable.'
    ]


def _alignment(matched: Matched) -> Alignment | None:
    try:
        return ate(matched.T[:, :3, 3], matched.T_true[:, :3, 3], 'sim3').alignment
    except MetricsError:
        return None


def illustrate(
    folder: Path,
    result: Result,
    points: np.ndarray,
    previews: list[Preview],
    times: dict,
    record: dict,
) -> None:
    """Write the plots, and report.html with all of them."""
    estimate, matched, to_truth = result.estimate, result.matched, result.to_truth
    positions, truth_xyz = estimate.T_map_cam[:, :3, 3], None
    if to_truth is not None:
        truth_xyz = to_truth.inverse()(matched.T_true[:, :3, 3])
    title = f'{result.name}: {len(estimate.stamps_ns)} poses'
    pictures = {
        'map.png': (
            'The map, from above and from the side',
            render_map(points, positions, truth_xyz, title),
        ),
        'trajectory.png': (
            'The path' + (', the ground truth aligned to it by Sim(3)' if to_truth else ''),
            draw_trajectories(estimate.T_map_cam, matched, to_truth),
        ),
    }
    if to_truth is not None:
        pictures['error.png'] = (
            'Error over time, after Sim(3) alignment',
            draw_errors(matched, to_truth),
        )
    if previews:
        pictures['frames.png'] = (
            'Some frames: image, depth (red is near), confidence',
            draw_strip(previews),
        )
    for name, (_, png) in pictures.items():
        write_bytes(folder / name, png)
    figures = {name: value for name, value in result.metrics.items() if name != 'notes'}
    report = Report(title, result.notes, figures, dict(pictures.values()), times, record)
    write_bytes(folder / 'report.html', as_html(report).encode())


def line(name: str, metrics: dict, times: dict) -> str:
    """Return the summary line that is printed after an evaluation."""
    words = [
        f'{name}: {metrics["images"]} images, {metrics["poses"]} poses '
        f'({metrics["keyframes"]} keyframes), {times["fps"]:.1f} FPS'
    ]
    ate_m = (metrics.get('ate') or {}).get('sim3')
    if ate_m:
        share = metrics['ate_percent_of_path']['sim3']
        words.append(
            f'ATE after Sim(3) alignment {ate_m["rmse"]:.3f} m rmse, {share:.2f} % of '
            f'{metrics["path_length_m"]:.2f} m; scale {metrics["scale"]:.4f} m per map unit'
        )
    return ', '.join(words)
