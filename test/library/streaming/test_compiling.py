"""Compiled code on a CPU against eager execution, and what cannot be compiled here."""

from dataclasses import replace
import logging
from subprocess import CalledProcessError
import sys
import threading
from types import ModuleType

from lingbot_map.benchmark.recipe import fill_model
from lingbot_map.config import MODEL_PRESETS
from lingbot_map.memory_budget import main as memory_budget
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.settings import build, EngineSettings, StreamConfig
from lingbot_map.streaming import compiling, loading
from lingbot_map.streaming.compiling import (
    compilations,
    compile_model,
    Device,
    Execution,
    resolve,
    resolve_for,
    warm_up,
)
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
    compile_model(model.requires_grad_(False), resolve_for(model, mode))
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
        resolve_for(model, 'cuda-graph')
    with pytest.raises(ValueError, match="'attention_backend' is 'cudnn', which needs a CUDA"):
        resolve_for(model, 'off', 'cudnn')
    with pytest.raises(ValueError, match="'compile_mode' is 'fast'; use auto, off"):
        resolve_for(model, 'fast')
    with pytest.raises(ValueError, match="'attention_backend' is 'fast'; use auto, sdpa"):
        resolve_for(model, 'off', 'fast')


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

    def run():
        used.append(model.attention_backend)
        if model.attention_backend != 'sdpa':
            raise error

    with caplog.at_level(logging.WARNING, 'lingbot_map'):
        warm_up(model, run)
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


HALF = torch.bfloat16
CPU = Device('cpu')
TURING, A100, ORIN, RTX_4090, H200 = (
    Device('cuda', capability, 'card') for capability in ((7, 5), (8, 0), (8, 7), (8, 9), (9, 0))
)


@pytest.fixture
def flashinfer(monkeypatch):
    monkeypatch.setitem(sys.modules, 'flashinfer', ModuleType('flashinfer'))
    monkeypatch.setattr(compiling, 'find_spec', lambda name: name)


@pytest.fixture
def no_flashinfer(monkeypatch):
    monkeypatch.setattr(compiling, 'find_spec', lambda name: None)


@pytest.mark.parametrize(('device', 'dtype', 'mode', 'backend'), [
    (CPU, torch.float32, 'off', 'sdpa'),
    (TURING, torch.float16, 'cuda-graph', 'triton'),
    (A100, HALF, 'cuda-graph', 'flash'),
    (ORIN, HALF, 'cuda-graph', 'flash'),
    (RTX_4090, HALF, 'cuda-graph', 'flash'),
    (H200, HALF, 'cuda-graph', 'cudnn'),
    (H200, torch.float32, 'off', 'sdpa'),
    (replace(ORIN, has_triton=False), HALF, 'off', 'sdpa'),
    (replace(H200, expandable_segments=True), HALF, 'cuda-graph', 'cudnn'),
])  # fmt: skip
def test_auto_follows_device_and_precision(device, dtype, mode, backend):
    execution = resolve('auto', 'auto', device, dtype)
    assert (execution, execution.warnings) == (Execution(mode, backend), ())


@pytest.mark.parametrize(('asked', 'device', 'dtype', 'mode', 'backend'), [
    (('default', 'auto'), CPU, torch.float32, 'default', 'sdpa'),
    (('cuda-graph', 'auto'), H200, torch.float32, 'cuda-graph', 'triton'),
    (('cuda-graph', 'triton'), ORIN, HALF, 'cuda-graph', 'triton'),
    (('off', 'cudnn'), H200, HALF, 'off', 'cudnn'),
    (('auto', 'sdpa'), H200, HALF, 'reduce-overhead', 'sdpa'),
    (('auto', 'flashinfer'), ORIN, HALF, 'reduce-overhead', 'flashinfer'),
    (('max-autotune', 'flashinfer'), H200, HALF, 'max-autotune', 'flashinfer'),
])  # fmt: skip
def test_what_is_asked_for_and_possible_is_what_runs(
    asked, device, dtype, mode, backend, flashinfer
):
    execution = resolve(*asked, device, dtype)
    assert (execution, execution.warnings) == (Execution(mode, backend), ())


@pytest.mark.parametrize('mode', ['auto', 'cuda-graph'])
def test_without_flashinfer_the_mode_is_that_of_the_backend_that_runs(mode, no_flashinfer):
    execution = resolve(mode, 'flashinfer', H200, HALF)
    assert execution == Execution('cuda-graph', 'cudnn')
    (warning,) = execution.warnings
    assert 'is not installed: pip install' in warning


@pytest.mark.parametrize(('device', 'dtype', 'reason'), [
    (TURING, torch.float16, 'has no kernels for card'),
    (H200, torch.float32, "has no kernels for 'dtype' float32"),
])  # fmt: skip
def test_flashinfer_without_kernels_is_replaced(device, dtype, reason, flashinfer):
    execution = resolve('auto', 'flashinfer', device, dtype)
    assert execution == resolve('auto', 'auto', device, dtype)
    (warning,) = execution.warnings
    assert reason in warning and "going on with 'auto'" in warning


def test_flashinfer_cannot_be_captured_and_runs_in_the_next_slower_mode(flashinfer):
    execution = resolve('cuda-graph', 'flashinfer', H200, HALF)
    assert execution == Execution('reduce-overhead', 'flashinfer')
    (warning,) = execution.warnings
    assert "'cuda-graph'" in warning and "'reduce-overhead' and 'flashinfer'" in warning


@pytest.mark.parametrize(('mode', 'backend', 'used'), [
    ('cuda-graph', 'auto', 'sdpa'),
    ('reduce-overhead', 'flash', 'sdpa'),
    ('off', 'cudnn', 'sdpa'),
    ('default', 'flashinfer', 'flashinfer'),
])  # fmt: skip
def test_without_triton_a_gpu_runs_eagerly(mode, backend, used, flashinfer):
    execution = resolve(mode, backend, replace(ORIN, has_triton=False), HALF)
    assert execution == Execution('off', used)
    (warning,) = execution.warnings
    assert 'Triton is not installed' in warning


def test_expandable_segments_and_a_capture_that_is_not_possible_are_one_warning(flashinfer):
    device = replace(H200, expandable_segments=True)
    execution = resolve('cuda-graph', 'flashinfer', device, HALF)
    assert execution == Execution('default', 'flashinfer')
    (warning,) = execution.warnings
    assert 'captured' in warning and 'expandable_segments' in warning


@pytest.mark.parametrize(('mode', 'backend', 'device', 'dtype', 'reason'), [
    ('cuda-graph', 'sdpa', H200, HALF, "and 'attention_backend' is 'sdpa', which cannot be capt"),
    ('off', 'flash', CPU, torch.float32, "'attention_backend' is 'flash', which needs a CUDA"),
    ('off', 'flashinfer', CPU, torch.float32, "is 'flashinfer', which needs a CUDA"),
    ('off', 'cudnn', H200, torch.float32, "'cudnn', which needs 'dtype' bfloat16 or float16"),
])  # fmt: skip
def test_a_contradiction_is_refused(mode, backend, device, dtype, reason):
    with pytest.raises(ValueError, match=reason):
        resolve(mode, backend, device, dtype)


def test_the_memory_check_assumes_the_mode_that_runs(monkeypatch):
    """Also where only the resolver knows it: here, for want of FlashInfer on an H200."""
    assumed, compiled, blank_model = [], [], loading.blank_model

    def blank(*arguments):
        assumed.append(arguments[-1])
        return blank_model(*arguments)

    answers = iter([Execution('cuda-graph', 'cudnn')])  # one: it is asked once
    monkeypatch.setattr(loading, 'resolve', lambda *_: next(answers))
    monkeypatch.setattr(loading, 'blank_model', blank)
    monkeypatch.setattr(loading, 'compile_model', lambda model, how: compiled.append(how))
    params = {'model': 'tiny', 'checkpoint': 'random', 'device': 'cpu', 'image_width': 84}
    loading.load_engine(build(EngineSettings, params))
    assert assumed == ['cuda-graph'] and compiled == [Execution('cuda-graph', 'cudnn')]


def test_a_warning_is_logged_once_when_the_model_is_made_to_run_so(caplog):
    with caplog.at_level(logging.WARNING, 'lingbot_map'):
        compile_model(network('off'), Execution('off', 'sdpa', ('for 100 % of reasons',)))
    assert caplog.messages == ['for 100 % of reasons']


def test_the_memory_budget_resolves_as_on_a_gpu(monkeypatch, capsys):
    """A machine without Triton may ask for that of another one."""
    monkeypatch.setattr(compiling, '_has_triton', lambda: False)
    monkeypatch.setenv('PYTORCH_ALLOC_CONF', 'expandable_segments:True')
    printed = []
    for mode in ('auto', 'cuda-graph', 'off'):
        assert memory_budget(['--model', 'tiny', '--compile-mode', mode]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
