"""Golden settings that run the network over frames: sequences, windows, plain calls."""

from collections.abc import Iterator
from functools import partial
import inspect

from golden_folder import (
    compare,
    Deviation,
    EXACT,
    GoldenError,
    GoldenFolder,
    Limit,
    Setting,
    stream,
    thin_like,
)
from lingbot_map.models.gct_stream import GCTStream
import torch
from torch import Tensor

POSE = Limit(1e-5)
DENSE = Limit(1e-5, 2e-5)
POINTS = Limit(2e-4)
WARPED_POSE = Limit(5e-5)
FLOW = Limit(1e-3)  # pixels; no decision of a golden is that close to its threshold
OUTPUTS = {
    'pose_enc': POSE,
    'pose_enc_iterations': POSE,
    'depth': DENSE,
    'depth_conf': DENSE,
    'world_points': POINTS,
    'world_points_conf': DENSE,
}
WARPED_OUTPUTS = {
    **OUTPUTS,
    'pose_enc': WARPED_POSE,
    'chunk_scales': WARPED_POSE,
    'chunk_transforms': WARPED_POSE,
    'frame_type': EXACT,
    'is_keyframe': EXACT,
    'flow': FLOW,
}
DENSE_MAPS = ('depth', 'depth_conf', 'world_points', 'world_points_conf')
DRIVER_ARGUMENTS = (
    'num_scale_frames',
    'keyframe_interval',
    'window_size',
    'overlap_size',
    'overlap_keyframes',
    'scale_mode',
    'flow_threshold',
    'max_non_keyframe_gap',
)


def network_settings(golden: GoldenFolder) -> Iterator[Setting]:
    """Yield the sequences that the PREFIX_ files describe."""
    for part, key, file, run in (
        ('streaming', 'sequences', 'sequences', _run_streaming),
        ('special', 'special', 'special', _run_special),
        ('plain', 'plain_forward', 'special', _run_plain),
        ('windowed', 'windowed', 'windowed', _run_windowed),
    ):
        for entry in golden.config.get(key, ()):
            expected = golden.group(file, entry['name'])
            if expected:
                shows_defect = entry.get('follows', '').startswith('upstream')
                call = partial(run, golden, entry, expected)
                yield Setting(entry['name'], part, call, shows_defect)


def compare_outputs(
    golden: GoldenFolder,
    results: dict[str, Tensor],
    expected: dict[str, Tensor],
    limits: dict[str, Limit],
) -> list[Deviation]:
    """Compare the outputs of a sequence, [1, S, ...], with all its goldens, [S, ...]."""
    deviations = []
    for name, reference in expected.items():
        if name == 'flow' and name not in results:
            continue  # the decisions that it led to show in every other output
        if name not in results:
            raise GoldenError(f'the model returned no {name}')
        result = results[name][0]
        if name in DENSE_MAPS:
            result = thin_like(result, reference)
        deviations.append(compare(name, result, reference, limits[name].times(golden.slack)))
    return deviations


def _run_streaming(golden: GoldenFolder, entry: dict, expected: dict) -> list[Deviation]:
    model = golden.model(entry.get('overrides', {}))
    results = model.inference_streaming(
        golden.images(entry, expected.get('depth')),
        entry['num_scale_frames'],
        entry.get('keyframe_interval', 1),
    )
    return compare_outputs(golden, results, expected, OUTPUTS)


@torch.no_grad()
def _run_special(golden: GoldenFolder, entry: dict, expected: dict) -> list[Deviation]:
    """Stream frame by frame with edited weights, collecting the camera head's iterations too."""
    model = golden.model(entry.get('overrides', {}), entry.get('weight_edits', ()))
    calls = stream(
        model,
        golden.images(entry, expected.get('depth')),
        entry['num_scale_frames'],
        entry.get('keyframe_interval', 1),
    )
    return compare_outputs(golden, joined([call.outputs for call in calls]), expected, OUTPUTS)


def joined(calls: list[dict]) -> dict[str, Tensor]:
    """Concatenate the outputs of calls along the frames."""
    results = {k: torch.cat([c[k] for c in calls], 1) for k in calls[0] if k in OUTPUTS}
    iterations = [torch.stack(call['pose_enc_list'], 2) for call in calls]
    return {**results, 'pose_enc_iterations': torch.cat(iterations, 1)}


@torch.no_grad()
def _run_plain(golden: GoldenFolder, entry: dict, expected: dict) -> list[Deviation]:
    model = golden.model(entry.get('overrides', {}))
    images = golden.images(entry, expected.get('depth'))
    return compare_outputs(
        golden, model(images[None], **entry['forward_arguments']), expected, OUTPUTS
    )


def _run_windowed(golden: GoldenFolder, entry: dict, expected: dict) -> list[Deviation]:
    name = 'inference_windowed' if entry['mode'] == 'windowed' else 'inference_streaming'
    arguments = {k: entry[k] for k in DRIVER_ARGUMENTS if k in entry}
    driver = getattr(GCTStream, name, None)
    if driver is None or not arguments.keys() <= inspect.signature(driver).parameters.keys():
        raise NotImplementedError(f'GCTStream.{name}({", ".join(arguments)})')
    images = golden.images(entry, expected.get('depth'))
    results = driver(golden.model(entry.get('overrides', {})), images, **arguments)
    return compare_outputs(golden, results, expected, WARPED_OUTPUTS)
