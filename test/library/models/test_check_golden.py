"""The golden checker itself: exit codes, what it notices, and folders it has never seen."""

import json
from pathlib import Path
import shutil
import subprocess
import sys

from check_golden import main
from golden_folder import edit_weights, GoldenFolder, stream
from lingbot_map.models.gct_stream import GCTStream
import pytest
from safetensors.torch import load_file, save_file
import torch

GOLDEN = Path(__file__).parents[2] / 'golden'
RIGHT, DEFECT = 'portrait_s2_w2_k2', 'camera_rope_s3_w4_k2_upstream'


def small_folder(path: Path, *names: str) -> Path:
    """Make a folder with only these sequences of the golden data."""
    config = json.loads((GOLDEN / 'tiny_config.json').read_text())
    sequences = [entry for entry in config['sequences'] if entry['name'] in names]
    kept = {'model': config['model'], 'weight_salt': '', 'sequences': sequences}
    (path / 'tiny_config.json').write_text(json.dumps(kept))
    shutil.copy(GOLDEN / 'tiny_frames.safetensors', path)
    tensors = load_file(GOLDEN / 'tiny_sequences.safetensors')
    kept = {key: value for key, value in tensors.items() if key.split('/')[0] in names}
    save_file(kept, path / 'tiny_sequences.safetensors')
    return path


def change(path: Path, key: str, amount: float) -> None:
    """Add `amount` to one element of one tensor in a file."""
    tensors = load_file(path)
    tensors[key].view(-1)[5] += amount
    save_file(tensors, path)


def test_program_prints_settings_and_summary(tmp_path):
    folder = small_folder(tmp_path, RIGHT, DEFECT)
    program = Path(__file__).parents[2] / 'rig' / 'check_golden.py'
    done = subprocess.run(
        [sys.executable, program, folder, '--prefix', 'tiny'], capture_output=True, text=True
    )
    *lines, summary = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    verdicts = {line.split()[1]: line for line in lines}
    assert ' ok ' in verdicts[RIGHT] and 'pose_enc' in verdicts[RIGHT]
    assert ' expected-different ' in verdicts[DEFECT]
    assert summary == '2 settings: 1 expected-different, 1 ok'


@pytest.mark.parametrize(
    ('key', 'amount', 'code'),
    [
        (f'{RIGHT}/pose_enc', 9e-6, 0),
        (f'{RIGHT}/pose_enc', 2e-5, 1),
        (f'{RIGHT}/depth', 1e-3, 1),
        (f'{RIGHT}/depth_conf', float('nan'), 1),
    ],
)
def test_changed_golden(tmp_path, key, amount, code):
    folder = small_folder(tmp_path, RIGHT)
    change(folder / 'tiny_sequences.safetensors', key, amount)
    assert main([str(folder)]) == code


def test_changed_weight(tmp_path):
    folder = small_folder(tmp_path, RIGHT)
    golden = GoldenFolder(folder)
    overrides = golden.config['sequences'][0]['overrides']
    weights = golden.model(overrides).state_dict()
    save_file(weights, folder / 'tiny_weights.safetensors')
    assert main([str(folder)]) == 0
    key = 'aggregator.global_blocks.2.attn.k_norm.bias'
    change(folder / 'tiny_weights.safetensors', key, 0.01)
    assert main([str(folder)]) == 1


def test_golden_of_a_defect_has_to_differ(tmp_path, capsys):
    folder = small_folder(tmp_path, DEFECT)
    path = folder / 'tiny_sequences.safetensors'
    right = load_file(GOLDEN / path.name)
    name = DEFECT.replace('upstream', 'fixed')
    save_file({k: right[k.replace(DEFECT, name)] for k in load_file(path)}, path)
    assert main([str(folder)]) == 1
    assert 'FAILED' in capsys.readouterr().out


def test_wrong_shape_is_one_line(tmp_path, capsys):
    folder = small_folder(tmp_path, DEFECT)
    path = folder / 'tiny_sequences.safetensors'
    tensors = load_file(path)
    tensors[f'{DEFECT}/pose_enc'] = tensors[f'{DEFECT}/pose_enc'][1:].contiguous()
    save_file(tensors, path)
    assert main([str(folder)]) == 1
    line, summary = capsys.readouterr().out.splitlines()
    assert 'pose_enc has the shape [24, 9] instead of [23, 9]' in line


def test_not_implemented_unless_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(GCTStream, 'inference_windowed', None)
    for name in ('tiny_config.json', 'tiny_frames.safetensors', 'tiny_windowed.safetensors'):
        shutil.copy(GOLDEN / name, tmp_path)
    config = json.loads((tmp_path / 'tiny_config.json').read_text())
    config['windowed'] = [entry for entry in config['windowed'] if entry['mode'] == 'windowed']
    (tmp_path / 'tiny_config.json').write_text(json.dumps(config))
    assert main([str(tmp_path)]) == 3
    assert f'{len(config["windowed"])} not implemented' in capsys.readouterr().out
    assert main([str(tmp_path), '--skip', 'windowed']) == 2


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ([str(GOLDEN), '--prefix', 'huge'], 'no huge_config.json'),
        ([str(GOLDEN / 'nowhere')], 'no such folder'),
    ],
)
def test_nothing_to_run(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize('name', ['tiny_config.json', 'tiny_sequences.safetensors'])
def test_damaged_file(tmp_path, capsys, name):
    folder = small_folder(tmp_path, RIGHT)
    (folder / name).write_bytes(b'{"model": ')
    assert main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert name in error and error.count('\n') == 1


def test_cuda_without_a_device(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert main([str(GOLDEN), '--device', 'cuda']) == 2
    assert '--device cpu' in capsys.readouterr().err


@pytest.mark.cuda
def test_golden_data_on_cuda():
    assert main([str(GOLDEN), '--device', 'cuda']) == 0


def test_empty_folder(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert 'none was run' in capsys.readouterr().out


OTHER_MODEL = {
    'embed_dim': 192, 'num_heads': 3, 'depth': 5, 'selected_layers': [0, 2, 3, 4],
    'vit_depth': 1, 'vit_num_heads': 3, 'num_register_tokens': 2, 'vit_num_register_tokens': 3,
    'img_size': 42, 'camera_trunk_depth': 1, 'camera_num_heads': 3, 'camera_num_iterations': 3,
    'dpt_features': 16, 'dpt_out_channels': [16, 24, 32, 32], 'enable_3d_rope': True,
    'max_frame_num': 16, 'kv_cache_sliding_window': 2, 'kv_cache_scale_frames': 2,
}  # fmt: skip


def test_other_dimensions_weights_from_the_recipe(tmp_path, capsys):
    """Store what another model returns as goldens, without its weights, and compare with that."""
    edit = {'rule': 'camera_head.pose_branch.fc2.bias element 7 set to -0.15', 'factor': 1.0}
    entry = {'name': 'a', 'overrides': {}, 'num_scale_frames': 2, 'keyframe_interval': 2}
    config = {
        'model': OTHER_MODEL, 'weight_salt': 'other', 'sequences': [entry],
        'special': [{**entry, 'name': 'b', 'num_frames': 5, 'weight_edits': [edit]}],
        'plain_forward': [{'name': 'c', 'forward_arguments': {}, 'num_frames': 3}],
    }  # fmt: skip
    (tmp_path / 'odd_config.json').write_text(json.dumps(config))
    frames = torch.randint(256, (7, 3, 42, 70), dtype=torch.uint8)
    save_file({'frames_42x70': frames}, tmp_path / 'odd_frames.safetensors')
    golden = GoldenFolder(tmp_path, 'odd')
    images = frames.float() / 255
    with torch.no_grad():
        streamed = golden.model({}).inference_streaming(images, 2, 2)
        calls = list(stream(golden.model({}, [edit]), images[:5], 2, 2))
        plain = golden.model({})(images[None, :3])
    clipped = {k: torch.cat([call.outputs[k] for call in calls], 1) for k in ('pose_enc', 'depth')}
    assert not (clipped['pose_enc'] == streamed['pose_enc'][:, :5]).all()
    save_file(goldens('a', streamed), tmp_path / 'odd_sequences.safetensors')
    special = {**goldens('b', clipped), **goldens('c', plain)}
    save_file(special, tmp_path / 'odd_special.safetensors')
    assert main([str(tmp_path), '--prefix', 'odd']) == 0
    assert '3 settings: 3 ok' in capsys.readouterr().out
    (tmp_path / 'odd_config.json').write_text(json.dumps({**config, 'weight_salt': ''}))
    assert main([str(tmp_path), '--prefix', 'odd']) == 1


def goldens(setting: str, outputs: dict) -> dict:
    return {
        f'{setting}/pose_enc': outputs['pose_enc'][0].clone(),
        f'{setting}/depth': outputs['depth'][0, :, ::2, ::2].contiguous(),
    }


@pytest.mark.parametrize(
    ('rule', 'touched'),
    [
        ('key starts with head.b. and ends with .gamma', {'head.b.gamma'}),
        ('key starts with head.b. or is one of body.{x,y}, z', {
            'head.b.gamma', 'head.b.weight', 'body.x', 'body.y', 'z'}),
        ('key matches blocks.N.{a,c}.w: first 2C rows (q and k) only', {'blocks.1.a.w'}),
    ],
)  # fmt: skip
def test_weight_edit_rules(rule, touched):
    names = ('head.b.gamma', 'head.b.weight', 'body.x', 'body.y', 'z', 'blocks.1.a.w', 'other')
    weights = {name: torch.ones(6) for name in names}
    edit_weights(weights, {'rule': rule, 'factor': 0.5}, width=2)
    assert {name for name, value in weights.items() if value[0] == 0.5} == touched
    rows = 4 if '2C' in rule else 6
    assert all(weights[name].tolist() == [0.5] * rows + [1.0] * (6 - rows) for name in touched)
