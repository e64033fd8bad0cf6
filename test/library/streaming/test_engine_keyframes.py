"""Keyframe policies of the engine, against the model's own driver."""

from lingbot_map.benchmark.recipe import fill_model
from lingbot_map.geometry import decode_pose
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.models.keyframes import interval_for
from lingbot_map.settings import StreamConfig
from lingbot_map.streaming.engine import StreamEngine, StreamLimitError
import numpy as np
import pytest
import torch

HEIGHT, WIDTH, FRAMES = 28, 42, 16
MODEL = {
    'embed_dim': 128, 'num_heads': 2, 'depth': 4, 'selected_layers': (0, 1, 2, 3),
    'vit_depth': 1, 'vit_num_heads': 2, 'img_size': 56, 'camera_trunk_depth': 1,
    'camera_num_heads': 2, 'camera_num_iterations': 2, 'enable_3d_rope': True,
    'dpt_features': 16, 'dpt_out_channels': (16, 16, 16, 16),
}  # fmt: skip


@pytest.fixture(scope='module')
def model():
    model = GCTStream.from_config(MODEL)
    fill_model(model, 'keyframes')
    return model


@pytest.fixture(scope='module')
def images():
    return np.random.default_rng(3).integers(0, 256, (FRAMES, HEIGHT, WIDTH, 3), dtype=np.uint8)


def engine_for(model, **settings):
    """Return an engine with a small window, so that frames are evicted."""
    config = {'num_scale_frames': 3, 'sliding_window': 3, 'image_width': WIDTH, 'on_limit': 'stop',
              **settings}  # fmt: skip
    return StreamEngine(model, StreamConfig(**config))


def run(engine, images):
    return [result for image in images for result in engine.push(image)]


def as_tensor(images):
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255


def assert_same(results, outputs):
    T_world_cam, _ = decode_pose(outputs['pose_enc'][0].double(), HEIGHT, WIDTH)
    poses = np.stack([result.T_world_cam for result in results])
    np.testing.assert_allclose(poses, T_world_cam.numpy(), rtol=0, atol=1e-6)
    depth = torch.stack([result.depth for result in results])
    torch.testing.assert_close(depth, outputs['depth'][0, ..., 0], rtol=1e-5, atol=1e-5)


def test_keyframes_by_flow_are_those_of_the_model(model, images):
    engine_for(model).warm_up(HEIGHT, WIDTH)  # sets the model's window and anchors
    free = model.inference_streaming(as_tensor(images), 3, flow_threshold=1e-9)
    middle = free['flow'].sort().values[0, 6:8]
    threshold = middle.mean().item()  # between two flows, so that rounding decides nothing
    expected = model.inference_streaming(
        as_tensor(images), 3, flow_threshold=threshold, max_non_keyframe_gap=4
    )
    engine = engine_for(
        model, keyframe_policy='flow', flow_threshold=threshold, max_non_keyframe_gap=4
    )
    engine.warm_up(HEIGHT, WIDTH)
    for _ in range(2):
        results = run(engine, images)
        assert_same(results, expected)
        kept = [result.is_keyframe for result in results]
        assert kept[:4] == [True] * 4 and 4 < sum(kept) < FRAMES == len(kept)
        assert engine.keyframes == sum(kept)
        engine.reset()


@pytest.mark.parametrize('interval', [1, 3])
def test_keyframes_at_an_interval_are_those_of_the_model(model, images, interval):
    engine = engine_for(model, keyframe_interval=interval)
    engine.warm_up(HEIGHT, WIDTH)
    results = run(engine, images)
    assert_same(results, model.inference_streaming(as_tensor(images), 3, interval))
    assert [r.is_keyframe for r in results[3:]] == [i % interval == 0 for i in range(13)]
    assert engine.keyframe_interval == interval


def test_the_interval_can_change_on_the_way(model, images):
    engine = engine_for(model, keyframe_interval=4)
    first = run(engine, images[:8])
    engine.keyframe_interval = 1
    assert [r.is_keyframe for r in first] == [True] * 4 + [False] * 3 + [True]
    assert all(r.is_keyframe for r in run(engine, images[8:]))


def test_a_run_of_a_known_length_fits_with_its_interval(model, images):
    interval = interval_for(FRAMES, 3, 8)
    engine = engine_for(model, keyframe_interval=interval, max_keyframes=8)
    engine.warm_up(HEIGHT, WIDTH)
    run(engine, images)
    assert (interval, engine.keyframes) == (3, 8)


@pytest.mark.parametrize(('frames', 'interval'), [(0, 1), (320, 1), (321, 2), (1000, 4)])
def test_automatic_interval(frames, interval):
    assert interval_for(frames, 8, 320) == interval


@pytest.mark.parametrize('scale_frames', [1, 8])
def test_the_automatic_interval_is_the_smallest_that_fits(scale_frames):
    def kept(frames, interval):
        return scale_frames + -(-(frames - scale_frames) // interval)

    for frames in range(scale_frames, 300):
        interval = interval_for(frames, scale_frames, 20)
        assert kept(frames, interval) <= 20
        assert interval == 1 or kept(frames, interval - 1) > 20


def test_by_flow_a_full_memory_refuses_keyframes_only(model, images):
    engine = engine_for(model, keyframe_policy='flow', flow_threshold=1e9, max_keyframes=4,
                        max_non_keyframe_gap=3)  # fmt: skip
    results = run(engine, images[:6])  # 4 kept, then 2 that are not
    with pytest.raises(StreamLimitError):
        engine.push(images[6])
    with pytest.raises(StreamLimitError):  # the gap still wants a keyframe
        engine.push(images[7])
    assert len(results) == engine.frames == 6 and engine.keyframes == 4


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'keyframe_policy': 'every'}, "'keyframe_policy' is 'every'.*interval, flow"),
        ({'keyframe_policy': 'flow', 'flow_threshold': 0.0}, "'flow_threshold' is 0.0"),
        ({'keyframe_policy': 'flow', 'flow_threshold': float('nan')}, "'flow_threshold' is nan"),
        ({'max_non_keyframe_gap': 0}, "'max_non_keyframe_gap' is 0"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ValueError, match=message):
        StreamConfig(**settings)
