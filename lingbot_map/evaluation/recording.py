"""One recording: what is checked and decided before it runs, and the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lingbot_map.evaluation.folders import Recording, size_of, whole_folder
from lingbot_map.evaluation.outputs import Outputs
from lingbot_map.evaluation.run import run_recording, timing_values, Viewing
from lingbot_map.evaluation.scoring import match
from lingbot_map.geometry import quaternion_to_matrix, rigid
from lingbot_map.images.camera import camera_of, CameraInfoError
from lingbot_map.images.mask import load_mask
from lingbot_map.models.keyframes import interval_for
from lingbot_map.recordings.bags import read_camera_info
from lingbot_map.recordings.pose_files import find_truth, NO_TRUTH, PoseTrack
from lingbot_map.recordings.selection import select, SelectedPictures, Selection
from lingbot_map.recordings.source import is_bag, SourceError
from lingbot_map.streaming.engine import StreamEngine
import numpy as np
import torch
from tqdm import tqdm


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
    rerun: Path | None = None  # file for a Rerun recording


def plan(recording: Recording, settings: dict, rerun: Path | None = None) -> Plan:
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
    interval = _interval(len(pictures), settings)
    return Plan(recording, settings, pictures, truth, interval, view, [note] * bool(note), rerun)


def _interval(images: int, settings: dict) -> int:
    if settings['keyframe_policy'] != 'auto' and settings['keyframe_interval']:
        return settings['keyframe_interval']
    scale_frames = settings['num_scale_frames']
    return interval_for(images, scale_frames, max(settings['max_keyframes'], scale_frames + 1))


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
    with whole_folder(out) as folder, Outputs(folder, planned) as outputs:
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
        outputs.write(run, times, _complete_record(planned, engine, record, out.parent))


def _complete_record(planned: Plan, engine: StreamEngine, record: dict, out: Path) -> dict:
    """Return the content of run.yaml; paths in it are absolute, so that it works anywhere."""
    path, source = planned.recording.path, planned.recording.source
    described = {
        'path': str(path),
        'bytes': size_of(path, out),
        'images': len(planned.pictures.stamps_ns),
        'skipped': source.skipped,
    }
    resolved = {
        'image_topic': getattr(source, 'image_topic', ''),
        'compile_mode': engine.compile_mode,
        'attention_backend': engine.attention_backend,
    }
    if planned.settings['keyframe_policy'] != 'flow':
        resolved['keyframe_interval'] = planned.keyframe_interval
    truth = Path(planned.settings['ground_truth'])
    if truth.is_file():
        resolved['ground_truth'] = str(truth.resolve())
    return {'input': described} | record | {'resolved': record['resolved'] | resolved}
