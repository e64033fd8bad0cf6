"""PointFilter against a loop over pixels written from the specification."""

from dataclasses import replace

from lingbot_map.mapping.points import POINT_DTYPE, PointFilter
from lingbot_map.streaming.frame import FrameResult
from lingbot_map.streaming.preprocess import PixelMap
from mapped import mapped
import numpy as np
import pytest
import torch

K = np.array([[50.0, 0, 4.0], [0, 40.0, 3.0], [0, 0, 1]])
T_MAP_CAM = np.array([[0.0, 0, 1, 10], [-1, 0, 0, 20], [0, -1, 0, 30], [0, 0, 0, 1]])


def frame(depth, confidence=None, rgb=None):
    depth = torch.as_tensor(depth, dtype=torch.float32)
    size = (depth.shape[1], depth.shape[0])
    return FrameResult(
        tag=None,
        index=0,
        is_keyframe=True,
        T_world_cam=np.eye(4),
        intrinsics=K,
        network_intrinsics=K,
        depth=depth,
        confidence=torch.full_like(depth, 1.5) if confidence is None else confidence,
        rgb=torch.zeros(*depth.shape, 3, dtype=torch.uint8) if rgb is None else rgb,
        mapping=PixelMap(1.0, 1.0, 0, 0, size, size),
        timings_ms={},
    )


def random_frame(seed=0, height=6, width=8):
    generator = torch.Generator().manual_seed(seed)
    return frame(
        0.5 + 3 * torch.rand(height, width, generator=generator),
        1 + torch.rand(height, width, generator=generator),
        torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator),
    )


def reference(result, T_map_cam, scale, stride, keep):
    rows = []
    for v in range(0, result.depth.shape[0], stride):
        for u in range(0, result.depth.shape[1], stride):
            z = float(result.depth[v, u]) * scale
            if keep(z, float(result.confidence[v, u])):
                camera = z * np.array([(u - K[0, 2]) / K[0, 0], (v - K[1, 2]) / K[1, 1], 1.0])
                r, g, b = (int(c) for c in result.rgb[v, u])
                rows.append(
                    (
                        *(T_map_cam[:3, :3] @ camera + T_map_cam[:3, 3]),
                        r * 65536 + g * 256 + b,
                        float(result.confidence[v, u]),
                    )
                )
    return np.array(rows, POINT_DTYPE)


def assert_same_points(points, expected):
    assert points.dtype == POINT_DTYPE
    assert len(points) == len(expected)
    for name in ('x', 'y', 'z'):
        np.testing.assert_allclose(points[name], expected[name], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(points['rgb'], expected['rgb'])
    np.testing.assert_array_equal(points['confidence'], expected['confidence'])


@pytest.mark.parametrize('stride', [1, 2, 3])
def test_all_pixels_in_row_order(stride):
    result = random_frame()
    expected = reference(result, T_MAP_CAM, 1.0, stride, lambda z, c: True)
    assert_same_points(PointFilter(stride=stride)(mapped(result, T_MAP_CAM)), expected)


def test_thresholds_and_scale():
    result = random_frame(seed=1)
    points = PointFilter(min_confidence=1.4, max_depth=4.0)(mapped(result, T_MAP_CAM, scale=2.0))
    expected = reference(result, T_MAP_CAM, 2.0, 1, lambda z, c: c >= np.float32(1.4) and z <= 4.0)
    assert 0 < len(expected) < result.depth.numel()
    assert_same_points(points, expected)


def test_a_point_record_is_what_messages_hold():
    assert POINT_DTYPE.itemsize == 20
    assert [POINT_DTYPE.fields[name][1] for name in POINT_DTYPE.names] == [0, 4, 8, 12, 16]


def test_one_forward_point_lies_forward_in_the_map():
    depth = torch.zeros(6, 8)
    depth[3, 4] = 2.0  # the principal point
    rgb = torch.zeros(6, 8, 3, dtype=torch.uint8)
    rgb[3, 4] = torch.tensor([255, 128, 1], dtype=torch.uint8)
    (point,) = PointFilter()(mapped(frame(depth, rgb=rgb), T_MAP_CAM))
    assert (point['x'], point['y'], point['z']) == pytest.approx((12.0, 20.0, 30.0))
    assert point['rgb'] == 0xFF8001


def test_depth_that_is_no_depth_makes_no_point():
    depth = torch.ones(6, 8)
    bad = [float('nan'), float('inf'), -float('inf'), 0.0, -1.0]
    depth[0, :5] = torch.tensor(bad)
    points = PointFilter()(mapped(frame(depth), np.eye(4)))
    assert len(points) == 48 - len(bad)
    assert np.isfinite(points['x']).all() and (points['z'] == 1.0).all()


def test_nan_confidence_makes_no_point():
    confidence = torch.ones(6, 8)
    confidence[2, 2] = float('nan')
    assert len(PointFilter()(mapped(frame(torch.ones(6, 8), confidence), np.eye(4)))) == 47


def test_nothing_left_is_an_empty_cloud():
    points = PointFilter(min_confidence=1e6)(mapped(random_frame(), T_MAP_CAM))
    assert points.shape == (0,) and points.dtype == POINT_DTYPE


def test_the_frame_is_not_changed():
    result = random_frame()
    before = result.depth.clone(), result.confidence.clone(), result.network_intrinsics.copy()
    PointFilter(stride=2, max_depth=1.0)(mapped(result, T_MAP_CAM, scale=3.0))
    assert torch.equal(result.depth, before[0]) and torch.equal(result.confidence, before[1])
    np.testing.assert_array_equal(result.network_intrinsics, before[2])


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('min_confidence', -1.0),
        ('min_confidence', float('nan')),
        ('max_depth', -0.1),
        ('stride', 0),
    ],
)
def test_a_wrong_setting_is_named(name, value):
    with pytest.raises(ValueError, match=f'{name} is {value}'):
        PointFilter(**{name: value})


def four_pixels(confidence):
    return frame(torch.ones(2, 2), torch.tensor(confidence).reshape(2, 2))


@pytest.mark.parametrize(
    'options, kept',
    [
        ({'min_confidence': 2.5}, [3, 4]),
        ({'min_confidence': 5.0}, []),
        ({'keep_percentile': 50.0}, [3, 4]),
        ({'keep_percentile': 51.0}, [2, 3, 4]),
        ({'keep_percentile': 1.0}, [4]),
        ({'keep_percentile': 0.0}, []),
        ({'min_confidence': 1.5, 'keep_percentile': 50.0}, [3, 4]),  # of three
    ],
)
def test_confidence_is_absolute_and_the_percentile_of_the_frame(options, kept):
    points = PointFilter(**options)(mapped(four_pixels([4.0, 1.0, 3.0, 2.0]), np.eye(4)))
    assert sorted(points['confidence']) == kept
    assert points.dtype == POINT_DTYPE


def test_the_percentile_counts_valid_pixels_only_and_of_none_keeps_none():
    result = four_pixels([4.0, 1.0, 3.0, 2.0])
    depth = result.depth.clone()
    depth[0, 0], depth[1, 1] = torch.nan, -1.0
    points = PointFilter(keep_percentile=50.0)(mapped(replace(result, depth=depth), np.eye(4)))
    assert list(points['confidence']) == [3]
    nothing = replace(result, depth=torch.full((2, 2), torch.nan))
    assert (
        len(PointFilter(keep_percentile=50.0, edge_threshold=0.1)(mapped(nothing, np.eye(4)))) == 0
    )


@pytest.mark.parametrize('stride', [1, 2])
def test_pixels_at_a_step_in_depth_are_dropped_and_slopes_and_holes_stay(stride):
    depth = torch.full((6, 12), 2.0)
    depth[:, 6:] = 3.0  # a step between columns 5 and 6
    depth[:, 8:] += 0.05 * torch.arange(4)
    depth[2, 1] = torch.nan
    points = PointFilter(edge_threshold=0.2, stride=stride)(mapped(frame(depth), np.eye(4)))
    expected = reference(frame(depth), np.eye(4), 1.0, stride, lambda z, c: z == z)
    at_step = np.isin(np.arange(12), (5, 6))
    columns = np.tile(np.arange(0, 12, stride), len(range(0, 6, stride)))
    if stride == 1:
        columns = np.delete(columns, 2 * 12 + 1)
    assert_same_points(points, expected[~at_step[columns]])


@pytest.mark.cuda
@pytest.mark.parametrize('settings', [
    {}, {'stride': 3},
    {'keep_percentile': 40.0, 'max_depth': 2.5, 'edge_threshold': 0.9}])  # fmt: skip
def test_a_gpu_packs_the_same_points(settings):
    here = random_frame(height=60, width=81)
    there = replace(here, depth=here.depth.cuda(), confidence=here.confidence.cuda(),
                    rgb=here.rgb.cuda())  # fmt: skip
    expected, points = (PointFilter(**settings)(mapped(r, T_MAP_CAM, 1.5)) for r in (here, there))
    assert len(points) and np.array_equal(points['rgb'], expected['rgb'])
    for name in ('x', 'y', 'z', 'confidence'):
        np.testing.assert_allclose(points[name], expected[name], rtol=1e-5, atol=1e-5)
