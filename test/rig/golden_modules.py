"""Golden settings that look inside the network: intermediates of calls, the full-size model."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
import hashlib
import re

from golden_folder import (
    compare,
    count,
    Deviation,
    GoldenFolder,
    Limit,
    Setting,
    stream,
    thin_like,
    worst,
)
from golden_network import compare_outputs, DENSE_MAPS, joined, OUTPUTS, POSE
from lingbot_map.benchmark.recipe import fill_model
from lingbot_map.models.gct_stream import GCTStream
import numpy as np
import torch
from torch import nn, Tensor

TRUNK = Limit(2e-5)
FULL_SIZE_OUTPUTS = {**OUTPUTS, 'depth': Limit(0.0, 5e-5), 'depth_conf': Limit(0.0, 5e-5)}
TRUNK_POINTS = {
    'vit_tokens_in': ('aggregator.patch_embed.blocks.0', 'input'),
    'vit_patch_tokens': ('aggregator.patch_embed', 'output'),
    'tokens_with_specials': ('aggregator.frame_blocks.0', 'input'),
    'frame_block_0': ('aggregator.frame_blocks.0', 'output'),
    'global_block_0': ('aggregator.global_blocks.0', 'output'),
    'selected': ('aggregator', 'output'),
    'camera_token_normed': ('camera_head.token_norm', 'output'),
}
DPT_POINTS = {
    **{f'depth_projects{i}': (f'depth_head.projects.{i}', 'output') for i in range(4)},
    **{f'depth_layer{i}_rn': (f'depth_head.scratch.layer{i}_rn', 'output') for i in range(1, 5)},
    **{f'depth_refinenet{i}': (f'depth_head.scratch.refinenet{i}', 'output') for i in range(1, 5)},
    'depth_output_conv1': ('depth_head.scratch.output_conv1', 'output'),
}


def module_settings(golden: GoldenFolder, full_size: bool) -> Iterator[Setting]:
    """Yield the calls with known intermediates and, when asked for, the full-size run."""
    entry = golden.config.get('modules')
    for tag in ('scale', *entry['captured']) if entry else ():
        expected = golden.group('modules', tag)
        if expected:
            run = partial(_run_modules, golden, entry, tag, expected)
            yield Setting(f'modules/{tag}', 'modules', run)
    if full_size and (golden.path / 'full_size.json').exists():
        yield Setting('full_size', 'full_size', partial(_run_full_size, golden))


@contextmanager
def _captured(model: nn.Module, points: dict[str, tuple[str, str]]) -> Iterator[dict]:
    """Yield a dictionary that fills with what flows through modules, as lists (one per call)."""
    taken: dict[str, list[Tensor]] = {}

    def hook(name: str, side: str, _module, args: tuple, output: Tensor) -> None:
        taken.setdefault(name, []).append(args[0] if side == 'input' else output)

    handles = [
        model.get_submodule(module).register_forward_hook(partial(hook, name, side))
        for name, (module, side) in points.items()
    ]
    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _run_modules(golden: GoldenFolder, entry: dict, tag: str, expected: dict) -> list[Deviation]:
    """Stream up to the captured call and compare every intermediate that the goldens have."""
    model = golden.model(entry.get('overrides', {}))
    first = {'frame': 0, 'kept': True, 'temporal_index': 0, 'kept_frames_before': 0}
    first['kept_frames_after'] = entry['num_scale_frames']
    target = entry['captured'].get(tag, first)
    images = golden.images(entry, expected.get('depth'))
    calls = stream(model, images, entry['num_scale_frames'], entry.get('keyframe_interval', 1))
    with _captured(model, {**TRUNK_POINTS, **DPT_POINTS}) as taken:
        for call in calls:
            if target['frame'] in call.frames:
                break
            taken.clear()
    results = {name: torch.cat(values) for name, values in taken.items() if name != 'selected'}
    results.update({f'selected_{k}': v for k, v in enumerate(taken['selected'][0])})
    iterations = enumerate(call.outputs['pose_enc_list'])
    results.update({f'pose_enc_iteration_{i}': value for i, value in iterations})
    results.update({name: call.outputs[name][0] for name in DENSE_MAPS if name in call.outputs})
    counters = {
        'kept': call.kept,
        'temporal_index': call.before,
        'kept_frames_before': call.before,
        'kept_frames_after': model.memory.kept,
    }
    wrong = sum(counters[k] != target[k] for k in counters if k in target)
    return [*_intermediates(golden, results, expected), count('counters', wrong)]


def _intermediates(
    golden: GoldenFolder, results: dict[str, Tensor], expected: dict[str, Tensor]
) -> list[Deviation]:
    """Return the worst deviation of trunk, camera iterations and dense layers, and all outputs."""
    groups: dict[str, list[Deviation]] = {}
    for name, reference in expected.items():
        group, limit = name, OUTPUTS.get(name, TRUNK)
        if name in DPT_POINTS:
            # Sums over hundreds of channels: rounding grows with the size of the values.
            group, limit = 'dense_layers', Limit(2e-5 * max(1, reference.abs().max().item()))
        elif name.startswith('pose_enc_iteration'):
            group, limit = 'iterations', POSE
        elif name not in OUTPUTS:
            group = 'trunk'
        result = results[name]
        if name in DENSE_MAPS:
            result = thin_like(result, reference)
        elif result.numel() == reference.numel():
            result = result.reshape(reference.shape)  # batch and frame dimensions differ
        limit = limit.times(golden.slack)
        groups.setdefault(group, []).append(compare(name, result, reference, limit))
    return [
        found[0] if group in OUTPUTS else worst(group, found) for group, found in groups.items()
    ]


@torch.no_grad()
def _run_full_size(golden: GoldenFolder) -> list[Deviation]:
    """Check the recipe weights of the full-size model, run its few frames, compare everything."""
    config = golden.json('full_size.json')
    expected = golden.tensors('full_size_goldens.safetensors')
    images = expected.pop('frames').to(golden.device).float()[None] / 255
    model = recipe_model(config['constructor'], config['weight_salt'])
    deviations = [count('weight_hashes', _wrong_hashes(model, config))]
    model.to(golden.device)
    outputs = []
    points = {name: TRUNK_POINTS[name] for name in ('vit_patch_tokens', 'selected')}
    for call in config['calls']:
        first, last = call['frames'][0], call['frames'][-1]
        model._set_skip_append(not call['kept'])
        with _captured(model, points) as taken:
            outputs.append(
                model(
                    images[:, first : last + 1],
                    num_frame_for_scale=config['num_frame_for_scale'],
                    num_frame_per_block=last + 1 - first,
                    causal_inference=True,
                )
            )
        inner = {k: expected.pop(k) for k in list(expected) if k.startswith(f'{call["tag"]}/')}
        deviations.append(worst(call['tag'], _channels(golden, taken, inner)))
    return [*deviations, *compare_outputs(golden, joined(outputs), expected, FULL_SIZE_OUTPUTS)]


def _channels(golden: GoldenFolder, taken: dict, expected: dict) -> list[Deviation]:
    """Compare `.../vit_patch_tokens_first32`, `.../selected_2_channels_0_16_1024_1040`, ..."""
    deviations = []
    for name, reference in expected.items():
        label = name.split('/')[1]
        if label.startswith('vit_patch_tokens_first'):
            result = taken['vit_patch_tokens'][0][..., : reference.shape[-1]]
        else:
            layer, *bounds = (int(number) for number in re.findall(r'\d+', label))
            tokens = taken['selected'][0][layer][0]
            pairs = zip(bounds[::2], bounds[1::2], strict=True)
            result = torch.cat([tokens[..., a:b] for a, b in pairs], -1)
        deviations.append(compare(label, result, reference, TRUNK.times(golden.slack)))
    return deviations


def recipe_model(constructor: dict, salt: str) -> GCTStream:
    """Return a GCTStream with recipe weights, without spending time on random ones."""
    with torch.device('meta'):
        model = GCTStream(**constructor)
    fill_model(model, salt)
    return model


def _wrong_hashes(model: nn.Module, config: dict) -> int:
    weights = model.state_dict()
    hashes = config['sha256_of_float32_little_endian_bytes']
    wrong = sum(
        key not in weights
        or hashlib.sha256(np.ascontiguousarray(weights[key].numpy(), '<f4')).hexdigest() != known
        for key, known in hashes.items()
    )
    return wrong + len(weights.keys() - hashes.keys())
