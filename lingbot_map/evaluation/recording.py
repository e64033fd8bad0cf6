"""Plan the evaluation of one recording: select images, read ground truth and calibration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lingbot_map.evaluation.folders import Recording
from lingbot_map.evaluation.run import ViewSettings
from lingbot_map.evaluation.scoring import match
from lingbot_map.geometry import quaternion_to_matrix, rigid
from lingbot_map.images.camera import camera_of, CameraInfoError
from lingbot_map.images.mask import load_mask
from lingbot_map.models.keyframes import interval_for
from lingbot_map.recordings.bags import read_camera_info
from lingbot_map.recordings.open import find_truth, NO_TRUTH
from lingbot_map.recordings.pose_files import PoseTrack
from lingbot_map.recordings.source import is_bag, Source, SourceError
import numpy as np
import torch


@dataclass(frozen=True)
class Plan:
    """Everything that is read and decided before the network runs."""

    recording: Recording
    settings: dict
    images: SelectedImages
    truth: PoseTrack | None  # poses of the camera's optical frame
    keyframe_interval: int
    view_settings: ViewSettings
    notes: list[str]
    rerun: Path | None = None  # file of the Rerun recording


def plan(recording: Recording, settings: dict, rerun: Path | None = None) -> Plan:
    """
    Read all stamps, ground truth and calibration, and return the plan.

    Raises SourceError or MetricsError for problems that would otherwise show only after the run,
    such as a truncated bag or ground truth of another time range. Raises UserError for a bad mask.
    """
    selection = Selection(
        settings['every'], settings['start'], settings['duration'], settings['max_frames']
    )
    images = select(recording.source, selection)
    truth = find_truth(
        recording.path,
        recording.source,
        settings['ground_truth'],
        settings['gt_frame'],
        images.stamps_ns,
    )
    if truth is not None:
        truth = truth.shifted(round(settings['gt_offset'] * 1e9))
        if settings['body_to_camera']:
            truth = truth.moved_to(body_extrinsics(settings['body_to_camera']))
        stamps_ns = [images.stamps_ns[i] for i in images.chosen]
        match(stamps_ns, np.empty((len(stamps_ns), 4, 4)), truth, settings['tolerance'])
    view, note = view_settings(recording, settings)
    interval = _interval(len(images), settings)
    return Plan(recording, settings, images, truth, interval, view, [note] * bool(note), rerun)


def _interval(images: int, settings: dict) -> int:
    if settings['keyframe_interval']:
        return settings['keyframe_interval']
    scale_frames = settings['num_scale_frames']
    return interval_for(images, scale_frames, max(settings['max_keyframes'], scale_frames + 1))


def body_extrinsics(values: list[float]) -> np.ndarray:
    """Return T_body_cam (4, 4) from x y z qx qy qz qw."""
    numbers = torch.tensor(values, dtype=torch.float64)
    return rigid(quaternion_to_matrix(numbers[3:]), numbers[:3]).numpy()


def view_settings(recording: Recording, settings: dict) -> tuple[ViewSettings, str]:
    """Return the settings of views, and a note if camera_info cannot be used (else '')."""
    camera, note, wanted = None, '', settings['camera_info']
    if is_bag(recording.path) and wanted != NO_TRUTH:
        info = read_camera_info(recording.path, recording.source.image_topic, wanted)
        try:
            camera = info and camera_of(info, settings['image_rectified'])
        except CameraInfoError as error:
            note = f'camera_info is not used: {error}'
    elif wanted not in ('', NO_TRUTH):
        raise SourceError(f"'{recording.path}' is not a bag: remove camera_info '{wanted}'")
    if settings['use_camera_info'] and camera is None:
        note = note or 'use_camera_info is set, but there is no camera_info'
    mask, degrees = load_mask(settings['image_mask']), settings['image_rotation']
    return ViewSettings(camera, mask, degrees, settings['use_camera_info']), note


@dataclass(frozen=True)
class Selection:
    """A time range of a recording, and every n-th image in it."""

    every: int = 1
    start_s: float = 0.0  # after the first image
    duration_s: float = 0.0  # 0: to the end
    max_frames: int = 0  # 0: no limit

    def choose(self, stamps_ns: Sequence[int]) -> list[int]:
        """Return the indices of the chosen images, ascending."""
        if not stamps_ns:
            return []
        begin = stamps_ns[0] + round(self.start_s * 1e9)
        end = begin + round(self.duration_s * 1e9) if self.duration_s else float('inf')
        inside = [i for i, stamp in enumerate(stamps_ns) if begin <= stamp <= end]
        return inside[:: self.every][: self.max_frames or None]


@dataclass(frozen=True)
class SelectedImages:
    """The chosen images of a source; all of its stamps have been read."""

    source: Source
    stamps_ns: list[int]  # of all images of the source
    chosen: list[int]

    def __len__(self) -> int:
        return len(self.chosen)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (stamp_ns, rgb); only chosen images are decoded."""
        wanted = set(self.chosen)
        last = self.chosen[-1]
        for i, (stamp_ns, read) in enumerate(self.source.lazy()):
            if i in wanted:
                yield stamp_ns, read()
            if i == last:
                return


def select(source: Source, selection: Selection) -> SelectedImages:
    """
    Read all stamps of a source and select images.

    Raises SourceError if the recording is damaged or no image is selected.
    """
    stamps_ns = [stamp_ns for stamp_ns, _ in source.lazy()]
    chosen = selection.choose(stamps_ns)
    if not chosen:
        length_s = (stamps_ns[-1] - stamps_ns[0]) * 1e-9 if stamps_ns else 0.0
        raise SourceError(
            f'nothing is left of {len(stamps_ns)} images over {length_s:.3f} s: '
            f'start is {selection.start_s:g} s'
        )
    return SelectedImages(source, stamps_ns, chosen)
