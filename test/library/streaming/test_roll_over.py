"""Endless streams: the engine goes on in a new window of the same map when its memory is full."""

import logging

from fake_network import FakeModel, HEIGHT, image_of, truth_in_window, WIDTH
from lingbot_map.settings import StreamConfig
from lingbot_map.streaming.engine import NotFiniteError, StreamEngine, StreamLimitError
from lingbot_map.streaming.roll_over import MAX_RESIDUAL
import numpy as np
import pytest
import torch


def engine_for(model, **settings):
    config = {'num_scale_frames': 4, 'sliding_window': 3, 'image_width': WIDTH,
              'max_keyframes': 12, 'overlap_keyframes': 6, **settings}  # fmt: skip
    engine = StreamEngine(model, StreamConfig(**config))
    engine.warm_up(HEIGHT, WIDTH)
    return engine


def run(engine, frames):
    return [result for frame in frames for result in engine.push(image_of(frame), tag=frame)]


def assert_true(results, move, first=0):
    """Check poses and depths against the truth as the window of `move` sees it."""
    T, depth = truth_in_window(move, torch.arange(first, first + len(results)))
    poses = np.stack([result.T_world_cam for result in results])
    np.testing.assert_allclose(poses, T, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        torch.stack([result.depth for result in results]).double(), depth, rtol=1e-4, atol=0
    )


@pytest.mark.parametrize(
    'settings',
    [
        {},
        {'keyframe_interval': 3},
        {'overlap_keyframes': 4},  # the overlap is the scale batch
        {'overlap_keyframes': 2},  # and shorter
        {'overlap_keyframes': 1, 'num_scale_frames': 1, 'max_keyframes': 3},
        {'sliding_window': 1, 'num_scale_frames': 2},  # frames of the overlap are evicted already
        {'keyframe_policy': 'flow', 'flow_threshold': 2.0, 'max_non_keyframe_gap': 5},
    ],
    ids=str,
)
def test_five_roll_overs_keep_the_map_frame(settings, caplog):
    caplog.set_level(logging.INFO)
    model = FakeModel()
    engine = engine_for(model, **settings)
    caplog.clear()
    first = len(model.moves)
    results, steps, frame = [], [], 0
    while engine.window < 5:
        results += run(engine, [frame])
        frame += 1
        if engine.window > len(steps):
            steps.append(engine.last_scale_step)
            assert engine.last_residual < 1e-4
    results += run(engine, [frame])
    assert [result.tag for result in results] == list(range(frame + 1))
    assert [result.index for result in results] == list(range(frame + 1))
    assert_true(results, model.moves[first])
    scales = [scale for scale, _, _ in model.moves[first:]]
    expected = [scales[i + 1] / scales[i] for i in range(5)]
    assert steps == pytest.approx(expected, rel=1e-4)
    assert engine.keyframes == sum(result.is_keyframe for result in results)
    announced = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert len(announced) == 5 and announced[-1].startswith('window 5 continues from')


def test_the_keyframes_are_those_of_a_memory_without_limit():
    flow = {'keyframe_policy': 'flow', 'flow_threshold': 2.0, 'max_non_keyframe_gap': 5}
    limited, free = (engine_for(FakeModel(), max_keyframes=n, **flow) for n in (12, 1000))
    kept = [[r.is_keyframe for r in run(engine, range(150))] for engine in (limited, free)]
    assert kept[0] == kept[1] and 20 < sum(kept[0]) < 140
    assert limited.window >= 3 and free.window == 0


def test_the_hand_over_costs_one_scale_batch_and_the_rest_of_the_overlap():
    model = FakeModel()
    engine = engine_for(model)
    run(engine, range(4))
    calls = []
    for frame in range(4, 31):
        model.frames.clear()
        run(engine, [frame])
        assert model.frames[0] == [frame]
        calls.append(model.frames[1:])
    # Of 12 frames kept the last 6 open the next window: 6, 7, ... 11, then 12, 13, ... 17.
    assert calls[2:8] == [[], [], [], [[6, 7, 8, 9]], [[10]], [[11]]]
    assert calls[8:14] == [[], [], [], [[12, 13, 14, 15]], [[16]], [[17]]]
    assert sum(map(len, calls)) == 3 * 4 and engine.window == 4


def test_a_frame_after_the_hand_over_sees_the_overlap():
    model = FakeModel()
    engine = engine_for(model, num_scale_frames=3, overlap_keyframes=5)
    run(engine, range(13))
    assert engine.window == 1 and model.frames[-1] == [12]
    # Kept numbers of the new window: 3 anchors, then the newest 3 with the frame itself, number 5.
    assert engine._memory.visible_patches == [0, 1, 2, 3, 4, 5]
    assert engine._memory.visible_specials == [0, 1, 2, 3, 4, 5]
    run(engine, [13])
    assert engine._memory.visible_patches == [0, 1, 2, 4, 5, 6]


def test_an_overlap_shorter_than_a_scale_batch_is_the_next_scale_batch():
    model = FakeModel()
    engine = engine_for(model, num_scale_frames=4, overlap_keyframes=2)
    run(engine, range(12))
    assert model.frames[-1] == [10, 11]
    run(engine, [12])
    assert model.scale_frames == 2 and engine.window == 1


def test_nothing_is_allocated_for_a_roll_over():
    engine = engine_for(FakeModel())
    memories = [engine._memory, engine._next.memory]
    buffers = [m.keys.data_ptr() for m in memories] + [m.camera_keys.data_ptr() for m in memories]
    run(engine, range(61))
    assert engine.window == 9
    memories = [engine._memory, engine._next.memory]
    assert buffers == [m.keys.data_ptr() for m in memories] + [
        m.camera_keys.data_ptr() for m in memories
    ]


def test_a_full_memory_stops():
    engine = engine_for(FakeModel(), on_limit='stop')
    run(engine, range(12))
    for _ in range(2):
        with pytest.raises(StreamLimitError, match='max_keyframes is 12'):
            run(engine, [12])
    assert engine.window == 0 and engine.frames == engine.keyframes == 12


def test_a_full_memory_starts_a_new_sequence(caplog):
    model = FakeModel()
    engine = engine_for(model, on_limit='reset')
    first = len(model.moves)
    sequence = engine.sequence
    assert_true(run(engine, range(12)), model.moves[first])
    assert engine.sequence == sequence and not caplog.records
    assert run(engine, range(12, 15)) == []
    assert engine.sequence == sequence + 1 and engine.waiting == 3
    assert 'starting a new sequence' in caplog.text
    results = run(engine, range(15, 24))
    assert [result.index for result in results] == list(range(12))
    assert_true(results, model.moves[first + 1], first=12)


def without_depth(index, outputs, window):
    outputs['depth'][:, index >= 12] = torch.nan


def test_without_valid_depth_the_scale_stays_and_poses_go_on(caplog):
    model = FakeModel(without_depth)
    engine = engine_for(model)
    first = len(model.moves)
    results = run(engine, range(18))
    after = run(engine, [18])  # the second roll-over, the first that lacks depth
    assert engine.window == 2 and engine.last_scale_step == 1
    assert np.isnan(engine.last_residual)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert 'do not agree' in caplog.text
    # The hand-over hangs on the last keyframe, 17; relative to it only the scale is unknown.
    scales = [model.moves[first + i][0] for i in (1, 2)]
    T, _ = truth_in_window(model.moves[first], torch.arange(20))
    after += run(engine, [19])
    steps = [result.T_world_cam[:3, 3] - results[-1].T_world_cam[:3, 3] for result in after]
    expected = (T[18:, :3, 3] - T[17, :3, 3]) * scales[0] / scales[1]
    np.testing.assert_allclose(steps, expected, rtol=0, atol=1e-4)


def test_windows_that_disagree_are_announced(caplog):
    def bend(index, outputs, window):
        outputs['depth'][..., :12, :] *= 1 + 0.5 * (window % 2)  # to the left
        outputs['depth'][..., 30:, :] *= 1 - 0.5 * (window % 2)  # to the right

    model = FakeModel(bend)
    engine = engine_for(model)
    run(engine, range(13))
    assert engine.window == 1 and engine.last_residual > MAX_RESIDUAL
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert f'residual {100 * engine.last_residual:.1f} %' in caplog.text


@pytest.mark.parametrize('interval', [1, 2])
def test_a_frame_without_finite_pose_is_no_keyframe_and_spoils_nothing(interval, caplog):
    def spoil(index, outputs, window):
        outputs['pose_enc'][:, index == 11] = torch.nan

    model = FakeModel(spoil)
    engine = engine_for(model, keyframe_interval=interval)
    first = len(model.moves)
    results = run(engine, range(24))
    kept = [r.index for r in results[4:] if r.is_keyframe]
    assert kept == [i for i in range(4, 24, interval) if i != 11]
    assert np.isnan(results[11].T_world_cam).any()
    assert_true(results[12:], model.moves[first], first=12)
    assert engine.window >= 1 and not caplog.records


def test_a_keyframe_without_finite_pose_is_made_up_for_by_the_next_frame():
    def spoil(index, outputs, window):
        outputs['pose_enc'][:, (index == 6) | (index == 7)] = torch.nan

    engine = engine_for(FakeModel(spoil), keyframe_interval=2)
    results = run(engine, range(12))
    assert [r.index for r in results[4:] if r.is_keyframe] == [4, 8, 10]


def test_a_scale_batch_without_finite_poses_is_dropped_and_the_next_one_begins_afresh():
    def spoil(index, outputs, window):
        outputs['pose_enc'][:, index == 2] = torch.nan

    engine = engine_for(FakeModel(spoil))
    sequence = engine.sequence
    with pytest.raises(NotFiniteError, match='no finite poses for the 4 images'):
        run(engine, range(4))
    assert engine.sequence == sequence + 1 and engine.frames == 0
    assert [r.index for r in run(engine, range(4, 9))] == [0, 1, 2, 3, 4]


def test_a_next_window_without_finite_poses_does_not_take_over(caplog):
    broken = []

    def spoil(index, outputs, window):
        if window in broken:
            outputs['pose_enc'][:, -1] = torch.nan

    model = FakeModel(spoil)
    engine = engine_for(model)
    broken.append(len(model.moves) + 1)
    sequence = engine.sequence
    assert len(run(engine, range(12))) == 12
    assert engine.sequence == sequence and not caplog.records
    assert run(engine, [12]) == []
    assert [r.levelno for r in caplog.records] == [logging.ERROR, logging.WARNING]
    assert 'cannot roll over' in caplog.messages[0]
    assert 'starting a new sequence' in caplog.messages[1]
    assert engine.sequence == sequence + 1 and engine.waiting == 1


def test_a_failure_in_the_next_window_ends_in_a_new_sequence(monkeypatch):
    engine = engine_for(FakeModel())
    run_next, calls = engine._next.runner, []

    def fail_once(images, scale_frames):
        calls.append(len(images))
        if len(calls) == 1:
            raise RuntimeError('out of memory')
        return run_next(images, scale_frames)

    engine._next.runner = fail_once
    sequence, failed = engine.sequence, 0
    for frame in range(40):
        try:
            run(engine, [frame])
        except RuntimeError:
            failed += 1
    assert failed == 1 and engine.sequence == sequence + 1 and engine.window == 3


class Replaying:
    """Runs a runner, and reuses the tensors of its outputs as a captured graph does."""

    def __init__(self, runner):
        self._runner, self._shared = runner, {}

    def __call__(self, images, scale_frames):
        outputs = self._runner(images, scale_frames)
        return {
            key: self._shared.setdefault((key, x.shape), torch.empty_like(x)).copy_(x)
            for key, x in outputs.items()
        }


@pytest.mark.parametrize(
    'policy', [{}, {'keyframe_policy': 'flow', 'flow_threshold': 2.0, 'max_non_keyframe_gap': 5}]
)
def test_outputs_may_be_overwritten_by_the_next_run(policy):
    plain, replaying = (engine_for(FakeModel(), **policy) for _ in range(2))
    replaying._runner = Replaying(replaying._runner)
    replaying._next.runner = Replaying(replaying._next.runner)
    results, expected = (run(engine, range(60)) for engine in (replaying, plain))
    assert replaying.window == plain.window >= 1
    for result, other in zip(results, expected, strict=True):
        assert result.is_keyframe == other.is_keyframe
        np.testing.assert_array_equal(result.T_world_cam, other.T_world_cam)
        torch.testing.assert_close(result.depth, other.depth, rtol=0, atol=0)
        torch.testing.assert_close(result.confidence, other.confidence, rtol=0, atol=0)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'on_limit': 'halt'}, "'on_limit' is 'halt'; use roll_over, reset, stop"),
        ({'overlap_keyframes': 0}, "'overlap_keyframes' is 0"),
        ({'max_keyframes': 15}, "'max_keyframes' is 15; .*at least 16: raise it, or set 'on_lim"),
        ({'max_keyframes': 40, 'overlap_keyframes': 21}, 'at least 42'),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ValueError, match=message):
        StreamConfig(**settings)


def test_the_overlap_does_not_matter_without_roll_over():
    assert StreamConfig(max_keyframes=8, on_limit='reset').overlap_keyframes == 8
