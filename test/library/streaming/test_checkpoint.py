"""Loading of weights: strict, safe, lean, and clear about what is wrong."""

from pathlib import Path
import pickle
import subprocess
import sys

from lingbot_map.config import MODEL_PRESETS
from lingbot_map.mapping.points import PointFilter
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.settings import StreamConfig
from lingbot_map.streaming.checkpoint import (
    CheckpointError,
    load_model,
    read_state,
    set_trunk_dtype,
)
from lingbot_map.streaming.engine import StreamEngine
from mapped import mapped
import numpy as np
import pytest
from safetensors.torch import save_file
import torch

TINY = MODEL_PRESETS['tiny']


@pytest.fixture
def state():
    torch.manual_seed(3)
    return GCTStream.from_config(TINY).state_dict()


def saved(path: Path, state) -> str:
    if path.suffix == '.safetensors':
        save_file(state, path)
    else:
        torch.save(state, path)
    return str(path)


@pytest.mark.parametrize('name', ['bare.pt', 'wrapped.pt', 'weights.safetensors'])
def test_every_format_gives_the_same_weights(tmp_path, state, name):
    content = {'model': state} if name == 'wrapped.pt' else state
    loaded = load_model('tiny', saved(tmp_path / name, content)).state_dict()
    assert loaded.keys() == state.keys()
    for key, value in state.items():
        torch.testing.assert_close(loaded[key], value)


def test_point_head_may_be_extra(tmp_path, state):
    with_points = GCTStream.from_config({**TINY, 'enable_point': True}).state_dict() | state
    model = load_model('tiny', saved(tmp_path / 'points.pt', with_points))
    assert model.point_head is None


def test_point_head_may_be_missing_and_points_then_come_from_depth(
    tmp_path, state, monkeypatch, caplog
):
    monkeypatch.setitem(MODEL_PRESETS, 'tiny', {**TINY, 'enable_point': True})
    whole = GCTStream.from_config(MODEL_PRESETS['tiny']).state_dict()
    missing = sum(key.startswith('point_head.') for key in whole)
    model = load_model('tiny', saved(tmp_path / 'depth.pt', state))
    assert model.point_head is None
    assert f'no weights for point_head ({missing} missing)' in caplog.text
    engine = StreamEngine(model, StreamConfig(num_scale_frames=1, image_width=56))
    (frame,) = engine.push(np.random.default_rng(0).integers(0, 256, (42, 56, 3), np.uint8))
    points = PointFilter()(mapped(frame))
    v, u = np.nonzero(frame.depth.numpy() > 0)
    x, y, z = (points[axis] for axis in 'xyz')
    np.testing.assert_array_equal(z, frame.depth.numpy()[v, u])
    K = frame.network_intrinsics
    pixels = np.stack((K[0, 0] * x / z + K[0, 2], K[1, 1] * y / z + K[1, 2]))
    np.testing.assert_allclose(pixels, np.stack((u, v)) + pixels[:, 0, None], atol=1e-2)


def test_half_a_point_head_is_refused(tmp_path, state, monkeypatch):
    monkeypatch.setitem(MODEL_PRESETS, 'tiny', {**TINY, 'enable_point': True})
    state['point_head.norm.weight'] = torch.ones(2 * TINY['embed_dim'])
    with pytest.raises(CheckpointError, match='missing: point_head'):
        load_model('tiny', saved(tmp_path / 'half.pt', state))


def test_mismatch_is_reported_by_group_with_a_cause(tmp_path, state):
    del state['camera_head.embed_pose.bias'], state['camera_head.embed_pose.weight']
    state['extra.weight'] = torch.ones(1)
    state['aggregator.camera_token'] = torch.ones(1, 2, 1, 7)
    with pytest.raises(CheckpointError) as error:
        load_model('tiny', saved(tmp_path / 'other.pt', state))
    text = str(error.value)
    assert 'missing: camera_head.embed_pose (2)' in text
    assert 'unexpected: extra.weight (1)' in text
    assert 'aggregator.camera_token is (1, 2, 1, 7), expected (1, 2, 1, 128)' in text
    assert 'likely cause:' in text


def test_positional_table_of_another_image_size_is_named(tmp_path, state):
    state['aggregator.patch_embed.pos_embed'] = torch.zeros(1, 1 + 5 * 5, 128)
    with pytest.raises(CheckpointError, match='another img_size'):
        load_model('tiny', saved(tmp_path / 'size.pt', state))


def test_another_image_size_at_run_time_is_resampled(state):
    model = GCTStream.from_config(TINY)
    model.load_state_dict(state)
    outputs = model(torch.rand(1, 1, 3, 70, 42), causal_inference=True)
    assert outputs['depth'].shape == (1, 1, 70, 42, 1)
    assert outputs['depth'].isfinite().all()


class Intruder:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path('intruder_was_here'),))


def test_code_in_a_file_is_refused_and_never_run(tmp_path, state, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({'model': state, 'args': Intruder()}, tmp_path / 'code.pt')
    (tmp_path / 'plain.pt').write_bytes(pickle.dumps({'weight': Intruder()}))
    for name in ('code.pt', 'plain.pt'):
        with pytest.raises(CheckpointError):
            load_model('tiny', str(tmp_path / name))
    assert not (tmp_path / 'intruder_was_here').exists()


@pytest.mark.parametrize(
    'name', ['empty.pt', 'text.pt', 'cut.pt', 'cut.safetensors', 'empty.safetensors']
)
def test_damaged_files_are_one_clear_error(tmp_path, state, name):
    path = tmp_path / name
    if name.startswith('cut'):
        saved(path, state)
        path.write_bytes(path.read_bytes()[:5000])
    else:
        path.write_text('hello' if name == 'text.pt' else '')
    with pytest.raises(CheckpointError, match=name):
        load_model('tiny', str(path))


@pytest.mark.parametrize(
    ('model', 'checkpoint', 'part'),
    [
        ('huge', '', "model 'huge' is unknown"),
        ('full', '', 'no packaged weights'),
        ('tiny', '/nowhere/weights.pt', "'/nowhere/weights.pt' is not a file"),
        ('tiny', 300 * 'w', 'cannot be read (File name too long); check the path'),
        ('tiny', '~no-such-user/weights.pt', "'~no-such-user/weights.pt' is not a file"),
        ('tiny', 'hf:owner', 'hf:owner/name/file'),
    ],
)
def test_wrong_names_say_what_to_do(model, checkpoint, part):
    with pytest.raises(CheckpointError) as error:
        load_model(model, checkpoint)
    assert part in str(error.value)


@pytest.mark.parametrize(
    'content',
    [[torch.ones(2)], {1: torch.ones(2)}, {'model': torch.ones(2)}, {'a': torch.ones(2).int()}],
)
def test_what_is_no_state_dict_is_said(tmp_path, content):
    torch.save(content, tmp_path / 'other.pt')
    with pytest.raises(CheckpointError, match='not a state dict'):
        read_state(tmp_path / 'other.pt')


def test_trunk_precision_leaves_norms_and_heads_alone(state):
    model = GCTStream.from_config(TINY)
    set_trunk_dtype(model, torch.bfloat16)
    kinds = {name: p.dtype for name, p in model.named_parameters()}
    assert kinds['aggregator.global_blocks.0.attn.qkv.weight'] == torch.bfloat16
    assert kinds['aggregator.global_blocks.0.norm1.weight'] == torch.float32
    assert all(d == torch.float32 for name, d in kinds.items() if '_head.' in name)
    outputs = model(torch.rand(1, 2, 3, 28, 42), num_frame_for_scale=2, causal_inference=True)
    assert outputs['pose_enc'].dtype == torch.float32
    assert model.memory.dtype == torch.bfloat16


MEASURE = """
import resource, sys
from lingbot_map.streaming import checkpoint
checkpoint.MODEL_PRESETS['tiny'] = {config!r}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
checkpoint.load_model('tiny', sys.argv[1])
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.parametrize('name', ['large.pt', 'large.safetensors'])
def test_loading_needs_little_more_memory_than_the_file(tmp_path, name):
    config = {
        **TINY,
        'embed_dim': 640,
        'num_heads': 10,
        'vit_num_heads': 10,
        'camera_num_heads': 10,
        'enable_point': False,
    }
    path = tmp_path / name
    saved(path, GCTStream.from_config(config).state_dict())
    peak = int(
        subprocess.run(
            [sys.executable, '-c', MEASURE.format(config=config), str(path)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    )
    assert path.stat().st_size > 200e6
    assert peak < 1.3 * path.stat().st_size
