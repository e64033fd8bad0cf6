"""Windowed inference: layout, alignment and stitching, on windows whose similarity is known."""

import json
from pathlib import Path

from lingbot_map.benchmark.recipe import fill_model
from lingbot_map.geometry import matrix_to_quaternion, quaternion_to_matrix
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.models.windows import depth_scale, lay_out, stitch, Window
import pytest
import torch

GOLDEN = json.loads((Path(__file__).parents[2] / 'golden' / 'tiny_config.json').read_text())
FIXED = [e for e in GOLDEN['windowed'] if 'flow_threshold' not in e]
MODEL = {
    'embed_dim': 128, 'num_heads': 2, 'depth': 4, 'selected_layers': (0, 1, 2, 3),
    'vit_depth': 1, 'vit_num_heads': 2, 'img_size': 56, 'camera_trunk_depth': 1,
    'camera_num_heads': 2, 'camera_num_iterations': 2, 'enable_3d_rope': True,
    'dpt_features': 16, 'dpt_out_channels': (16, 16, 16, 16),
}  # fmt: skip


@pytest.mark.parametrize('entry', FIXED, ids=[e['name'] for e in FIXED])
def test_layout_of_the_goldens(entry):
    layout = lay_out(
        entry['num_frames'],
        entry['num_scale_frames'],
        entry['window_size'],
        entry.get('overlap_size'),
        entry.get('overlap_keyframes'),
        entry['keyframe_interval'],
    )
    windows = [[w.start, w.stop] for w in layout.windows(entry['num_frames'])]
    assert windows == entry['checks']['windows']


@pytest.mark.parametrize(
    ('arguments', 'windows'),
    [
        ((1, 8, 16), [(0, 1)]),
        ((16, 8, 16), [(0, 16)]),
        ((17, 8, 16), [(0, 16), (8, 17)]),
        ((24, 8, 16), [(0, 16), (8, 24)]),
        ((25, 8, 16), [(0, 16), (8, 24), (16, 25)]),
        ((25, 8, 16, 0), [(0, 16), (16, 25)]),
        ((25, 8, 16, 4, 2), [(0, 16), (8, 24), (16, 25)]),  # keyframes win, at least 8 frames
        ((60, 2, 6, None, 3, 5), [(0, 22), (7, 29), (14, 36), (21, 43), (28, 50), (35, 57),
                                  (42, 60)]),
    ],
)  # fmt: skip
def test_layout(arguments, windows):
    layout = lay_out(*arguments)
    assert [(w.start, w.stop) for w in layout.windows(arguments[0])] == windows


@pytest.mark.parametrize(
    'arguments', [(24, 3, 6, 6), (24, 3, 6, 9), (24, 8, 8), (24, 3, 6, None, 6), (24, 8, 2, 8)]
)
def test_an_overlap_as_long_as_a_window_is_refused(arguments):
    with pytest.raises(ValueError, match='do not advance.*raise window_size'):
        lay_out(*arguments)


@pytest.mark.parametrize('arguments', [(24, 3, 6, -1), (24, 3, 6, None, -1)])
def test_a_negative_overlap_is_refused(arguments):
    with pytest.raises(ValueError, match='negative'):
        lay_out(*arguments)


def rotations(count):
    return quaternion_to_matrix(torch.randn(count, 4, dtype=torch.float64))


class Truth:
    """A sequence whose poses, depths and points are known in one frame, cut into windows."""

    def __init__(self, frames):
        torch.manual_seed(frames)
        self.R, self.c = rotations(frames), torch.randn(frames, 3, dtype=torch.float64)
        self.depth = 1 + 4 * torch.rand(frames, 5, 6, 1, dtype=torch.float64)
        self.points = torch.randn(frames, 5, 6, 3, dtype=torch.float64)
        self.fov = torch.rand(frames, 2, dtype=torch.float64)

    def window(self, start, stop, is_keyframe, move):
        """Return the frames as seen in a world frame from which `move` leads to the truth."""
        scale, R, t = move
        part = slice(start, stop)
        c, points = ((x - t) @ R / scale for x in (self.c[part], self.points[part]))
        q = 2.5 * matrix_to_quaternion(R.T @ self.R[part])
        outputs = {
            'pose_enc': torch.cat((c, q, self.fov[part]), -1)[None].float(),
            'depth': (self.depth[part] / scale)[None].float(),
            'depth_conf': self.depth[None, part, ..., 0].float(),
            'world_points': points[None].float(),
            'is_keyframe': torch.tensor([is_keyframe]),
        }
        return Window(start, outputs)


def random_move():
    return (0.5 + torch.rand(()).item(), rotations(1)[0], torch.randn(3, dtype=torch.float64))


IDENTITY = (1.0, torch.eye(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
# The overlaps differ: 4 frames, 4, 1; the third window ends inside the second.
RANGES = [(0, 8), (4, 14), (8, 12), (11, 20)]


def cut(truth, ranges, is_keyframe=lambda start, frame: True):
    moves = [IDENTITY, *(random_move() for _ in ranges[1:])]
    windows = [
        truth.window(start, stop, [is_keyframe(start, f) for f in range(start, stop)], move)
        for (start, stop), move in zip(ranges, moves, strict=True)
    ]
    return windows, moves


@pytest.mark.parametrize('every', [1, 2, 9])
def test_windows_come_back_to_the_frame_of_the_first(every):
    truth = Truth(20)
    # Keyframes as windows have them: every n-th of the window's own frames.
    windows, moves = cut(truth, RANGES, lambda start, frame: (frame - start) % every == 0)
    outputs = stitch(windows)
    pose_enc = outputs['pose_enc'][0].double()
    assert pose_enc.shape == (20, 9)
    torch.testing.assert_close(pose_enc[:, :3], truth.c, rtol=0, atol=2e-5)
    R = quaternion_to_matrix(pose_enc[:, 3:7])
    torch.testing.assert_close(R, truth.R, rtol=0, atol=2e-5)
    torch.testing.assert_close(pose_enc[:, 3:7].norm(dim=-1), torch.ones(20).double())
    assert (pose_enc[:, 6] >= 0).all()
    torch.testing.assert_close(pose_enc[:, 7:], truth.fov.float().double(), rtol=0, atol=0)
    torch.testing.assert_close(outputs['depth'][0].double(), truth.depth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        outputs['world_points'][0].double(), truth.points, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(outputs['depth_conf'][0], truth.depth[..., 0].float())
    scales = torch.tensor([move[0] for move in moves])
    torch.testing.assert_close(outputs['chunk_scales'][0], scales, rtol=1e-5, atol=0)
    for transform, (_, R, t) in zip(outputs['chunk_transforms'][0].double(), moves, strict=True):
        torch.testing.assert_close(transform[:3, :3], R, rtol=0, atol=2e-5)
        torch.testing.assert_close(transform[:3, 3], t, rtol=0, atol=5e-5)
        assert transform[3].tolist() == [0, 0, 0, 1]


def test_only_frames_that_are_keyframes_in_both_windows_decide():
    truth = Truth(10)
    # In the overlap, frames 5 to 7, only frame 6 is a keyframe of both windows.
    windows, moves = cut(truth, [(0, 8), (5, 10)], lambda start, f: f != (5 if start == 0 else 7))
    for wrong in (5, 7):
        windows[0].outputs['depth'][0, wrong] *= 100
        windows[1].outputs['pose_enc'][0, wrong - 5, :3] += 1
    scales = stitch(windows)['chunk_scales'][0]
    assert scales.tolist() == pytest.approx([1.0, moves[1][0]], rel=1e-5)


def test_in_an_overlap_the_later_window_wins():
    windows, _ = cut(Truth(10), [(0, 8), (5, 10)])
    for number, window in enumerate(windows):
        window.outputs['depth_conf'][:] = number
    assert stitch(windows)['depth_conf'][0, :, 0, 0].tolist() == [0] * 5 + [1] * 5


def test_without_overlap_windows_are_left_where_they_are():
    windows, _ = cut(Truth(8), [(0, 4), (4, 8)])
    outputs = stitch(windows)
    assert outputs['chunk_scales'].tolist() == [[1, 1]]
    assert outputs['chunk_transforms'].tolist() == [[torch.eye(4).tolist()] * 2]
    torch.testing.assert_close(outputs['depth'][:, 4:], windows[1].outputs['depth'])


def test_one_window_is_not_touched():
    windows, _ = cut(Truth(4), [(0, 4)])
    assert stitch(windows) is windows[0].outputs


def test_scale_is_the_lower_median_over_valid_pixels():
    after = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1e-8, torch.nan, 1.0, torch.inf])
    before = torch.tensor([4.0, 1.0, 2.0, 3.0, 9.0, 9.0, 9.0, torch.inf, 9.0])
    assert depth_scale(before, after) == 2.0
    assert depth_scale(before[4:], after[4:]) is None
    assert depth_scale(torch.tensor([5.0]), torch.tensor([1e-3])) == 1e3
    assert depth_scale(torch.tensor([1e-6]), torch.tensor([1.0])) == 1e-3


@pytest.fixture(scope='module')
def model():
    model = GCTStream.from_config(MODEL)
    fill_model(model, 'windows')
    return model


@pytest.fixture(scope='module')
def images():
    return torch.rand(16, 3, 28, 42, generator=torch.Generator().manual_seed(4))


def test_windows_by_flow_are_aligned_over_what_they_really_share(model, images):
    """Keep every frame: the windows are those of a fixed interval with the true overlap, 4."""
    asked = model.inference_windowed(images, 7, overlap_size=5, num_scale_frames=3,
                                     flow_threshold=1e-6)  # fmt: skip
    true = model.inference_windowed(images, 7, overlap_size=4, num_scale_frames=3)
    assert asked['is_keyframe'].all() and asked['chunk_scales'].shape == (1, 4)
    for key in ('pose_enc', 'depth', 'frame_type', 'chunk_scales', 'chunk_transforms'):
        torch.testing.assert_close(asked[key], true[key], rtol=1e-5, atol=1e-5)


def test_a_frame_rejected_by_flow_leaves_no_trace(model, images):
    """A threshold that nothing reaches is the interval of the gap."""
    model.kv_cache_sliding_window = 64  # nothing is evicted: keyframes see the same either way
    rejected = model.inference_streaming(
        images, 3, flow_threshold=1e9, max_non_keyframe_gap=4
    )  # fmt: skip
    fixed = model.inference_streaming(images, 3, keyframe_interval=4)
    torch.testing.assert_close(rejected['pose_enc'], fixed['pose_enc'], rtol=0, atol=1e-6)
    torch.testing.assert_close(rejected['depth'], fixed['depth'], rtol=1e-5, atol=1e-5)
    assert rejected.keys() - fixed.keys() == {'flow'} and rejected['flow'].shape == (1, 13)


def test_a_changed_window_counts_from_the_next_sequence(model, images):
    model.kv_cache_sliding_window = 64
    wide = model.inference_streaming(images, 3)['pose_enc']
    model.kv_cache_sliding_window = 1
    narrow = model.inference_streaming(images, 3)['pose_enc']
    model.memory = None
    assert torch.equal(narrow, model.inference_streaming(images, 3)['pose_enc'])
    assert not torch.equal(narrow, wide)


def test_output_device_and_what_is_returned(model, images):
    outputs = model.inference_windowed(images, 6, num_scale_frames=2, output_device='cpu')
    assert model.memory is None
    assert outputs.keys() == {
        'pose_enc', 'depth', 'depth_conf', 'frame_type', 'is_keyframe', 'chunk_scales',
        'chunk_transforms', 'alignment_mode', 'images'}  # fmt: skip
    assert outputs['alignment_mode'] == 'scaled'
    assert outputs['images'].shape == (1, *images.shape)
    assert outputs['frame_type'].dtype == torch.uint8
    single = model.inference_windowed(images[:5], 6, num_scale_frames=2)
    assert not any(key.startswith('chunk_') for key in single)
    assert model.memory.kept == 5
    streamed = model.inference_streaming(images[:5], 2)
    assert torch.equal(single['pose_enc'], streamed['pose_enc'])


def test_wrong_arguments(model, images):
    with pytest.raises(ValueError, match="scale_mode is 'mean'"):
        model.inference_windowed(images, scale_mode='mean')
    with pytest.raises(ValueError, match='do not advance'):
        model.inference_windowed(images, 4, overlap_size=4, num_scale_frames=2)
    with pytest.raises(ValueError, match='enable_camera'):
        GCTStream.from_config({**MODEL, 'enable_camera': False}).inference_windowed(images)
