"""
Endless streams: the engine goes on in a new window of the same map when its memory is full.

The fake network knows the truth and shows it in a world frame that every scale batch draws anew.
Which one that was is kept in the camera head's memory alone, so it has to survive the hand-over.
"""

import logging

from lingbot_map.config import StreamConfig
from lingbot_map.engine import StreamEngine, StreamLimitError
from lingbot_map.geometry import decode_pose, matrix_to_quaternion, quaternion_to_matrix
from lingbot_map.memory import MemoryShape, StreamMemory
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.recipe import fill_model
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


def true_poses(index):
    """Return camera-to-world rotations (S, 3, 3) and centres (S, 3) of a winding path."""
    a = index.double()
    q = torch.stack((0.3 * (a / 7).sin(), 0.4 * (a / 11).cos(), 0.1 * (a / 5).sin()), -1)
    c = torch.stack((2 * (a / 9).sin(), 0.3 * (a / 4).cos(), a / 10), -1)
    return quaternion_to_matrix(torch.cat((q, torch.ones_like(q[:, :1])), -1)), c


def true_depth(index):
    """Return the depth (S, H, W) of a wall at z = 30, far from the whole path."""
    R, c = true_poses(index)
    v, u = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing='ij')
    focal = WIDTH / 2
    rays = torch.stack(
        ((u - WIDTH / 2) / focal, (v - HEIGHT / 2) / focal, torch.ones(u.shape)), -1
    )
    forward = torch.einsum('si,hwi->shw', R[:, 2], rays.double())
    return (30 - c[:, 2])[:, None, None] / forward


def image_of(index):
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    image[..., 0], image[..., 1] = index % 256, index // 256
    return image


class FakeModel:
    """
    What the engine needs of a GCTStream.

    `spoil(index, outputs, window)` may damage what it says of frames in a window.
    """

    patch_size = 14
    camera_head = depth_head = 'there'

    def __init__(self, spoil=lambda index, outputs, window: None):
        self.frames = []  # that were passed to each call
        self.moves = []  # scale, R and t from each window's world frame to the truth's
        self._spoil = spoil

    def new_memory(self, height, width, max_keyframes):
        shape = MemoryShape(
            layers=1, heads=1, head_dim=2, patches=6, specials=1,
            anchors=self.kv_cache_scale_frames, window=self.kv_cache_sliding_window,
            max_keyframes=max_keyframes, camera_iterations=1, camera_depth=1, camera_heads=1,
            camera_head_dim=2)  # fmt: skip
        return StreamMemory(shape, torch.device('cpu'), torch.float32)

    def stream(self, images, memory, scale_frames):
        pixels = (images[0, :, :2, 0, 0] * 255).round().long()
        index = pixels[:, 0] + 256 * pixels[:, 1]
        self.frames.append(index.tolist())
        window = self._window(memory, len(index))
        scale, R, t = self.moves[window]
        R_true, c = true_poses(index)
        pose = torch.cat(((c - t) @ R / scale, matrix_to_quaternion(R.T @ R_true)), -1)
        fov = 2 * torch.tensor([[HEIGHT / WIDTH, 1.0]]).atan().repeat(len(index), 1)
        depth = (true_depth(index) / scale)[None, ..., None].float()
        outputs = {
            'pose_enc': torch.cat((pose, fov), -1)[None].float(),
            'depth': depth,
            'depth_conf': torch.ones_like(depth[..., 0]),
        }
        self._spoil(index, outputs, window)
        return outputs

    def _window(self, memory, frames):
        """Return the number of the window, as the attention to its first frame gives it."""
        opens = memory.kept == 0
        if opens:
            torch.manual_seed(len(self.moves))
            R = quaternion_to_matrix(torch.randn(4, dtype=torch.float64))
            t = torch.randn(3, dtype=torch.float64)
            self.moves.append((0.5 + 1.5 * torch.rand(()).item(), R, t))
        number = float(len(self.moves) - 1) if opens else -1.0
        key = torch.tensor([100.0 if opens else -100.0, 0]).expand(1, 1, frames, 2)
        value = torch.full((1, 1, frames, 2), number)
        return int(memory.attend_camera(0, 0, torch.ones_like(key), key, value)[0, 0, 0, 0])


def engine_for(model, **settings):
    config = {'num_scale_frames': 4, 'sliding_window': 3, 'image_width': WIDTH,
              'max_keyframes': 12, 'overlap_keyframes': 6, **settings}  # fmt: skip
    engine = StreamEngine(model, StreamConfig(**config))
    engine.warm_up(HEIGHT, WIDTH)
    return engine


def run(engine, frames):
    return [result for frame in frames for result in engine.push(image_of(frame), tag=frame)]


def truth_in_window(move, index):
    scale, R, t = move
    R_true, c = true_poses(index)
    T = torch.eye(4, dtype=torch.float64).repeat(len(index), 1, 1)
    T[:, :3, :3], T[:, :3, 3] = R.T @ R_true, (c - t) @ R / scale
    return T.numpy(), true_depth(index) / scale


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
    assert len(announced) == 5 and announced[-1].startswith('window 5 goes on from')


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


def test_nothing_is_allocated_for_a_roll_over():
    engine = engine_for(FakeModel())
    memories = [engine._memory, engine._next.memory]
    buffers = [m._keys.data_ptr() for m in memories] + [
        m._camera_keys.data_ptr() for m in memories
    ]
    run(engine, range(60))
    assert engine.window == 9
    memories = [engine._memory, engine._next.memory]
    assert buffers == [m._keys.data_ptr() for m in memories] + [
        m._camera_keys.data_ptr() for m in memories
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
    outputs['depth'][:, index >= 6] = torch.nan


def test_without_valid_depth_the_scale_stays_and_poses_go_on(caplog):
    model = FakeModel(without_depth)
    engine = engine_for(model)
    first = len(model.moves)
    results = run(engine, range(12))
    assert engine.window == 1 and engine.last_scale_step == 1
    assert np.isnan(engine.last_residual)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert 'do not agree' in caplog.text
    # The hand-over hangs on the last keyframe, 11; relative to it only the scale is unknown.
    scales = [model.moves[first + i][0] for i in range(2)]
    T, _ = truth_in_window(model.moves[first], torch.arange(14))
    after = run(engine, range(12, 14))
    steps = [result.T_world_cam[:3, 3] - results[-1].T_world_cam[:3, 3] for result in after]
    expected = (T[12:, :3, 3] - T[11, :3, 3]) * scales[0] / scales[1]
    np.testing.assert_allclose(steps, expected, rtol=0, atol=1e-4)


def test_windows_that_disagree_are_announced(caplog):
    def bend(index, outputs, window):
        outputs['depth'][..., :12, :] *= 1 + 0.5 * (window % 2)  # to the left
        outputs['depth'][..., 30:, :] *= 1 - 0.5 * (window % 2)  # to the right

    model = FakeModel(bend)
    engine = engine_for(model)
    run(engine, range(12))
    assert engine.window == 1 and engine.last_residual > 0.1
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert f'residual {100 * engine.last_residual:.1f} %' in caplog.text


def test_a_pose_that_is_not_finite_does_not_spoil_the_seam(caplog):
    def spoil(index, outputs, window):
        outputs['pose_enc'][:, index == 11] = torch.nan
        outputs['depth'][:, index == 11] = 5.0

    model = FakeModel(spoil)
    engine = engine_for(model)
    first = len(model.moves)
    run(engine, range(12))
    assert engine.window == 1 and not caplog.records
    assert_true(run(engine, range(12, 18)), model.moves[first], first=12)


def test_without_any_pose_a_new_sequence_begins(caplog):
    def spoil(index, outputs, window):
        outputs['pose_enc'][:, index >= 6] = torch.nan

    engine = engine_for(FakeModel(spoil))
    sequence = engine.sequence
    assert len(run(engine, range(12))) == 12
    assert 'cannot roll over' in caplog.text and engine.sequence == sequence
    assert run(engine, [12]) == []
    assert engine.sequence == sequence + 1 and engine.waiting == 1


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
    assert len(results) == engine.keyframes == 40 and engine.window == 4
    assert all(np.isfinite(result.T_world_cam).all() for result in results)


@pytest.mark.cuda
def test_a_gpu_rolls_over_like_the_cpu(network, images):
    expected = push_all(engine_for(network), images[:30])
    model = GCTStream.from_config(MODEL)
    model.load_state_dict(network.state_dict())
    config = {'num_scale_frames': 4, 'sliding_window': 3, 'image_width': WIDTH}
    config = StreamConfig(max_keyframes=12, overlap_keyframes=6, **config)
    engine = StreamEngine(model.cuda(), config, 'cuda')
    engine.warm_up(HEIGHT, WIDTH)
    results = push_all(engine, images[:30])
    assert engine.window == 4
    for a, b in zip(results, expected, strict=True):
        np.testing.assert_allclose(a.T_world_cam, b.T_world_cam, rtol=0, atol=1e-3)
        torch.testing.assert_close(a.depth.cpu(), b.depth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('frames', [3, 8, 10, 11, 12, 40])
@pytest.mark.parametrize('how', ['reset', 'size'])
def test_a_new_sequence_has_the_numbers_of_a_new_engine(network, images, frames, how):
    """Interrupt before, in and after the building of a next window."""
    used, fresh = engine_for(network), engine_for(network)
    push_all(used, images[-frames:])
    if how == 'reset':
        used.reset()
    else:
        used.push(np.zeros((42, WIDTH, 3), np.uint8))
    assert used.window == 0 and (used.last_scale_step, used.last_residual) == (1, 0)
    for a, b in zip(push_all(used, images[:30]), push_all(fresh, images[:30]), strict=True):
        assert np.array_equal(a.T_world_cam, b.T_world_cam) and torch.equal(a.depth, b.depth)
        assert torch.equal(a.confidence, b.confidence) and a.is_keyframe == b.is_keyframe
        assert np.array_equal(a.intrinsics, b.intrinsics) and a.index == b.index
    assert used.window == fresh.window == 4 and used.keyframes == fresh.keyframes == 30
    assert (used.last_scale_step, used.last_residual) == (
        fresh.last_scale_step,
        fresh.last_residual,
    )


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
