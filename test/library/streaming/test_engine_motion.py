"""The motion gate in the engine: what stands still neither fills the batch nor the memory."""

from lingbot_map.benchmark.recipe import fill_model
from lingbot_map.config import MODEL_PRESETS
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.settings import StreamConfig
from lingbot_map.streaming.engine import StreamEngine
from moving_view import noisy, panorama, view
import numpy as np
import pytest
import torch

PICTURE = panorama()
POLICIES = {
    'interval': {'keyframe_policy': 'interval', 'keyframe_interval': 2},
    'flow': {'keyframe_policy': 'flow', 'flow_threshold': 1e-6, 'max_non_keyframe_gap': 2},
    'flow by gap': {'keyframe_policy': 'flow', 'flow_threshold': 1e9, 'max_non_keyframe_gap': 3},
}


@pytest.fixture(scope='module')
def model():
    model = GCTStream.from_config(MODEL_PRESETS['tiny'])
    fill_model(model, 'motion')
    return model.requires_grad_(False)


def new_engine(model, **settings):
    defaults = {'num_scale_frames': 3, 'sliding_window': 2, 'image_width': 84, 'on_limit': 'stop',
                'motion_gate': True}  # fmt: skip
    return StreamEngine(model, StreamConfig(**defaults | settings))


def walk(steps, sigma=3.0):
    """Return noisy images of a camera that is at these places, 5 px from one to the next."""
    rng = np.random.default_rng(0)
    return [noisy(view(PICTURE, 5 * step), sigma, rng) for step in steps]


def run(engine, images):
    return [result for tag, rgb in enumerate(images) for result in engine.push(rgb, tag)]


def test_the_scale_batch_waits_for_motion(model):
    engine = new_engine(model)
    counts, standing, waiting = [], [], []
    for tag, rgb in enumerate(walk([0, 0, 0, 1, 1, 2])):
        results = engine.push(rgb, tag)
        counts.append(len(results))
        standing.append(engine.is_static)
        waiting.append(engine.waiting)
    assert counts == [0, 0, 0, 0, 0, 3]
    assert standing == [False, True, True, False, True, False]
    assert waiting == [1, 1, 1, 2, 2, 0]
    assert [result.tag for result in results] == [0, 3, 5]
    assert [result.index for result in results] == [0, 1, 2]
    assert engine.gated_frames == 0  # none of the others has run


def test_a_camera_that_stands_makes_up_for_a_keyframe_without_finite_pose(model, monkeypatch):
    images = walk([0, 1, 2, 3, 4, 4, 4])
    engine = new_engine(model)
    results = run(engine, images[:4])
    forward = engine._forward

    def broken(frames, scale_frames):
        outputs = dict(forward(frames, scale_frames))
        return outputs | {'pose_enc': torch.full_like(outputs['pose_enc'], torch.nan)}

    monkeypatch.setattr(engine, '_forward', broken)
    results += run(engine, images[4:5])
    monkeypatch.setattr(engine, '_forward', forward)
    results += run(engine, images[5:])
    assert [result.is_keyframe for result in results[3:]] == [True, False, True, False]
    assert np.isfinite(results[-1].T_world_cam).all()


@pytest.mark.parametrize('policy', POLICIES)
def test_a_camera_that_stands_gets_poses_and_leaves_no_trace(model, policy):
    steps = [0, 1, 2, 3, 3, 3, 4, 5, 5, 6, 7, 7, 7, 7, 8, 9]
    images = walk(steps)
    moved = [i for i, step in enumerate(steps) if step not in steps[:i]]
    engine = new_engine(model, **POLICIES[policy])
    results = run(engine, images)
    plain = new_engine(model, motion_gate=False, **POLICIES[policy])
    expected = run(plain, [images[i] for i in moved])
    assert [result.index for result in results] == list(range(len(images)))
    assert engine.gated_frames == len(images) - len(moved)
    assert engine.keyframes == plain.keyframes
    for i, result in enumerate(results):
        assert np.isfinite(result.T_world_cam).all()
        assert i in moved or not result.is_keyframe
    for i, reference in zip(moved, expected, strict=True):
        assert results[i].is_keyframe == reference.is_keyframe
        np.testing.assert_array_equal(results[i].T_world_cam, reference.T_world_cam)
        torch.testing.assert_close(results[i].depth, reference.depth, rtol=0, atol=0)


def test_a_camera_that_creeps_fills_the_batch_and_becomes_keyframes(model):
    engine = new_engine(model)
    results = run(engine, walk([0.02 * i for i in range(100)], sigma=0.0))  # 0.1 px each
    assert [result.tag for result in results[:3]] != [0, 1, 2]
    assert 10 < engine.keyframes < 50


def test_reset_and_flush_let_the_next_image_pass(model):
    engine = new_engine(model)
    images = walk([0] * 6)
    assert run(engine, images[:2]) == [] and engine.waiting == 1 and engine.is_static
    engine.reset()
    assert not engine.is_static
    assert run(engine, images[2:4]) == [] and engine.waiting == 1
    assert len(engine.flush()) == 1 and not engine.is_static
    results = run(engine, images[4:])
    assert [result.is_keyframe for result in results] == [True, False]
    engine.reset()
    assert engine.gated_frames == 0


def test_what_begins_a_new_sequence_at_the_limit_is_its_first_image(model):
    engine = new_engine(model, on_limit='reset', max_keyframes=4)
    results = run(engine, walk([0, 1, 2, 3, 3, 3]))  # full, and standing at the limit
    assert [result.is_keyframe for result in results] == [True] * 4 + [False] * 2
    sequence = engine.sequence
    assert run(engine, walk([4, 4])) == []
    assert engine.sequence == sequence + 1 and engine.waiting == 1 and engine.is_static


def test_the_window_rolls_over_while_the_camera_moves_only(model):
    engine = new_engine(model, on_limit='roll_over', max_keyframes=6, overlap_keyframes=3)
    run(engine, walk([0, 1, 2, 3, 4, *[4] * 20]))
    assert (engine.window, engine.held_keyframes) == (0, 5)
    run(engine, walk([5]))
    assert (engine.window, engine.held_keyframes) == (0, 6)
    assert engine.gated_frames == 20
    run(engine, walk([5, *[5] * 20])[1:])
    assert (engine.window, engine.held_keyframes) == (1, 3) and engine.gated_frames == 40


def test_images_of_another_size_begin_anew(model):
    engine = new_engine(model)
    run(engine, walk([0, 0]))
    assert engine.is_static
    assert engine.push(walk([0])[0][:42]) == [] and not engine.is_static and engine.waiting == 1


def test_it_is_off_by_default(model):
    engine = StreamEngine(model, StreamConfig(num_scale_frames=3, image_width=84))
    results = run(engine, walk([0] * 5, sigma=0.0))
    assert all(result.is_keyframe for result in results) and len(results) == 5
    assert not engine.is_static


@pytest.mark.parametrize('threshold', [0.0, -1.0, float('nan')])
def test_a_threshold_that_cannot_work(threshold):
    with pytest.raises(ValueError, match=f"'motion_threshold' is {threshold}"):
        StreamConfig(motion_threshold=threshold)
