"""The memory that a stream needs is known before its first frame, and is kept to."""

from dataclasses import replace
import gc
import logging
from pathlib import Path
import weakref

from lingbot_map.config import MODEL_PRESETS
from lingbot_map.layers.attention import attend_fully
from lingbot_map.memory_budget import main
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.settings import (
    build,
    EngineSettings,
    stream_config,
    StreamConfig,
    usual_image_size,
)
from lingbot_map.streaming.budget import (
    apply_limit,
    blank_model,
    CALIBRATION,
    changes,
    check_memory,
    fit,
    GB,
    memory_limit,
    MemoryLimit,
    MemoryLimitError,
    predict,
)
from lingbot_map.streaming.checkpoint import load_model, set_heads_dtype, set_trunk_dtype
from lingbot_map.streaming.compiling import compile_model, resolve_for
from lingbot_map.streaming.engine import StreamEngine
from lingbot_map.streaming.roll_over import NextWindow
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
import yaml

CONFIG = Path(__file__).parents[2] / 'config'
SIZE = 392, 518  # height, width of 4:3 images in the full network


@pytest.fixture(scope='module')
def full():
    return blank_model('full', torch.bfloat16, 'tf32', 'cuda-graph')


def limit_of(gigabytes):
    return MemoryLimit(gigabytes * GB, 'test')


@pytest.mark.parametrize('heads', ['tf32', 'bf16'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_weights_are_those_of_a_loaded_model(dtype, heads):
    loaded = load_model('tiny', 'random', 'cpu', dtype)
    set_heads_dtype(loaded, heads)
    real = sum(t.nbytes for t in (*loaded.parameters(), *loaded.buffers()))
    blank = blank_model('tiny', dtype, heads)
    assert all(p.is_meta for p in blank.parameters())
    for model in (loaded, blank):
        assert predict(model, StreamConfig(image_width=56), 42, 56).weights == real


@pytest.mark.parametrize(
    ('preset', 'settings', 'size'),
    [
        ('tiny', {}, (42, 56)),
        ('tiny', {'sliding_window': 0, 'num_scale_frames': 1}, (56, 56)),
        (
            'tiny',
            {'max_keyframes': 20, 'overlap_keyframes': 3},
            (28, 56),
        ),  # no full window
        ('tiny', {'num_scale_frames': 2, 'overlap_keyframes': 9, 'sliding_window': 4}, (42, 56)),
        ('demo', {'sliding_window': 16}, (70, 56)),  # cropped; the camera head has no cache
    ],
)
def test_caches_are_those_that_are_allocated(preset, settings, size):
    config = StreamConfig(image_width=56, **settings)
    with torch.device('meta'):
        model = GCTStream.from_config(MODEL_PRESETS[preset])
    set_trunk_dtype(model, torch.bfloat16)
    budget = predict(model, config, *size)
    model.kv_cache_scale_frames = config.num_scale_frames
    model.kv_cache_sliding_window = config.sliding_window
    height = min(size[0], 56)
    memory = model.new_memory(height, 56, config.max_keyframes)
    assert (budget.size, budget.tokens) == ((56, height), height // 14 * 4 + 6)
    assert budget.cache + budget.camera_cache == memory.nbytes
    following = NextWindow(
        model, height, 56, config.num_scale_frames, config.overlap_keyframes
    ).memory.nbytes
    overlap, pixels = config.overlap_keyframes, height * 56
    held = 3 * min(config.num_scale_frames, overlap) * pixels + 2 * overlap * pixels * 4
    assert budget.next_window == following + held
    assert predict(model, replace(config, on_limit='stop'), *size).next_window == 0


def test_the_next_window_holds_what_is_counted():
    config = StreamConfig(image_width=56, num_scale_frames=2, overlap_keyframes=4, max_keyframes=8)
    engine = StreamEngine(load_model('tiny', 'random'), config)
    for value in range(7):
        engine.push(np.full((42, 56, 3), value, np.uint8))
    following = engine._next
    depths = [part['depth'] for part in (*following._current, *following._next)]
    of_three = sum(depth.nbytes for depth in depths)  # the fourth frame closes the window
    images = 2 * 3 * 42 * 56  # a scale batch that waits for its last frame
    counted = predict(engine._model, config, 42, 56).next_window - following.memory.nbytes
    assert counted == of_three // 3 * 4 + images


class LiveTensors(TorchDispatchMode):
    """Adds up the storage of all tensors made since it was entered, and keeps the peak."""

    def __init__(self):
        super().__init__()
        self._sizes, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage):
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, storage._cdata)

    def _remove(self, key):
        self.now -= self._sizes.pop(key)


def live_bytes(model, frames, height, width):
    """Return the peak of an eager pass over a scale batch, by tensors that hold no memory."""
    images = torch.zeros(1, frames, 3, height, width, device='meta', dtype=torch.uint8)
    with torch.inference_mode(), LiveTensors() as live:
        index = torch.arange(frames, device='meta')
        selected = model.aggregator(
            images.float() / 255, index, frames, lambda layer, q, k, v: attend_fully(q, k, v)
        )
        model.dense([layer.float() for layer in selected], (height, width))
    return live.peak


@pytest.mark.parametrize(
    ('preset', 'dtype', 'frames', 'size', 'chunk'),
    [
        ('full', torch.bfloat16, 8, (378, 518), 8),
        ('full', torch.bfloat16, 8, (378, 518), 1),
        ('full', torch.bfloat16, 2, (294, 518), 1),
        ('full', torch.float32, 8, (294, 392), 8),
        ('demo', torch.float32, 8, (126, 168), 8),
    ],
)
def test_working_memory_follows_from_the_tensors_that_are_alive(
    preset, dtype, frames, size, chunk
):
    model = blank_model(preset, dtype)
    model.to('meta').depth_head.frames_per_chunk = chunk
    config = StreamConfig(num_scale_frames=frames, image_width=size[1])
    predicted = predict(model, config, *size).working - CALIBRATION.workspace
    assert 1 <= predicted / live_bytes(model, frames, *size) < 1.35


def test_graphs_keep_the_memory_of_their_passes():
    config = StreamConfig(num_scale_frames=1)
    eager, captured = (
        predict(blank_model('full', torch.bfloat16, 'tf32', mode), config, *SIZE).working
        for mode in ('off', 'cuda-graph')
    )
    kept = eager - CALIBRATION.workspace  # one frame is decoded at a time either way
    assert captured == pytest.approx(eager + kept, abs=2)


def test_the_full_network_needs_what_was_measured():
    """The measurement: H200, torch 2.11, eager, 320 keyframes without roll-over, in GiB."""
    model = blank_model('full', torch.bfloat16)
    for height, measured in ((294, 9.9), (378, 11.9)):
        total = predict(model, StreamConfig(on_limit='reset'), height, 518).total
        assert total / 2**30 == pytest.approx(measured, rel=0.02)


def test_what_is_too_large_names_the_largest_window_that_fits(full):
    config = StreamConfig()
    budget = predict(full, config, *SIZE)
    with pytest.raises(MemoryLimitError) as caught:
        check_memory(full, config, *SIZE, limit_of(8))
    text = str(caught.value)
    assert f'need {budget.total / GB:.2f} GB' in text and 'limit is 8.00 GB (test)' in text
    assert '\n' not in text and text.endswith('would fit')
    window = int(text.split('sliding_window ')[-1].split()[0])
    fitting = replace(config, sliding_window=window)
    assert check_memory(full, fitting, *SIZE, limit_of(8)).total <= 8 * GB
    with pytest.raises(MemoryLimitError):
        check_memory(full, replace(config, sliding_window=window + 1), *SIZE, limit_of(8))
    assert check_memory(full, config, *SIZE, None) == budget


def test_what_no_window_makes_fit_names_a_smaller_width_or_the_least(full):
    with pytest.raises(MemoryLimitError, match=r'\): .*sliding_window 8.*, image_width 4\d\d w'):
        check_memory(full, StreamConfig(), *SIZE, limit_of(6))
    smallest = {'sliding_window': 8, 'max_keyframes': 72, 'image_width': 266}
    least = total_of(full, **smallest)
    words = r'smallest settings \(sliding_window 8, max_keyframes 72, image_width 266\) need '
    with pytest.raises(MemoryLimitError, match=f'{words}{least / GB:.2f} GB$'):
        check_memory(full, StreamConfig(), *SIZE, limit_of(1))
    fitting = check_memory(full, StreamConfig(**smallest), *SIZE, MemoryLimit(least, 'test'))
    assert fitting.total == least


def total_of(model, **settings):
    return predict(model, StreamConfig(**settings), *SIZE).total


def test_what_fits_is_not_shrunk(full):
    exact = MemoryLimit(total_of(full), 'test')
    assert fit(full, StreamConfig(), *SIZE, exact) == StreamConfig()


def test_keyframes_go_first_and_as_few_as_needed(full):
    between = (total_of(full) + total_of(full, max_keyframes=200)) / 2
    shrunk = fit(full, StreamConfig(), *SIZE, MemoryLimit(between, 'test'))
    assert changes(StreamConfig(), shrunk) == f'max_keyframes {shrunk.max_keyframes}'
    assert predict(full, shrunk, *SIZE).total <= between
    more = replace(shrunk, max_keyframes=shrunk.max_keyframes + 1)
    assert predict(full, more, *SIZE).total > between


@pytest.mark.parametrize(
    ('settings', 'least'),
    [
        ({}, 72),  # anchors and window
        ({'sliding_window': 4, 'overlap_keyframes': 20}, 40),  # to roll over
        ({'sliding_window': 4, 'overlap_keyframes': 20, 'on_limit': 'stop'}, 12),
    ],
)
def test_keyframes_stay_enough_for_window_and_roll_over(full, settings, least):
    exact = total_of(full, max_keyframes=least, **settings)
    shrunk = fit(full, StreamConfig(**settings), *SIZE, MemoryLimit(exact, 'test'))
    assert shrunk == StreamConfig(max_keyframes=least, **settings)


def test_the_window_goes_next_in_steps_of_8(full):
    limit = MemoryLimit(total_of(full, sliding_window=24, max_keyframes=100), 'test')
    shrunk = fit(full, StreamConfig(), *SIZE, limit)
    assert shrunk == StreamConfig(sliding_window=24, max_keyframes=100)
    shrunk = fit(full, StreamConfig(sliding_window=28), *SIZE, limit)
    assert shrunk == StreamConfig(sliding_window=20, max_keyframes=shrunk.max_keyframes)


def test_the_width_goes_last_in_patches_down_to_half(full):
    small = {'sliding_window': 8, 'max_keyframes': 72, 'image_width': 406}
    limit = MemoryLimit(total_of(full, **small), 'test')
    assert fit(full, StreamConfig(), *SIZE, limit) == StreamConfig(**small)
    least = total_of(full, **small | {'image_width': 266})
    assert fit(full, StreamConfig(), *SIZE, MemoryLimit(least - 1, 'test')) is None


def test_shrinking_is_logged_with_what_is_needed_then(full, caplog):
    caplog.set_level(logging.INFO)
    config = apply_limit(full, StreamConfig(), *SIZE, limit_of(12), True)
    warning, info = (record.getMessage() for record in caplog.records)
    assert (
        warning == f'the limit is 12.00 GB (test): going on with {changes(StreamConfig(), config)}'
    )
    assert str(predict(full, config, *SIZE)) in info and '\n' not in info
    with pytest.raises(MemoryLimitError):
        apply_limit(full, StreamConfig(), *SIZE, limit_of(12), False)
    with pytest.raises(MemoryLimitError):
        apply_limit(full, StreamConfig(), *SIZE, limit_of(1), True)


def test_without_a_limit_a_cpu_has_none():
    assert memory_limit(0.0, torch.device('cpu')) is None
    assert memory_limit(8.0, torch.device('cpu')).size == 8e9


def test_a_small_limit_is_named():
    assert str(MemoryLimit(1e5, 'test')) == 'the limit is 0.0001 GB (test)'


def test_a_cpu_that_cannot_hold_the_caches_says_what_to_lower():
    engine = StreamEngine(load_model('tiny', 'random'), StreamConfig(max_keyframes=10**9))
    with pytest.raises(torch.OutOfMemoryError, match=r"cpu has no .* lower 'sliding_window'"):
        engine.warm_up(56, 56)


def test_an_engine_refuses_a_size_and_goes_on_with_the_old_one(caplog):
    model = load_model('tiny', 'random')
    config = StreamConfig(image_width=56, num_scale_frames=1)
    sizes = [predict(model, config, height, 56).total for height in (28, 56)]
    limit = MemoryLimit(sum(sizes) / 2, 'test')
    engine = StreamEngine(
        model, config, 'cpu', lambda *size: check_memory(model, config, *size, limit)
    )
    engine.warm_up(28, 56)
    image = np.zeros((28, 56, 3), np.uint8)
    results, sequence = engine.push(image), engine.sequence
    with pytest.raises(MemoryLimitError, match='56x56 pixels'):
        engine.push(np.zeros((56, 56, 3), np.uint8))
    results += engine.push(image)
    assert [result.index for result in results] == [0, 1]
    assert engine.sequence == sequence and caplog.text == ''


COMMAND = """
    --image-width 518 --image-height 392 --sliding-window 64 --num-scale-frames 8
    --max-keyframes 320 --model full --dtype bfloat16 --heads-dtype tf32 --on-limit roll_over
    --overlap-keyframes 8"""


def test_the_command_prints_every_part_with_its_unit(full, capsys):
    assert main(COMMAND.split()) == 0
    out = capsys.readouterr().out
    budget = predict(full, StreamConfig(), *SIZE)
    assert 'tokens per frame         1042  (518x392 pixels)' in out
    for name, size in (*budget.rows(), ('total', budget.total)):
        (line,) = (line for line in out.splitlines() if line.startswith(name))
        assert line.split()[-2:] == [f'{size / GB:.2f}', 'GB']


def test_the_command_says_what_does_not_fit(capsys):
    assert main([*COMMAND.split(), '--gpu-memory-limit', '8']) == 1
    told = capsys.readouterr()
    assert told.err.count('\n') == 1 and 'sliding_window' in told.err and 'total' in told.out


@pytest.mark.parametrize(
    ('arguments', 'told'),
    [
        (['--image-width', '515'], "'image_width' is 515"),
        (['--max-keyframes', '4'], "'max_keyframes' is 4"),
        (['--image-height', '2'], 'too wide'),
        (['--image-height', '-2'], '--image-height is -2'),
        (['--gpu-memory-limit', 'nan'], "'gpu_memory_limit' is nan"),
        (['--max-keyframes', '1.5'], "'1.5'"),
        (['--compile-mode', 'fast'], "'fast'"),
    ],
)
def test_the_command_refuses_wrong_values_in_one_line(arguments, told, capsys):
    try:
        code = main(['--model', 'tiny', *arguments])
    except SystemExit as left:
        code = left.code
    assert code == 2
    text = capsys.readouterr().err
    assert told in text and text.count('\n') == 1


@pytest.mark.parametrize('gigabytes', [8, 16, 24])
def test_a_preset_fits_with_headroom(gigabytes):
    text = (CONFIG / f'gpu_{gigabytes}gb.yaml').read_text()
    params = build(EngineSettings, yaml.safe_load(text)['/**']['ros__parameters'])
    for mode, share in (('cuda-graph', 0.8), ('off', 0.9)):
        model = blank_model(params.model, torch.bfloat16, params.heads_dtype, mode)
        budget = predict(model, stream_config(params), *usual_image_size(params))
        assert budget.total <= share * gigabytes * GB
        assert f'{budget.total / GB:.1f} ' in text.partition('/**')[0]


def peak_bytes():
    """Return the most that was allocated, and what graphs keep beside it."""
    kept = sum(
        segment['total_size'] - segment['allocated_size']
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment['segment_pool_id']) != (0, 0)
    )
    return torch.cuda.max_memory_allocated() + kept


@pytest.mark.cuda
@pytest.mark.parametrize('mode', ['off', 'cuda-graph'])
@pytest.mark.parametrize(('height', 'window'), [(378, 64), (294, 16)])
def test_the_peak_on_a_gpu_is_as_predicted(height, window, mode):
    gc.collect()
    torch.cuda.empty_cache()  # also what graphs of earlier tests kept
    before = torch.cuda.memory_allocated()
    model = load_model('full', 'random', 'cuda', torch.bfloat16)
    set_heads_dtype(model, 'tf32')
    compile_model(model, resolve_for(model, mode))
    config = StreamConfig(sliding_window=window)
    torch.cuda.reset_peak_memory_stats()
    engine = StreamEngine(model, config, 'cuda')
    engine.warm_up(height, 518)
    rng = np.random.default_rng(0)
    for _ in range(config.num_scale_frames + window + 2):
        engine.push(rng.integers(0, 256, (height, 518, 3), dtype=np.uint8))
    peak = peak_bytes() - before
    budget = predict(model, config, height, 518)
    print(f'{mode}, window {window}: measured {peak / GB:.2f} GB; {budget}')  # noqa: T201
    assert budget.total == pytest.approx(peak, rel=0.1)
