"""The roll-over of an endless stream with a real network, against windowed inference."""

from lingbot_map.benchmark.recipe import fill_model
from lingbot_map.config import DEMO_STREAM
from lingbot_map.evaluation.metrics import ate, path_length
from lingbot_map.geometry import decode_pose
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.settings import StreamConfig
from lingbot_map.streaming.checkpoint import load_model
from lingbot_map.streaming.engine import StreamEngine
from lingbot_map.streaming.roll_over import MAX_RESIDUAL
from lingbot_map.synthetic.rendering import render_clips
from lingbot_map.synthetic.rooms import RoomConfig
import numpy as np
import pytest
import torch

HEIGHT, WIDTH = 28, 42
MODEL = {
    'embed_dim': 128, 'num_heads': 2, 'depth': 4, 'selected_layers': (0, 1, 2, 3),
    'vit_depth': 1, 'vit_num_heads': 2, 'img_size': 56, 'camera_trunk_depth': 1,
    'camera_num_heads': 2, 'camera_num_iterations': 2, 'enable_3d_rope': True,
    'dpt_features': 16, 'dpt_out_channels': (16, 16, 16, 16),
}  # fmt: skip


def engine_for(model, **settings):
    config = {'num_scale_frames': 4, 'sliding_window': 3, 'image_width': WIDTH,
              'max_keyframes': 12, 'overlap_keyframes': 6, **settings}  # fmt: skip
    engine = StreamEngine(model, StreamConfig(**config))
    engine.warm_up(HEIGHT, WIDTH)
    return engine


@pytest.fixture(scope='module')
def network():
    model = GCTStream.from_config(MODEL)
    fill_model(model, 'roll over')
    return model


@pytest.fixture(scope='module')
def images():
    return np.random.default_rng(5).integers(0, 256, (60, HEIGHT, WIDTH, 3), dtype=np.uint8)


def push_all(engine, images):
    return [result for image in images for result in engine.push(image)]


@pytest.fixture(scope='module')
def fresh(network, images):
    """Return an engine after its first 31 images, and the results of these."""
    engine = engine_for(network)
    return engine, push_all(engine, images[:31])


@pytest.mark.parametrize(('scale_frames', 'overlap'), [(3, 5), (3, 3), (2, 6)])
def test_windows_are_those_of_windowed_inference(network, images, scale_frames, overlap):
    """Keep every frame: windows that begin with the overlap, aligned in the same way."""
    engine = engine_for(network, num_scale_frames=scale_frames, overlap_keyframes=overlap)
    frames, step = 3 * 12, 12 - overlap
    steps, results = [1.0], []
    for image in images[:frames]:
        results += engine.push(image)
        if engine.window == len(steps):
            steps.append(engine.last_scale_step)
    outputs = network.inference_windowed(
        torch.from_numpy(images[:frames]).permute(0, 3, 1, 2).float() / 255, 12, overlap, None,
        scale_frames)  # fmt: skip
    scales = outputs['chunk_scales'][0].numpy()
    np.testing.assert_allclose(np.cumprod(steps)[: len(scales)], scales, rtol=0, atol=5e-5)
    T, _ = decode_pose(outputs['pose_enc'][0].double(), HEIGHT, WIDTH)
    # In an overlap the engine has shown the earlier window, the sequence holds the later one.
    overlapping = {s + o for s in range(step, frames - overlap, step) for o in range(overlap)}
    alike = [f for f in range(frames) if f not in overlapping]
    assert len(alike) >= step
    np.testing.assert_allclose(
        [results[f].T_world_cam for f in alike], T[alike].numpy(), rtol=0, atol=5e-5
    )
    depth = torch.stack([results[f].depth for f in alike])
    torch.testing.assert_close(depth, outputs['depth'][0, alike, ..., 0], rtol=1e-4, atol=1e-5)


def test_forty_keyframes_in_a_memory_for_sixteen(network, images):
    engine = StreamEngine(network, StreamConfig(image_width=WIDTH, max_keyframes=16))
    results = push_all(engine, images[:40])
    assert len(results) == engine.keyframes == 40
    assert (engine.window, engine.held_keyframes) == (3, 16)
    results += engine.push(images[40])
    assert engine.window == 4 and engine.keyframes == 41
    assert engine.held_keyframes == 8 + 1  # of the newest overlap, and the one after
    assert all(np.isfinite(result.T_world_cam).all() for result in results)


@pytest.mark.cuda
def test_a_gpu_rolls_over_like_the_cpu(network, images):
    expected = push_all(engine_for(network), images[:31])
    model = GCTStream.from_config(MODEL)
    model.load_state_dict(network.state_dict())
    config = {'num_scale_frames': 4, 'sliding_window': 3, 'image_width': WIDTH}
    config = StreamConfig(max_keyframes=12, overlap_keyframes=6, **config)
    engine = StreamEngine(model.cuda(), config, 'cuda')
    engine.warm_up(HEIGHT, WIDTH)
    results = push_all(engine, images[:31])
    assert engine.window == 4
    for a, b in zip(results, expected, strict=True):
        np.testing.assert_allclose(a.T_world_cam, b.T_world_cam, rtol=0, atol=1e-3)
        torch.testing.assert_close(a.depth.cpu(), b.depth, rtol=1e-3, atol=1e-3)


def test_a_warm_up_changes_no_number(network, images, fresh):
    config = {'num_scale_frames': 4, 'sliding_window': 3, 'image_width': WIDTH}
    config = StreamConfig(max_keyframes=12, overlap_keyframes=6, **config)
    cold, (warm, expected) = StreamEngine(network, config), fresh
    for a, b in zip(push_all(cold, images[:31]), expected, strict=True):
        assert np.array_equal(a.T_world_cam, b.T_world_cam) and torch.equal(a.depth, b.depth)
    assert cold.window == warm.window == 4 and cold.last_residual == warm.last_residual


@pytest.mark.parametrize(
    ('how', 'frames'),
    [('reset', 3), ('reset', 10), ('reset', 12), ('reset', 40), ('size', 3), ('size', 11)],
)
def test_a_new_sequence_has_the_numbers_of_a_new_engine(network, images, fresh, frames, how):
    """Interrupt before, in and after the building of a next window."""
    used, (engine, expected) = engine_for(network), fresh
    push_all(used, images[-frames:])
    if how == 'reset':
        used.reset()
    else:
        used.push(np.zeros((42, WIDTH, 3), np.uint8))
    assert used.window == 0 and (used.last_scale_step, used.last_residual) == (1, 0)
    for a, b in zip(push_all(used, images[:31]), expected, strict=True):
        assert np.array_equal(a.T_world_cam, b.T_world_cam) and torch.equal(a.depth, b.depth)
        assert torch.equal(a.confidence, b.confidence) and a.is_keyframe == b.is_keyframe
        assert np.array_equal(a.intrinsics, b.intrinsics) and a.index == b.index
    assert used.window == engine.window == 4 and used.keyframes == engine.keyframes == 31
    assert (used.last_scale_step, used.last_residual) == (
        engine.last_scale_step,
        engine.last_residual,
    )


def test_trained_windows_agree_and_the_camera_does_not_jump():
    """Five windows of a rendered room, whose scales differ by up to a half."""
    clip = render_clips([900001], RoomConfig(num_frames=41), torch.device('cpu'))
    frames = np.ascontiguousarray(clip.rgb[0].permute(0, 2, 3, 1).numpy())
    model = load_model('demo', '', torch.device('cpu'), torch.float32)
    settings = {**DEMO_STREAM, 'keyframe_interval': 1, 'max_keyframes': 16}
    engine = StreamEngine(model, StreamConfig(**settings))
    results, seams, scale_steps = [], [], []
    for frame in frames:
        window, first = engine.window, len(results)
        results += engine.push(frame)
        if engine.window != window:
            seams.append(first)
            scale_steps.append(engine.last_scale_step)
            assert engine.last_residual < MAX_RESIDUAL
    assert seams == [16, 24, 32, 40]
    xyz = np.stack([result.T_world_cam[:3, 3] for result in results])
    xyz_true = clip.T_world_cam[0, :, :3, 3].double().numpy()
    assert max(scale_steps) / min(scale_steps) > 1.1  # it is not the network that keeps the scale
    assert ate(xyz, xyz_true).error.rmse < 0.02 * path_length(xyz_true)
    steps, steps_true = (np.linalg.norm(np.diff(x, axis=0), axis=1) for x in (xyz, xyz_true))
    ratio = steps / steps_true / np.median(steps / steps_true)
    assert all(0.5 < ratio[seam - 1] < 2 for seam in seams)
