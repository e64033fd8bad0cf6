"""Covariance from confidence, and poses that jump."""

from dataclasses import replace

from lingbot_map.mapping.pose_quality import (
    JumpWatch,
    measure_scene,
    pose_covariance,
    Scene,
    UNKNOWN_VARIANCE,
)
from mapped import mapped
import numpy as np
import pytest
from test_points import random_frame
import torch


def test_the_scene_is_that_of_valid_pixels_only():
    result = random_frame(height=24, width=32)
    depth, confidence = result.depth.clone(), result.confidence.clone()
    depth[0, 0], depth[4, 4], depth[8, 8] = torch.nan, 0.0, torch.inf
    confidence[12, 12] = torch.nan
    scene = measure_scene(mapped(replace(result, depth=depth, confidence=confidence)))
    valid = [
        (float(depth[v, u]), float(confidence[v, u]))
        for v in range(0, 24, 4)
        for u in range(0, 32, 4)
        if (v, u) not in ((0, 0), (4, 4), (8, 8), (12, 12))
    ]
    depths, confidences = map(sorted, zip(*valid, strict=True))
    assert len(valid) == 44
    assert scene.depth == pytest.approx(depths[21])  # the lower of the two in the middle
    assert scene.confidence == pytest.approx(np.mean(confidences))


def test_the_covariance_follows_the_documented_formula():
    covariance = pose_covariance(Scene(depth=6.0, confidence=4.0))
    expected = np.diag([(0.05 * 6) ** 2] * 3 + [0.05**2] * 3)
    np.testing.assert_allclose(covariance, expected)
    surer = pose_covariance(Scene(depth=6.0, confidence=8.0))
    np.testing.assert_allclose(surer, expected / 4)


@pytest.mark.parametrize('scene', [Scene(np.nan, np.nan), Scene(1.0, 0.0), Scene(1e300, 1e-300)])
def test_what_is_not_known_has_a_huge_variance_and_no_nan(scene):
    covariance = pose_covariance(scene)
    np.testing.assert_array_equal(covariance, np.diag([UNKNOWN_VARIANCE] * 6))


def test_a_frame_without_depth_has_no_known_scene():
    result = random_frame()
    scene = measure_scene(mapped(replace(result, depth=torch.full_like(result.depth, torch.nan))))
    assert np.isnan([scene.depth, scene.confidence]).all()


def at(x, turn_deg=0.0):
    c, s = np.cos(np.radians(turn_deg)), np.sin(np.radians(turn_deg))
    return np.array([[c, 0, s, x], [0, 1, 0, 0], [-s, 0, c, 0], [0, 0, 0, 1.0]])


def jumps(poses, stamps_s=None, depth=2.0):
    watch = JumpWatch()
    stamps_s = range(len(poses)) if stamps_s is None else stamps_s
    seen = [
        watch.check(T, int(1e9 * stamp), depth) for T, stamp in zip(poses, stamps_s, strict=True)
    ]
    return [i for i, text in enumerate(seen) if text]


def test_a_jump_is_found_and_the_way_on_is_none():
    steady = [at(0.1 * i) for i in range(10)]
    jumped = [at(5 + 0.1 * i) for i in range(10)]
    assert jumps(steady + jumped) == [10]


def test_a_sudden_turn_is_found_and_a_quick_one_is_none():
    assert jumps([at(0, 30.0 * i) for i in range(6)] + [at(0, 260.0)]) == [6]


def test_a_camera_that_starts_to_move_or_resumes_after_a_gap_does_not_jump():
    standing = [at(1e-4 * (i % 2)) for i in range(20)]
    assert jumps(standing + [at(0.3 * i) for i in range(1, 10)]) == []
    moving = [at(0.2 * i) for i in range(10)] + [at(4.0)]
    assert jumps(moving, [*range(10), 20]) == []
