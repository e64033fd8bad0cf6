"""StreamEngine: what comes out when, from which pixels, and for which pixels."""

from lingbot_map.benchmark.recipe import fill_model
from lingbot_map.config import MODEL_PRESETS
from lingbot_map.geometry import decode_pose
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.settings import StreamConfig
from lingbot_map.streaming.engine import StreamEngine, StreamLimitError
from lingbot_map.streaming.preprocess import crop_map, resize_on_device, resize_pillow
import numpy as np
from PIL import Image
import pytest
import torch


@pytest.fixture(scope='module')
def model():
    model = GCTStream.from_config(MODEL_PRESETS['tiny'])
    fill_model(model, 'engine')
    return model.requires_grad_(False)


def new_engine(model, **settings):
    defaults = {'num_scale_frames': 3, 'sliding_window': 2, 'image_width': 84, 'on_limit': 'stop'}
    return StreamEngine(model, StreamConfig(**defaults | settings))


def pictures(count, height=56, width=84, seed=0):
    """Return smooth random pictures, alike from one to the next as a camera's are."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (count, 6, 9, 3), dtype=np.uint8)
    return [np.asarray(Image.fromarray(each).resize((width, height), Image.Resampling.BICUBIC))
            for each in coarse]  # fmt: skip


def poses(results):
    return np.stack([result.T_world_cam for result in results])


def test_scale_batch_is_collected_then_one_result_per_image(model):
    engine = new_engine(model, keyframe_interval=2)
    counts, results = [], []
    for number, rgb in enumerate(pictures(8)):
        ready = engine.push(rgb, tag=number)
        counts.append(len(ready))
        results += ready
    assert counts == [0, 0, 3, 1, 1, 1, 1, 1]
    assert [result.tag for result in results] == list(range(8))
    assert [result.index for result in results] == list(range(8))
    assert [result.is_keyframe for result in results] == [True] * 4 + [False, True, False, True]
    assert (engine.frames, engine.keyframes, engine.waiting) == (8, 6, 0)


def test_results_are_those_of_the_model(model):
    images = pictures(9)
    engine = new_engine(model, keyframe_interval=2)
    results = [result for rgb in images for result in engine.push(rgb)]
    model.kv_cache_scale_frames, model.kv_cache_sliding_window = 3, 2
    tensor = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
    expected = model.inference_streaming(tensor, 3, 2)
    T, K = decode_pose(expected['pose_enc'][0].double(), 56, 84)
    for i, result in enumerate(results):
        np.testing.assert_allclose(result.T_world_cam, T[i].numpy(), atol=1e-5)
        np.testing.assert_allclose(result.network_intrinsics, K[i].numpy(), rtol=1e-4)
        torch.testing.assert_close(result.depth, expected['depth'][0, i, ..., 0])
        np.testing.assert_array_equal(result.rgb.numpy(), images[i])


def test_flush_runs_a_short_scale_batch_and_the_stream_goes_on(model):
    engine = new_engine(model)
    images = pictures(4)
    assert engine.push(images[0]) == engine.push(images[1]) == []
    assert engine.waiting == 2
    assert [result.index for result in engine.flush()] == [0, 1]
    assert engine.flush() == []
    assert [result.index for result in engine.push(images[2])] == [2]


def test_reset_gives_the_numbers_of_a_fresh_engine(model):
    images = pictures(7)
    engine = new_engine(model)
    for rgb in pictures(6, seed=1):
        engine.push(rgb)
    engine.reset()
    again = [result for rgb in images for result in engine.push(rgb)]
    fresh_engine = new_engine(model)
    fresh = [result for rgb in images for result in fresh_engine.push(rgb)]
    np.testing.assert_array_equal(poses(again), poses(fresh))


def test_warm_up_leaves_no_trace(model):
    images = pictures(5)
    warm, cold = new_engine(model), new_engine(model)
    warm.warm_up(56, 84)
    assert (warm.frames, warm.keyframes) == (0, 0)
    results = [[result for rgb in images for result in engine.push(rgb)]
               for engine in (warm, cold)]  # fmt: skip
    np.testing.assert_array_equal(poses(results[0]), poses(results[1]))


def test_results_do_not_change_later(model):
    engine = new_engine(model)
    buffer = np.empty((3, 56, 84), np.uint8)  # as a driver uses it again and again
    results, copies = [], []
    for rgb in pictures(6):
        buffer[:] = rgb.transpose(2, 0, 1)
        new = engine.push(buffer.transpose(1, 2, 0))
        results += new
        copies += [(r.depth.clone(), r.confidence.clone(), r.rgb.clone()) for r in new]
    for result, copy in zip(results, copies, strict=True):
        assert all(map(torch.equal, (result.depth, result.confidence, result.rgb), copy))
    for result, rgb in zip(results, pictures(6), strict=True):
        np.testing.assert_array_equal(result.rgb.numpy(), rgb)


def test_an_engine_survives_that_there_is_no_memory_for_another_size(model, monkeypatch):
    engine = new_engine(model, num_scale_frames=1, on_limit='roll_over')
    small, large = pictures(1)[0], pictures(1, height=84)[0]
    engine.push(small)
    allocate = model.new_memory
    for failing in (1, 2):  # the memory itself, that of the next window
        calls = []

        def new_memory(*size, failing=failing, calls=calls):
            calls.append(size)
            if len(calls) == failing:
                raise torch.OutOfMemoryError('no room')
            return allocate(*size)

        monkeypatch.setattr(model, 'new_memory', new_memory)
        with pytest.raises(torch.OutOfMemoryError):
            engine.push(large)
        assert [result.index for result in engine.push(small)] == [0]
        assert [result.index for result in engine.push(small)] == [1]


def test_a_failed_warm_up_leaves_no_trace(model, monkeypatch):
    engine = new_engine(model, num_scale_frames=1)
    run_frame = engine._run_frame

    def fail(*_):
        raise KeyError('half way')

    monkeypatch.setattr(engine, '_run_frame', fail)
    with pytest.raises(KeyError):
        engine.warm_up(56, 84)
    monkeypatch.setattr(engine, '_run_frame', run_frame)
    assert [result.index for rgb in pictures(2) for result in engine.push(rgb)] == [0, 1]


@pytest.mark.parametrize(
    ('device', 'expected'), [('cuda:1', ['cuda:1']), ('cuda', []), ('cpu', [])]
)
def test_the_thread_turns_to_the_device_of_its_engine(model, device, expected, monkeypatch):
    turned_to = []
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: turned_to.append(str(device)))
    StreamEngine(model, StreamConfig(image_width=84), device)
    assert turned_to == expected


# Before and after the ring of the memory is full.
@pytest.mark.parametrize(('interval', 'bad'), [(1, 4), (1, 12), (4, 7), (4, 15)])
def test_a_keyframe_that_is_not_finite_leaves_no_trace(model, interval, bad):
    spoilt, sound = (new_engine(model, keyframe_interval=interval) for _ in range(2))
    token = model.aggregator.camera_token.data
    results, expected = [], []
    for i, rgb in enumerate(pictures(20)):
        if i == bad:
            whole = token.clone()
            token.fill_(torch.nan)
            [result] = spoilt.push(rgb)
            token.copy_(whole)
            assert np.isnan(result.T_world_cam).any() and not result.is_keyframe
        else:
            results += spoilt.push(rgb)
            expected += sound.push(rgb)
    assert [r.is_keyframe for r in results] == [r.is_keyframe for r in expected]
    np.testing.assert_array_equal(poses(results), poses(expected))


def test_two_engines_of_one_model_keep_their_settings(model):
    images = pictures(8)
    engine = new_engine(model)
    expected = [result for rgb in images for result in engine.push(rgb)]
    first = new_engine(model)
    second = new_engine(model, num_scale_frames=2, sliding_window=6)
    for rgb in images:
        second.push(rgb)
    results = [result for rgb in images for result in first.push(rgb)]
    np.testing.assert_array_equal(poses(results), poses(expected))


def test_a_model_streams_with_and_without_inference_mode_and_keeps_no_history(model):
    images = torch.rand(4, 3, 56, 84)
    with torch.inference_mode():
        expected = model.inference_streaming(images, 2)['pose_enc']
    torch.testing.assert_close(model.inference_streaming(images, 2)['pose_enc'], expected)
    model.requires_grad_(True)
    try:
        model.clean_kv_cache()
        model(images[:2], num_frame_for_scale=2)
    finally:
        model.requires_grad_(False)
    memory = model.memory
    kept = (memory.keys, memory.values, memory.camera_keys, memory.camera_values)
    assert all(buffer.grad_fn is None and not buffer.requires_grad for buffer in kept)


def test_another_image_size_starts_a_new_sequence(model, caplog):
    engine = new_engine(model, num_scale_frames=1)
    engine.push(pictures(1)[0])
    results = engine.push(pictures(1, height=84)[0])
    assert [(result.index, tuple(result.depth.shape)) for result in results] == [(0, (84, 84))]
    assert 'image size changed' in caplog.text


def test_intrinsics_are_those_of_the_original_image(model):
    engine = new_engine(model, num_scale_frames=1)
    [result] = engine.push(pictures(1, height=240, width=320)[0])
    # 320x240 becomes 84x63, rounded to 84x56: a scale of its own for each axis, no crop.
    assert result.mapping.network_size == (84, 56)
    K, original = result.network_intrinsics, result.intrinsics
    np.testing.assert_allclose(original[0], K[0] * 320 / 84)
    np.testing.assert_allclose(original[1], K[1] * 240 / 56)
    np.testing.assert_allclose((original[0, 2], original[1, 2]), (160, 120))


def test_cropped_rows_shift_the_principal_point(model):
    engine = new_engine(model, num_scale_frames=1)
    [result] = engine.push(pictures(1, height=400, width=200)[0])
    # 200x400 becomes 84x168, of which rows 42 .. 125 remain.
    assert (result.mapping.network_size, result.mapping.crop_y) == ((84, 84), 42)
    np.testing.assert_allclose(result.intrinsics[1, 2], (42 + 42) * 400 / 168)


def test_a_full_memory_is_one_clear_error(model):
    engine = new_engine(model, max_keyframes=5)
    images = pictures(6)
    for rgb in images[:5]:
        engine.push(rgb)
    with pytest.raises(StreamLimitError, match='max_keyframes is 5'):
        engine.push(images[5])
    engine.reset()
    assert engine.push(images[0]) == []


@pytest.mark.parametrize('wrong', [
    np.zeros((56, 84), np.uint8), np.zeros((56, 84, 4), np.uint8),
    np.zeros((56, 84, 3), np.float32), np.zeros((0, 84, 3), np.uint8)])  # fmt: skip
def test_what_is_no_image_is_named(model, wrong):
    with pytest.raises(ValueError, match=r'expected an image \(H, W, 3\) uint8'):
        new_engine(model).push(wrong)


def test_a_panorama_without_a_patch_row_is_named(model):
    with pytest.raises(ValueError, match='too wide'):
        new_engine(model).push(np.zeros((10, 2000, 3), np.uint8))


@pytest.mark.parametrize(('settings', 'part'), [
    ({'image_width': 100}, 'multiple of the patch size'), ({'num_scale_frames': 0}, 'at least 1'),
    ({'max_keyframes': 2}, 'less than num_scale_frames')])  # fmt: skip
def test_wrong_settings_say_what_to_do(model, settings, part):
    with pytest.raises(ValueError, match=part):
        new_engine(model, **settings)


@pytest.mark.parametrize('size', [(294, 518), (480, 640), (720, 1280), (90, 120), (700, 400)])
def test_device_resize_is_pillow_within_two_levels(size):
    [rgb] = pictures(1, *size, seed=5)
    noise = np.random.default_rng(6).integers(-20, 20, rgb.shape)
    rgb = np.clip(rgb + noise, 0, 255).astype(np.uint8)
    mapping = crop_map(size[1], size[0], 168, 14)
    exact = resize_pillow(rgb, mapping).astype(int)
    device = resize_on_device(torch.from_numpy(rgb), mapping).permute(1, 2, 0).numpy().astype(int)
    difference = np.abs(exact - device)
    assert difference.max() <= 2
    assert (difference > 0).mean() <= 0.01
