"""One recording through the engine: checks before, files after, the folder whole or not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import json
from pathlib import Path

from lingbot_map.bags import read_camera_info
from lingbot_map.camera_model import camera_of, CameraInfoError
from lingbot_map.colmap import ColmapModel
from lingbot_map.depth_export import DepthExport
from lingbot_map.engine import StreamEngine
from lingbot_map.evaluation import Run, run_recording, timing_values, Viewing
from lingbot_map.export import write_bytes, write_kitti, write_ply, write_tum
from lingbot_map.geometry import quaternion_to_matrix, rigid
from lingbot_map.ground_truth import find_truth, NO_TRUTH, PoseTrack
from lingbot_map.image_mask import load_mask
from lingbot_map.keyframes import interval_for
from lingbot_map.map_store import MapStore
from lingbot_map.pictures import PreviewKeeper
from lingbot_map.points import PointFilter
from lingbot_map.scoring import match
from lingbot_map.selection import select, SelectedPictures, Selection
from lingbot_map.sources import is_bag, SourceError
from lingbot_map_ros import evaluate_results
from lingbot_map_ros.evaluate_folders import Recording, RUN_FILE, size_of, whole_folder
import numpy as np
import torch
from tqdm import tqdm
import yaml

_PREVIEWS = 6


@dataclass(frozen=True)
class Plan:
    """What is known before the first picture goes into the network."""

    recording: Recording
    settings: dict
    pictures: SelectedPictures
    truth: PoseTrack | None  # of the camera's optical frame
    keyframe_interval: int
    viewing: Viewing
    notes: list[str]


def plan(recording: Recording, settings: dict) -> Plan:
    """
    Read the stamps and the truth, and decide; raise SourceError or MetricsError.

    What would make the run useless at its end shows here: a bag cut short, truth of another time.
    """
    selection = Selection(
        settings['every'], settings['start'], settings['duration'], settings['max_frames']
    )
    pictures = select(recording.source, selection)
    truth = find_truth(
        recording.path,
        recording.source,
        settings['ground_truth'],
        settings['gt_frame'],
        pictures.stamps_ns,
    )
    if truth is not None:
        truth = truth.shifted(round(settings['gt_offset'] * 1e9))
        if settings['body_to_camera']:
            truth = truth.moved_to(mount(settings['body_to_camera']))
        stamps_ns = [pictures.stamps_ns[i] for i in pictures.chosen]
        match(stamps_ns, np.empty((len(stamps_ns), 4, 4)), truth, settings['tolerance'])
    view, note = viewing(recording, settings)
    interval = settings['keyframe_interval'] or interval_for(
        len(pictures),
        settings['num_scale_frames'],
        max(settings['max_keyframes'], settings['num_scale_frames'] + 1),
    )
    return Plan(recording, settings, pictures, truth, interval, view, [note] * bool(note))


def mount(values: list[float]) -> np.ndarray:
    """Return T_body_cam (4, 4) of x y z qx qy qz qw."""
    numbers = torch.tensor(values, dtype=torch.float64)
    return rigid(quaternion_to_matrix(numbers[3:]), numbers[:3]).numpy()


def viewing(recording: Recording, settings: dict) -> tuple[Viewing, str]:
    """Return how pictures are prepared, and a line if camera_info cannot be used."""
    camera, note, wanted = None, '', settings['camera_info']
    if is_bag(recording.path) and wanted != NO_TRUTH:
        info = read_camera_info(recording.path, recording.source.image_topic, wanted)
        try:
            camera = info and camera_of(info, settings['image_rectified'])
        except CameraInfoError as error:
            note = f'camera_info is not used: {error}'
    elif wanted not in ('', NO_TRUTH):
        raise SourceError(f"'{recording.path}' is not a bag: leave camera_info '{wanted}' out")
    if settings['use_camera_info'] and camera is None:
        note = note or 'use_camera_info is set, but there is no camera_info'
    mask, degrees = load_mask(settings['image_mask']), settings['image_rotation']
    return Viewing(camera, mask, degrees, settings['use_camera_info']), note


def evaluate(
    planned: Plan, engine: StreamEngine, device: torch.device, out: Path, record: dict
) -> None:
    """
    Run and write everything into the folder `out`.

    `record` is the part of run.yaml that all recordings share. The folder appears when all files
    are in it.
    """
    settings, pictures = planned.settings, planned.pictures
    engine.keyframe_interval = planned.keyframe_interval
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
    with whole_folder(out) as folder:
        outputs = _Outputs(folder, settings, pictures)
        run, timing = run_recording(
            engine,
            tqdm(pictures, desc=planned.recording.name, unit='image'),
            settings['scale'],
            planned.viewing,
            outputs.consumers,
        )
        if not len(run.stamps_ns):
            raise SourceError('the network gave no finite pose: nothing to write')
        times = timing_values(timing, run, device)
        record = {'input': _input_record(planned)} | record
        record['resolved'] = record['resolved'] | {
            'keyframe_interval': planned.keyframe_interval,
            'image_topic': getattr(planned.recording.source, 'image_topic', ''),
        }
        outputs.write(planned, run, times, record)


class _Outputs:
    """What is collected while the recording runs, and written at its end."""

    def __init__(self, folder: Path, settings: dict, pictures: SelectedPictures):
        self._folder = folder
        self._store = MapStore(settings['map.voxel_size'], settings['map.max_points'])
        self._previews = PreviewKeeper(_evenly(pictures))
        self.consumers: list[Callable] = [self._previews]
        if settings['map.voxel_size']:
            self.consumers.append(_into_map(self._store, settings))
        self._depth = self._colmap = None
        if settings['depth'] != 'off':
            self._depth = DepthExport(folder / 'depth', settings['depth'], settings['scale'])
            self.consumers.append(self._depth)
        if settings['colmap']:
            self._colmap = ColmapModel(folder / 'colmap')
            self.consumers.append(self._colmap)

    def write(self, planned: Plan, run: Run, times: dict, record: dict) -> None:
        folder, points = self._folder, self._store.snapshot()
        write_tum(folder / 'trajectory.tum', run.stamps_ns, run.T_map_cam)
        write_kitti(folder / 'trajectory.kitti', run.T_map_cam)
        write_ply(folder / 'map.ply', points)
        if self._depth:
            self._depth.write()
        if self._colmap:
            self._colmap.write(points)
        result = evaluate_results.measure(planned, run)
        _write_json(folder / 'metrics.json', result.metrics)
        _write_json(folder / 'timing.json', times)
        text = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
        write_bytes(folder / RUN_FILE, text.encode())
        evaluate_results.illustrate(folder, result, points, self._previews.previews, times, record)


def _evenly(pictures: SelectedPictures) -> list[int]:
    """Return the stamps of a few pictures from the first to the last."""
    places = np.linspace(0, len(pictures) - 1, min(_PREVIEWS, len(pictures))).round().astype(int)
    return [pictures.stamps_ns[pictures.chosen[place]] for place in places]


def _into_map(store: MapStore, settings: dict) -> Callable:
    chosen = PointFilter(
        settings['points.min_confidence'],
        settings['points.max_depth'],
        settings['points.stride'],
        settings['points.keep_percentile'],
        settings['points.edge_threshold'],
    )

    def insert(placed) -> None:
        if placed.result.is_keyframe:
            store.insert(chosen(placed.result, placed.T_map_cam, settings['scale']))

    return insert


def _input_record(planned: Plan) -> dict:
    path = planned.recording.path
    return {
        'path': str(path),
        'bytes': size_of(path),
        'images': len(planned.pictures.stamps_ns),
        'skipped': planned.recording.source.skipped,
    }


def _write_json(path: Path, content: dict) -> None:
    write_bytes(path, (json.dumps(content, indent=2, allow_nan=False) + '\n').encode())
