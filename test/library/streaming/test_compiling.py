"""Compiled code on a CPU against eager execution, and what cannot be compiled here."""

import logging
from subprocess import CalledProcessError
import threading

from lingbot_map.benchmark.recipe import fill_model
from lingbot_map.config import MODEL_PRESETS
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.settings import StreamConfig
from lingbot_map.streaming.compiling import compilations, compile_model, resolve_mode, settle
from lingbot_map.streaming.engine import StreamEngine
from lingbot_map.streaming.runner import FrameRunner
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


@pytest.fixture(scope='module')
def expected():
    return stream(warm_engine(network('off')))


@pytest.mark.slow
def test_default_equals_eager_execution_and_compiles_nothing_once_it_is_warm(
    expected, monkeypatch
):
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


def test_what_fails_to_compile_runs_eagerly_and_says_why_once(expected, caplog):
    model = network('default')

    def fail(*_):
        raise RuntimeError('no compiler found\nand a long explanation')

    for block in model.aggregator.global_blocks:
        block.attn_pre = fail
    with caplog.at_level(logging.WARNING, 'lingbot_map'):
        engine = warm_engine(model)
    (record,) = caplog.records
    assert 'no compiler found' in record.getMessage() and "'off'" in record.getMessage()
    assert 'explanation' not in record.getMessage()
    assert engine.compile_mode == 'off'
    for ours, theirs in zip(stream(engine), expected, strict=True):
        assert np.array_equal(ours.T_world_cam, theirs.T_world_cam)
        assert torch.equal(ours.depth, theirs.depth)


@pytest.mark.parametrize('error', [
    RuntimeError('no C compiler'), CalledProcessError(1, 'gcc'),
    OSError('gcc is not there')])  # fmt: skip
@pytest.mark.parametrize('backend', ['cudnn', 'flash', 'triton'])
def test_kernels_that_cannot_be_built_are_replaced_also_without_compilation(
    backend, error, caplog
):
    model = network('off')
    model.attention_backend = backend  # as a GPU would choose it
    used = []

    def rehearse():
        used.append(model.attention_backend)
        if model.attention_backend != 'sdpa':
            raise error

    with caplog.at_level(logging.WARNING, 'lingbot_map'):
        settle(model, rehearse)
    assert used == [backend, 'sdpa'] and model.compile_mode == 'off' and len(caplog.records) == 1


def test_what_fails_eagerly_too_is_an_error():
    model = network('off')

    def fail(*_):
        raise RuntimeError('broken')

    model.aggregator.global_blocks[0].attn_pre = fail
    with pytest.raises(RuntimeError, match='broken'):
        warm_engine(model)


@pytest.mark.parametrize(('settings', 'warns'), [
    ('expandable_segments:True', True), ('max_split_size_mb:64', False)])  # fmt: skip
def test_expandable_segments_switch_graph_trees_off_and_say_so(
    monkeypatch, caplog, settings, warns
):
    monkeypatch.setenv('PYTORCH_ALLOC_CONF', settings)
    with caplog.at_level(logging.WARNING, 'lingbot_map'):
        network('reduce-overhead')
    assert [('expandable_segments' in r.getMessage()) for r in caplog.records] == [True] * warns


@pytest.mark.slow
def test_a_compiled_engine_refuses_another_thread():
    engine = warm_engine(network('default'))
    errors = []

    def use():
        try:
            stream(engine)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(errors) == 1 and 'another thread' in errors[0]
    assert len(stream(engine)) == len(IMAGES)


def test_an_attention_backend_that_is_not_possible_is_named_before_anything_is_loaded():
    with pytest.raises(ValueError, match="'attention_backend' is 'flash', which needs a CUDA"):
        resolve_mode('off', 'flash', torch.device('cpu'), torch.float32)
