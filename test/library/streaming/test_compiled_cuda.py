"""Compiled modes and captured graphs against eager execution, on a CUDA device."""

import logging
import sys
import threading

from lingbot_map.benchmark.recipe import fill_model
from lingbot_map.config import MODEL_PRESETS
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.settings import StreamConfig
from lingbot_map.streaming import compiling
from lingbot_map.streaming import runner as frame_runner
from lingbot_map.streaming.checkpoint import set_heads_dtype, set_trunk_dtype
from lingbot_map.streaming.compiling import compilations, compile_model, resolve_for
from lingbot_map.streaming.engine import StreamEngine
import numpy as np
import pytest
import torch
from torch.nn import functional as F

pytestmark = pytest.mark.cuda
HEIGHT, WIDTH = 56, 84
MODES = ('default', 'reduce-overhead', 'max-autotune', 'cuda-graph')
# The stream evicts: 3 anchors and 13 window slots, of 40 frames every second is kept later on.
CONFIG = {'num_scale_frames': 3, 'sliding_window': 13, 'image_width': WIDTH}


@pytest.fixture(scope='module')
def images():
    return np.random.default_rng(5).integers(0, 256, (40, HEIGHT, WIDTH, 3), dtype=np.uint8)


def network(mode, backend='auto', dtype=torch.bfloat16, heads='fp32'):
    model = GCTStream.from_config(MODEL_PRESETS['tiny'])
    fill_model(model)
    model.cuda()
    set_trunk_dtype(model, dtype)
    set_heads_dtype(model, heads)
    compile_model(model, resolve_for(model, mode, backend))
    return model


def engine_for(model, warm=True, **settings):
    settings = {'max_keyframes': 40, 'on_limit': 'stop'} | CONFIG | settings
    engine = StreamEngine(model, StreamConfig(**settings), 'cuda')
    if warm:
        engine.warm_up(HEIGHT, WIDTH)
    return engine


def stream(engine, images):
    results = []
    for i, image in enumerate(images):
        engine.keyframe_interval = 1 if i < 25 else 2
        results += engine.push(image, i)
    return results


def deviation(results, expected):
    """Return the largest difference of poses, and of depths relative to them."""
    poses = max(np.abs(a.T_world_cam - b.T_world_cam).max()
                for a, b in zip(results, expected, strict=True))  # fmt: skip
    depths = max(float(((a.depth - b.depth).abs() / b.depth).max())
                 for a, b in zip(results, expected, strict=True))  # fmt: skip
    return poses, depths


@pytest.mark.parametrize('backend', ['cudnn', 'flash', 'triton'])
@pytest.mark.parametrize('mode', ['off', 'cuda-graph'])
def test_attention_backends_agree_with_sdpa(images, mode, backend):
    dtype = torch.float32 if backend == 'triton' else torch.float16
    expected = stream(engine_for(network('off', 'sdpa', dtype)), images)
    results = stream(engine_for(network(mode, backend, dtype)), images)
    poses, depths = deviation(results, expected)
    limit = 2e-5 if dtype == torch.float32 else 1e-2
    assert poses < limit and depths < limit


@pytest.mark.parametrize('queries', [1, 45, 300])
def test_the_kernel_continues_a_softmax_exactly(queries):
    from lingbot_map.streaming import triton_kernels
    from lingbot_map.streaming.cached_attention import attend_with_lse

    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 4, 4000, 64, device='cuda', dtype=torch.float16)
    q = torch.randn(1, 4, queries, 64, device='cuda', dtype=torch.float16)
    for ranges in ((10, 11, 3000, 3999), (0, 1000, 3000, 3000), (5, 5, 7, 7)):
        rows = torch.cat((torch.arange(*ranges[:2]), torch.arange(*ranges[2:]),
                          torch.arange(1024, 2048))).cuda()  # fmt: skip
        expected = F.scaled_dot_product_attention(
            q.float(), keys[:, :, rows].float(), values[:, :, rows].float()
        )
        for backend in ('cudnn', 'flash'):
            prior = attend_with_lse(q, keys[:, :, 1024:2048], values[:, :, 1024:2048], backend)
            out = triton_kernels.attend(q, keys, values, torch.tensor(ranges).cuda(), prior)
            torch.testing.assert_close(out.float(), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize('mode', MODES)
def test_every_mode_equals_eager(images, mode):
    expected = stream(engine_for(network('off')), images)
    exact = stream(engine_for(network('off', dtype=torch.float32)), images)
    model = network(mode)
    keys = list(model.state_dict())
    engine = engine_for(model)
    assert model.compile_mode == mode and list(model.state_dict()) == keys
    poses, depths = deviation(stream(engine, images), exact)
    own = deviation(expected, exact)
    assert poses < 1.5 * own[0] and depths < 1.5 * own[1]


@pytest.mark.parametrize('mode', ['default', 'reduce-overhead', 'cuda-graph'])
def test_nothing_is_compiled_after_warm_up_and_a_second_sequence_is_the_same(
    images, mode, monkeypatch
):
    engine = engine_for(network(mode))
    captures, capture = [], torch.cuda.graph.__enter__
    monkeypatch.setattr(torch.cuda.graph, '__enter__', lambda self: captures.append(capture(self)))
    before = compilations()
    graphs = torch._dynamo.utils.counters['stats']['unique_graphs']
    first = stream(engine, images)
    assert engine.keyframes > 3 + 13 + 8  # the window was full and frames were evicted
    engine.reset()
    assert deviation(stream(engine, images), first) == (0, 0)
    engine.reset()
    engine.push(images[0])
    assert len(engine.flush()) == 1  # a scale batch of another size is no reason to compile
    assert compilations() == before and not captures
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == graphs


@pytest.mark.parametrize('mode', ['reduce-overhead', 'cuda-graph'])
def test_later_frames_do_not_alter_earlier_results(images, mode):
    engine = engine_for(network(mode))
    results, copies = [], []
    for image in images[:12]:
        new = engine.push(image)
        results += new
        copies += [(r.depth.clone(), r.confidence.clone(), r.T_world_cam.copy()) for r in new]
    for result, (depth, confidence, pose) in zip(results, copies, strict=True):
        assert torch.equal(result.depth, depth) and torch.equal(result.confidence, confidence)
        assert np.array_equal(result.T_world_cam, pose)


def test_a_graph_rolls_over_like_eager_execution(images):
    settings = {'max_keyframes': 12, 'on_limit': 'roll_over', 'overlap_keyframes': 4}
    expected = stream(engine_for(network('off', dtype=torch.float32), **settings), images[:30])
    engine = engine_for(network('cuda-graph', dtype=torch.float32), **settings)
    before = compilations()
    results = stream(engine, images[:30])
    assert engine.window >= 2 and compilations() == before
    poses, depths = deviation(results, expected)
    assert poses < 1e-4 and depths < 1e-4


def test_a_failed_capture_falls_back_with_one_warning(images, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError('no capture today\nwith a long explanation')

    monkeypatch.setattr(frame_runner.CapturedPass, '__init__', fail)
    model = network('cuda-graph')
    with caplog.at_level(logging.WARNING, 'lingbot_map'):
        engine = engine_for(model)
    (record,) = caplog.records
    assert 'no capture today' in record.getMessage() and "'default'" in record.getMessage()
    assert 'explanation' not in record.getMessage()
    assert model.compile_mode == 'default' and len(stream(engine, images[:6])) == 6


def test_flashinfer_that_is_missing_is_said_and_replaced(images, monkeypatch, caplog):
    monkeypatch.setattr(
        compiling, 'find_spec', lambda name: None if name == 'flashinfer' else name
    )
    with caplog.at_level(logging.WARNING, 'lingbot_map'):
        model = network('off', 'flashinfer')
    (record,) = caplog.records
    assert 'pip install' in record.getMessage()
    assert model.attention_backend in compiling.RING_BACKENDS
    expected = stream(engine_for(network('off', 'sdpa')), images)
    poses, depths = deviation(stream(engine_for(model), images), expected)
    assert poses < 0.05 and depths < 0.2


def test_flashinfer_that_is_broken_is_said_and_replaced(images, monkeypatch, caplog):
    monkeypatch.setattr(compiling, 'find_spec', lambda name: name)
    monkeypatch.setitem(sys.modules, 'flashinfer', None)  # the import fails
    with caplog.at_level(logging.WARNING, 'lingbot_map'):
        engine = engine_for(network('off', 'flashinfer'))
    (record,) = caplog.records
    assert 'cannot be imported' in record.getMessage()
    assert engine.attention_backend in compiling.RING_BACKENDS
    assert len(stream(engine, images[:6])) == 6


@pytest.mark.parametrize(('asked', 'mode'), [
    ('off', 'off'), ('reduce-overhead', 'reduce-overhead'),
    ('cuda-graph', 'reduce-overhead')])  # fmt: skip
def test_flashinfer_agrees_with_sdpa(images, asked, mode):
    pytest.importorskip('flashinfer')
    exact = stream(engine_for(network('off', dtype=torch.float32)), images)
    for dtype in (torch.float16, torch.bfloat16):
        own = deviation(stream(engine_for(network('off', 'sdpa', dtype)), images), exact)
        engine = engine_for(network(asked, 'flashinfer', dtype))
        poses, depths = deviation(stream(engine, images), exact)
        assert (engine.compile_mode, engine.attention_backend) == (mode, 'flashinfer')
        assert poses < 1.5 * own[0] and depths < 1.5 * own[1]


def test_expandable_segments_switch_graph_trees_off_and_say_so(images, monkeypatch, caplog):
    monkeypatch.setenv('PYTORCH_ALLOC_CONF', 'expandable_segments:True')
    with caplog.at_level(logging.WARNING, 'lingbot_map'):
        engine = engine_for(network('reduce-overhead'))
    assert 'expandable_segments' in caplog.records[0].getMessage()
    assert len(stream(engine, images[:6])) == 6


@pytest.mark.parametrize('mode', ['reduce-overhead', 'cuda-graph'])
def test_another_thread_is_refused(images, mode):
    engine = engine_for(network(mode))
    errors = []

    def use():
        try:
            stream(engine, images[:4])
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(errors) == 1 and 'another thread' in errors[0]


def test_a_new_image_size_warms_up_again_and_says_so(images, caplog):
    engine = engine_for(network('cuda-graph'))
    other = np.random.default_rng(1).integers(0, 256, (6, 84, WIDTH, 3), dtype=np.uint8)
    stream(engine, images[:5])
    with caplog.at_level(logging.WARNING, 'lingbot_map'):
        engine.push(other[0])
    assert any('warming up for images of 84x84' in r.getMessage() for r in caplog.records)
    before = compilations()
    results = stream(engine, other[1:])
    expected_engine = engine_for(network('off'), warm=False)
    expected = stream(expected_engine, other)
    assert compilations() == before
    poses, _ = deviation(results, expected)
    assert poses < 0.05


@pytest.mark.parametrize('heads', ['tf32', 'bf16'])
def test_heads_in_short_precision_stay_near_float32(images, heads):
    exact = stream(engine_for(network('off', heads='fp32')), images)
    poses, depths = deviation(
        stream(engine_for(network('cuda-graph', heads=heads)), images), exact
    )
    assert 0 < poses < 0.05 and 0 < depths < 0.2


def test_auto_is_the_captured_mode_for_half_precision_and_eager_for_float32():
    assert network('auto').compile_mode == 'cuda-graph'
    assert network('auto').attention_backend in compiling.RING_BACKENDS
    assert network('auto', dtype=torch.float32).compile_mode == 'off'
