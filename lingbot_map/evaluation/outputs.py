"""Everything that one evaluation leaves: collected while it runs, written at its end."""

from __future__ import annotations

from collections.abc import Callable
import json
from pathlib import Path
from typing import TYPE_CHECKING

from lingbot_map.evaluation.colmap import ColmapModel
from lingbot_map.evaluation.depth_export import DepthExport
from lingbot_map.evaluation.folders import RUN_FILE
from lingbot_map.evaluation.plots import PreviewKeeper
from lingbot_map.evaluation.rerun_log import RerunLog
from lingbot_map.evaluation.results import illustrate, measure
from lingbot_map.evaluation.run import PlacedFrame, Run
from lingbot_map.mapping.export import write_bytes, write_kitti, write_ply, write_tum
from lingbot_map.mapping.map_store import MapStore
from lingbot_map.mapping.points import PointFilter
from lingbot_map.recordings.selection import SelectedPictures
import numpy as np
import yaml

if TYPE_CHECKING:
    from lingbot_map.evaluation.recording import Plan

_PREVIEWS = 6


class Outputs:
    """
    The files of one evaluation in `folder`.

    `consumers` have to see each placed frame. As a context it leaves nothing outside of `folder`
    when the run fails.
    """

    def __init__(self, folder: Path, planned: Plan):
        settings = planned.settings
        self._folder, self._planned = folder, planned
        self._store = MapStore(settings['map.voxel_size'], settings['map.max_points'])
        self._previews = PreviewKeeper(_evenly(planned.pictures))
        self.consumers: list[Callable[[PlacedFrame], None]] = [self._previews]
        self._depth = self._colmap = self._rerun = None
        choose = _point_filter(settings)
        if settings['map.voxel_size']:
            self.consumers.append(_into_map(self._store, choose, settings['scale']))
        if settings['depth'] != 'off':
            self._depth = DepthExport(folder / 'depth', settings['depth'], settings['scale'])
            self.consumers.append(self._depth)
        if settings['colmap']:
            self._colmap = ColmapModel(folder / 'colmap')
            self.consumers.append(self._colmap)
        if planned.rerun is not None:
            self._rerun = RerunLog(planned.rerun, settings['scale'], choose)
            self.consumers.append(self._rerun)

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, *_) -> None:
        if self._rerun is not None:
            self._rerun.close()

    def write(self, run: Run, times: dict, record: dict) -> None:
        """Write all files; `times` and `record` are the contents of timing.json and run.yaml."""
        folder, points = self._folder, self._store.snapshot()
        write_tum(folder / 'trajectory.tum', run.stamps_ns, run.T_map_cam)
        write_kitti(folder / 'trajectory.kitti', run.T_map_cam)
        write_ply(folder / 'map.ply', points)
        if self._depth is not None:
            self._depth.write()
        if self._colmap is not None:
            self._colmap.write(points)
        result = measure(self._planned, run)
        _write_json(folder / 'metrics.json', result.metrics)
        _write_json(folder / 'timing.json', times)
        text = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
        write_bytes(folder / RUN_FILE, text.encode())
        illustrate(folder, result, points, self._previews.previews, times, record)
        if self._rerun is not None:
            self._rerun.finish(run.T_map_cam, result.matched, result.to_truth)


def _evenly(pictures: SelectedPictures) -> list[int]:
    """Return the stamps of a few pictures from the first to the last."""
    places = np.linspace(0, len(pictures) - 1, min(_PREVIEWS, len(pictures))).round().astype(int)
    return [pictures.stamps_ns[pictures.chosen[place]] for place in places]


def _point_filter(settings: dict) -> PointFilter:
    return PointFilter(
        settings['points.min_confidence'],
        settings['points.max_depth'],
        settings['points.stride'],
        settings['points.keep_percentile'],
        settings['points.edge_threshold'],
    )


def _into_map(store: MapStore, choose: PointFilter, scale: float) -> Callable[[PlacedFrame], None]:
    def insert(placed: PlacedFrame) -> None:
        if placed.result.is_keyframe:
            store.insert(choose(placed.result, placed.T_map_cam, scale))

    return insert


def _write_json(path: Path, content: dict) -> None:
    write_bytes(path, (json.dumps(content, indent=2, allow_nan=False) + '\n').encode())
