"""Golden settings that need no sequence: state dict, tables, poses, preprocessing, visibility."""

from collections.abc import Iterator
from functools import partial
import hashlib
import re

from golden_folder import (
    compare,
    count,
    Deviation,
    EXACT,
    GoldenFolder,
    group_of,
    Limit,
    Setting,
    worst,
)
from lingbot_map.geometry import decode_pose, encode_pose, invert, matrix_to_quaternion, unproject
from lingbot_map.heads.dpt_head import add_position_map, position_map
from lingbot_map.layers.rope import grid_positions, rope_2d, rope_3d, rotate
from lingbot_map.layers.vit import resample_pos_embed
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.models.memory import MemoryShape, StreamMemory
from lingbot_map.streaming.preprocess import crop_map, load_images
import torch
from torch import Tensor

TABLE = Limit(1e-6)
ROTATED = Limit(1e-6, 1e-6)
DECODED = Limit(1e-6, 1e-6)
POINTS = Limit(1e-5, 1e-6)
TOKENS = 6  # special tokens per frame in the rotary goldens
DEMO_ARGUMENTS = {'enable_3d_rope': True}


def piece_settings(golden: GoldenFolder) -> Iterator[Setting]:
    """Yield what can be compared with the files that carry no prefix."""
    for variant, manifest in (golden.json('full_model_manifest.json') or {}).items():
        yield Setting(variant, 'manifest', partial(_run_manifest, variant, manifest))
    tables = golden.tensors('tables_and_rope.safetensors')
    for group in sorted({key.split('/')[0] for key in tables}):
        run = partial(_run_table, golden, group, group_of(tables, group))
        yield Setting(group, 'tables', run)
    poses, size = golden.tensors('pose_encoding.safetensors'), golden.json('pose_encoding.json')
    if poses and size:
        yield Setting('pose_encoding', 'pose', partial(_run_poses, golden, poses, size))
    yield from _preprocess(golden)
    for entry in golden.json('visibility.json') or ():
        yield Setting(_visibility_name(entry), 'visibility', partial(_run_visibility, entry))


def _run_manifest(variant: str, manifest: dict) -> list[Deviation]:
    """Compare keys, shapes and the number of parameters of the full-size model."""
    with torch.device('meta'):
        model = GCTStream(**DEMO_ARGUMENTS, enable_point=variant == 'enable_point_true')
    ours = {key: list(value.shape) for key, value in model.state_dict().items()}
    known = {key: value['shape'] for key, value in manifest['state_dict'].items()}
    wrong = sum(ours.get(key) != known.get(key) for key in ours.keys() | known.keys())
    parameters = sum(p.numel() for p in model.parameters())
    return [
        count('keys_and_shapes', wrong),
        count('parameters', abs(parameters - manifest['num_parameters'])),
    ]


def _run_table(golden: GoldenFolder, group: str, tensors: dict[str, Tensor]) -> list[Deviation]:
    compute = {
        'rope2d': _rope2d,
        'rope3d': _rope3d,
        'camera_rope': _camera_rope,
        'dpt_position_map': _position_maps,
    }.get(group, _pos_embed)
    limit = (ROTATED if 'rope' in group else TABLE).times(golden.slack)
    moved = {name: value.to(golden.device) for name, value in tensors.items()}
    found = [compare(name, result, tensors[name], limit) for name, result in compute(moved)]
    return [worst(group, found)]


def _rope2d(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    x = tensors['input']
    yield 'output', rotate(x, rope_2d(tensors['positions_yx'][0], x.shape[-1]))


def _rope3d(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Rotate two frames of 6 special tokens and 4 x 6 patches, at several temporal indices."""
    x = tensors['input']
    specials = torch.arange(TOKENS, device=x.device)[:, None].expand(-1, 2)
    space = torch.cat((specials, grid_positions(4, 6, x.device) + TOKENS))
    for name in tensors.keys() - {'input'}:
        first = int(re.search(r'_t(\d+)', name)[1])
        frames = [torch.cat((torch.full_like(space[:, :1], first + i), space), 1) for i in (0, 1)]
        yield name, rotate(x, rope_3d(torch.cat(frames), x.shape[-1]))


def _camera_rope(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    x = tensors['input']
    for name in tensors.keys() - {'input'}:
        positions = torch.zeros(x.shape[-2], 3, dtype=torch.long, device=x.device)
        positions[:, 0] = int(name.removeprefix('output_f')) + torch.arange(len(positions))
        yield name, rotate(x, rope_3d(positions, x.shape[-1]))


def _pos_embed(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name in tensors.keys() - {'table'}:
        rows, columns = (int(number) for number in re.findall(r'\d+', name))
        yield name, resample_pos_embed(tensors['table'], rows, columns)


def _position_maps(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, reference in tensors.items():
        rows, columns, channels, height, width = (int(n) for n in re.findall(r'\d+', name))
        empty = torch.zeros(1, channels, rows, columns, device=reference.device)
        position = position_map(channels, rows, columns, width / height, reference.device)
        yield name, add_position_map(empty, position)[0]


def _run_poses(golden: GoldenFolder, poses: dict[str, Tensor], size: dict) -> list[Deviation]:
    """Compare decoding, unprojection, encoding and the quaternions of matrices."""
    height, width = size['image_height'], size['image_width']
    T, K = decode_pose(poses['pose_enc'].to(golden.device), height, width)
    camera_points = unproject(poses['depth'][..., 0].to(golden.device), K)
    R, t = T[..., None, None, :3, :3], T[..., None, None, :3, 3]
    quaternions = matrix_to_quaternion(poses['rotations'].to(golden.device)).cpu()
    known = poses['rotations_quaternion_xyzw']
    # Near half a turn w is almost zero and rounding decides the overall sign.
    quaternions = quaternions * (quaternions * known).sum(-1, keepdim=True).sign()
    results = {
        'camera_to_world_3x4': T[..., :3, :],
        'world_to_camera_4x4': invert(T),
        'intrinsics': K,
        'world_points': (R @ camera_points[..., None])[..., 0] + t,
        'pose_enc_roundtrip': encode_pose(T, K, height, width),
        'rotations_quaternion_xyzw': quaternions,
    }
    deviations = []
    for name, result in results.items():
        limit = POINTS if name == 'world_points' else DECODED
        deviations.append(compare(name, result, poses[name], limit.times(golden.slack)))
    return deviations


def _preprocess(golden: GoldenFolder) -> Iterator[Setting]:
    outputs = golden.tensors('preprocess/outputs.safetensors')
    for case in golden.json('preprocess/cases.json') or ():
        if case['name'] in outputs or 'sha256' in case:
            run = partial(_run_preprocess, golden, case, outputs.get(case['name']))
            yield Setting(case['name'], 'preprocess', run)
    for path in sorted((golden.path / 'preprocess').glob('height_rule_*.json')):
        target, patch = (int(number) for number in re.findall(r'\d+', path.stem))
        rule = golden.json(f'preprocess/{path.name}')
        yield Setting(path.stem, 'preprocess', partial(_run_height_rule, rule, target, patch))


def _run_preprocess(golden: GoldenFolder, case: dict, expected: Tensor | None) -> list[Deviation]:
    """Load files as the network's input: exactly the same bytes, or bytes with the same hash."""
    paths = [golden.path / 'preprocess' / name for name in case['files']]
    images = load_images(paths, case['mode'], case['image_size'], case['patch_size'])
    pixels = (images * 255).round().to(torch.uint8)
    wrong_shape = count('shape', list(pixels.shape) != case['shape'])
    if expected is None:
        digest = hashlib.sha256(pixels.numpy().tobytes()).hexdigest()
        return [wrong_shape, count('sha256', digest != case['sha256'])]
    return [wrong_shape, compare('pixels', pixels, expected, EXACT)]


def _run_height_rule(rule: list[dict], target: int, patch: int) -> list[Deviation]:
    wrong = 0
    for case in rule:
        mapping = crop_map(case['width'], case['height'], target, patch)
        wrong += round(case['height'] * mapping.scale_y) != case['new_height']
    return [count(f'heights[{len(rule)}]', wrong)]


def _visibility_name(entry: dict) -> str:
    keys = {'a': 'anchors', 'w': 'window', 's': 'scale_batch', 'k': 'keyframe_interval'}
    return 'visibility/' + '_'.join(f'{short}{entry[key]}' for short, key in keys.items())


def _run_visibility(entry: dict) -> list[Deviation]:
    """Compare what calls see: by the slot table of the memory and by what attention returned."""
    total, batch = entry['num_frames'], entry['scale_batch']
    memory = _labelled_memory(entry)
    expected = {step['frames'][0]: step for step in entry['steps']}
    kept_frames: list[int] = []
    wrong = dict.fromkeys(('temporal_index', 'slot_table', 'attention'), 0)
    for first in (0, *range(batch, total)):
        frames = range(first, first + (1 if first else batch))
        keep = first == 0 or (first - batch) % entry['keyframe_interval'] == 0
        memory.write(len(frames), keep)
        seen = _seen_by_attention(memory, frames)
        step = expected.get(first)
        if step:
            numbers = [*kept_frames, *frames]
            table = (
                [numbers[i] for i in memory.visible_patches],
                [numbers[i] for i in memory.visible_specials],
            )
            known = (step['patches_of'], step['specials_of'])
            wrong['temporal_index'] += memory.kept != step['t'] or keep != step['kept']
            wrong['slot_table'] += table != known
            wrong['attention'] += seen != known
        if keep:
            memory.commit()
            kept_frames.extend(frames)
        else:
            memory.undo()
    return [count(f'{name}[{len(expected)}]', number) for name, number in wrong.items()]


def _labelled_memory(entry: dict) -> StreamMemory:
    """Return a memory of one layer and head with two channels per frame of the sequence."""
    shape = MemoryShape(
        layers=1,
        heads=1,
        head_dim=2 * entry['num_frames'],
        patches=2,
        specials=3,
        anchors=entry['anchors'],
        window=entry['window'],
        max_keyframes=entry['num_frames'],
        camera_iterations=0,
        camera_depth=0,
        camera_heads=0,
        camera_head_dim=0,
    )
    return StreamMemory(shape, torch.device('cpu'), torch.float32)


def _seen_by_attention(memory: StreamMemory, frames: range) -> tuple[list[int], list[int]]:
    """
    Return the frames whose patches and whose specials the attention of this call averages.

    All keys are zero, so every visible token weighs the same; values are one-hot labels of
    (frame, patch or special), so the average counts the visible tokens of each.
    """
    patches, specials = memory.shape.patches, memory.shape.specials
    channels = memory.shape.head_dim
    labels = [
        2 * f + is_patch
        for f in frames
        for is_patch, repeat in ((0, specials), (1, patches))
        for _ in range(repeat)
    ]
    values = torch.eye(channels)[labels][None, None]
    seen = memory.attend(0, torch.zeros_like(values), torch.zeros_like(values), values)
    frames_first = seen[0, 0].unflatten(-1, (-1, 2))
    if not torch.allclose(frames_first, frames_first[:1].expand_as(frames_first)):
        return [], []  # queries of one call see the same; anything else is wrong
    of_specials, of_patches = (frames_first[0, :, kind] > 1e-6 for kind in (0, 1))
    return of_patches.nonzero()[:, 0].tolist(), of_specials.nonzero()[:, 0].tolist()
