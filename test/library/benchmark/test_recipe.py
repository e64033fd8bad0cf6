"""The weight recipe against known values of the full-size model."""

import hashlib
import json
from pathlib import Path

from lingbot_map.benchmark.recipe import fill_model, fill_values, scale_and_offset
import numpy as np
import pytest
import torch

FULL_SIZE = json.loads((Path(__file__).parents[2] / 'golden' / 'full_size.json').read_text())


@pytest.mark.parametrize('key', FULL_SIZE['recipe_samples'])
def test_sample_values(key):
    sample = FULL_SIZE['recipe_samples'][key]
    values = np.empty(sample['shape'], np.float32)
    fill_values(key, values)
    assert values.ravel()[:6].tolist() == sample['first']
    assert values.ravel()[-1].item() == sample['last']
    known = FULL_SIZE['sha256_of_float32_little_endian_bytes'][key]
    assert hashlib.sha256(values.astype('<f4').tobytes()).hexdigest() == known
    assert scale_and_offset(key, tuple(sample['shape'])) == (sample['scale'], sample['offset'])


def test_salt_changes_every_tensor():
    plain, salted = np.empty((2, 8), np.float32)
    fill_values('some.token', plain)
    fill_values('some.token', salted, 'salt')
    assert not np.isin(plain, salted).any()


def test_meta_model_gets_the_same_weights_as_a_real_one():
    def build():
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))

    with torch.device('meta'):
        from_meta = build()
    real = build()
    fill_model(from_meta, 'salt')
    fill_model(real, 'salt')
    for key, value in real.state_dict().items():
        assert torch.equal(from_meta.state_dict()[key], value), key
        assert from_meta.get_parameter(key).requires_grad


def test_rounding_through_float16():
    layer = torch.nn.Linear(3, 4)
    fill_model(layer, through_float16=True)
    assert torch.equal(layer.weight, layer.weight.half().float())
    exact = torch.nn.Linear(3, 4)
    fill_model(exact)
    assert torch.equal(layer.weight, exact.weight.half().float())
    assert not torch.equal(layer.weight, exact.weight)
