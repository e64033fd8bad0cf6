"""Compiled code on a CPU against eager execution, and what cannot be compiled here."""

from lingbot_map.compiling import compilations, compile_model
from lingbot_map.config import MODEL_PRESETS, StreamConfig
from lingbot_map.engine import StreamEngine
from lingbot_map.frame_runner import FrameRunner
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.recipe import fill_model
import numpy as np
import pytest
import torch

HEIGHT, WIDTH = 56, 84
IMAGES = np.random.default_rng(0).integers(0, 256, (16, HEIGHT, WIDTH, 3), dtype=np.uint8)


def network(mode):
    model = GCTStream.from_config(MODEL_PRESETS['tiny'])
    fill_model(model)
    compile_model(model.requires_grad_(False), mode)
    return model


def warm_engine(model):
    config = StreamConfig(num_scale_frames=3, sliding_window=2, image_width=WIDTH,
                          max_keyframes=40, on_limit='stop')  # fmt: skip
    engine = StreamEngine(model, config)
    engine.warm_up(HEIGHT, WIDTH)
    return engine


def stream(engine):
    """Run all images: keyframes up to an eviction, then every other one is none."""
    results = []
    for i, image in enumerate(IMAGES):
        engine.keyframe_interval = 1 if i < 9 else 2
        results += engine.push(image, i)
    return results


def test_default_equals_eager_execution_and_compiles_nothing_once_it_is_warm(monkeypatch):
    expected = stream(warm_engine(network('off')))
    before = compilations()
    model = network('default')
    keys = list(model.state_dict())
    engine = warm_engine(model)
    warm = compilations()
    assert warm > before and (engine.compile_mode, engine.attention_backend) == ('default', 'sdpa')
    assert list(model.state_dict()) == keys
    # The engine would go on eagerly, and not be noticed: here it fails instead.
    strict = torch.compiler.set_stance
    monkeypatch.setattr(FrameRunner, '_stance', lambda self: strict('fail_on_recompile'))
    results = stream(engine)
    assert compilations() == warm
    kept = [result.is_keyframe for result in results]
    assert kept == [result.is_keyframe for result in expected]
    assert not all(kept) and sum(kept) > 3 + 2
    for ours, theirs in zip(results, expected, strict=True):
        np.testing.assert_allclose(ours.T_world_cam, theirs.T_world_cam, atol=1e-5)
        torch.testing.assert_close(ours.depth, theirs.depth, rtol=1e-4, atol=0)


def test_what_a_cpu_cannot_do_is_named():
    model = network('auto')
    assert (model.compile_mode, model.attention_backend) == ('off', 'sdpa')
    with pytest.raises(ValueError, match="'compile_mode' is 'cuda-graph', which needs a CUDA"):
        compile_model(model, 'cuda-graph')
    with pytest.raises(ValueError, match="'attention_backend' is 'cudnn', which needs a CUDA"):
        compile_model(model, 'off', 'cudnn')
    with pytest.raises(ValueError, match="'compile_mode' is 'fast'; use auto, off"):
        compile_model(model, 'fast')
