"""Compare settings with float32 on the same weights and frames, one engine at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lingbot_map.benchmark.setup import build, room, Setup
from lingbot_map.benchmark.speed import Log
from lingbot_map.evaluation.metrics import rotation_angles_deg
from lingbot_map.models.cuda import tf32
import numpy as np
from torch import Tensor

EAGER = 'eager'
_ROWS = 10
_MEASURES = ('translation_percent', 'rotation_deg', 'depth_percent')


@dataclass(frozen=True)
class Track:
    """Poses and depths of one engine for all frames."""

    T_world_cam: np.ndarray  # (N, 4, 4)
    depth: np.ndarray  # (N, h, w) float32


@dataclass(frozen=True)
class Deviation:
    """
    Difference between two tracks per frame (N,).

    Translation is in percent of the frame's median depth, because the network's scale is
    arbitrary. Depth is the median relative difference over the pixels.
    """

    translation_percent: np.ndarray
    rotation_deg: np.ndarray
    depth_percent: np.ndarray


def deviations(
    setup: Setup, modes: Sequence[str], weights: dict[str, Tensor], frames: int, log: Log
) -> dict[str, Deviation]:
    """Return the deviation from float32: first eager in the set-up's dtype, then each mode."""
    log(f'rendering {frames} frames')
    images = room(setup, frames)
    plain = replace(setup, compile_mode='off', attention_backend='sdpa', heads_dtype='fp32')
    with tf32(False):
        _, reference = _track(replace(plain, dtype='float32'), weights, images, log)
        _, eager = _track(plain, weights, images, log)
    found = {EAGER: deviation(eager, reference)}
    for mode in modes:
        label, track = _track(replace(setup, compile_mode=mode), weights, images, log)
        found[label] = deviation(track, reference)
    return found


def deviation(track: Track, reference: Track) -> Deviation:
    """Return the deviation between two tracks of the same frames."""
    T, R = track.T_world_cam, reference.T_world_cam
    distance = np.linalg.norm(T[:, :3, 3] - R[:, :3, 3], axis=1)
    rotation = R[:, :3, :3].transpose(0, 2, 1) @ T[:, :3, :3]
    relative = np.abs(track.depth - reference.depth) / reference.depth
    return Deviation(
        100 * distance / np.median(reference.depth, axis=(1, 2)),
        rotation_angles_deg(rotation),
        100 * np.median(relative, axis=(1, 2)),
    )


def accuracy_lines(found: dict[str, Deviation]) -> list[str]:
    """Return medians, maxima and ratios to eager, then values for some of the frames."""
    width = max(len(name) for name in found) + 2
    head = f'{"":{width}}' + ''.join(
        f'{title:>30}' for title in ('translation [% of depth]', 'rotation [deg]', 'depth [%]')
    )
    columns = f'{"":{width}}' + 3 * f'{"median":>10}{"max":>10}{"x eager":>10}'
    rows = [f'{name:{width}}' + _summary(each, found[EAGER]) for name, each in found.items()]
    return ['deviation from float32', head, columns, *rows, *_frame_lines(found)]


def accuracy_values(found: dict[str, Deviation]) -> dict[str, object]:
    """Return the values of all frames for JSON."""
    return {
        name: {measure: getattr(each, measure).tolist() for measure in _MEASURES}
        for name, each in found.items()
    }


def _track(
    setup: Setup, weights: dict[str, Tensor], images: np.ndarray, log: Log
) -> tuple[str, Track]:
    """Run the images through a new engine; return its label and track."""
    log(f'{setup.trunk_dtype}, heads {setup.heads_dtype}, compile_mode {setup.compile_mode}')
    ready = build(setup, weights)
    # Move poses and depth off the device, since the next engine needs the memory.
    results = [
        (result.T_world_cam, result.depth.cpu().numpy())
        for rgb in images
        for result in ready.engine.push(rgb)
    ]
    track = Track(np.stack([T for T, _ in results]), np.stack([depth for _, depth in results]))
    return ready.label(setup.compile_mode), track


def _summary(each: Deviation, eager: Deviation) -> str:
    return ''.join(
        f'{np.median(values):10.4f}{values.max():10.4f}{_ratio(values, base):>10}'
        for values, base in (
            (getattr(each, measure), getattr(eager, measure)) for measure in _MEASURES
        )
    )


def _ratio(values: np.ndarray, base: np.ndarray) -> str:
    return f'{np.median(values) / np.median(base):.2f}' if np.median(base) > 0 else '-'


def _frame_lines(found: dict[str, Deviation]) -> list[str]:
    count = len(found[EAGER].depth_percent)
    indices = np.unique(np.linspace(0, count - 1, _ROWS).round().astype(int))
    head = f'{"frame":>7}' + ''.join(f'{name:>30}' for name in found)
    rows = [
        f'{i:7d}' + ''.join(f'{getattr(d, m)[i]:10.4f}' for d in found.values() for m in _MEASURES)
        for i in indices
    ]
    return [head, *rows]
