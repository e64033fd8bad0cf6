"""Poses in the map frame: axes, origin, scale, quaternions."""

from fake_engine import straight, turned
from lingbot_map.geometry import invert
from lingbot_map.mapping.map_frame import MapFrame, unit_quaternion
import numpy as np
import pytest
import torch


def rotation(axis, angle):
    x, y, z = np.asarray(axis) / np.linalg.norm(axis)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


def matrix_of(q_xyzw):
    """Return the rotation by the sandwich product, independent of the code under test."""
    vector, w = np.asarray(q_xyzw[:3]), q_xyzw[3]
    return np.stack(
        [
            v + 2 * w * np.cross(vector, v) + 2 * np.cross(vector, np.cross(vector, v))
            for v in np.eye(3)
        ],
        axis=1,
    )


def test_first_camera_is_the_origin_and_looks_along_x():
    pose = MapFrame(1.0).pose(turned())
    np.testing.assert_allclose(pose.T_map_body[:3, 3], 0, atol=1e-12)
    np.testing.assert_allclose(pose.T_map_body @ (0, 0, 2, 1), (2, 0, 0, 1), atol=1e-12)
    np.testing.assert_allclose(pose.T_map_body @ (1, 0, 0, 1), (0, -1, 0, 1), atol=1e-12)
    np.testing.assert_allclose(pose.T_map_body @ (0, 1, 0, 1), (0, 0, -1, 1), atol=1e-12)


def test_moving_along_the_optical_axis_is_moving_along_x():
    frame = MapFrame(1.0)
    positions = [frame.pose(straight(index)).T_map_body[:3, 3] for index in range(4)]
    np.testing.assert_allclose(positions, [(i, 0, 0) for i in range(4)], atol=1e-12)


def test_transform_then_inverse_is_identity():
    T = MapFrame(1.0).pose(straight(3)).T_map_body
    np.testing.assert_allclose(T @ invert(T), np.eye(4), atol=1e-12)


def test_scale_stretches_positions_and_leaves_rotations():
    plain, scaled = MapFrame(1.0), MapFrame(2.5)
    plain.pose(turned()), scaled.pose(turned())
    a, b = plain.pose(straight(2)), scaled.pose(straight(2))
    np.testing.assert_allclose(b.T_map_body[:3, 3], 2.5 * a.T_map_body[:3, 3])
    np.testing.assert_array_equal(b.q_xyzw, a.q_xyzw)


def test_quaternions_are_unit_and_give_the_rotation_back():
    random = np.random.default_rng(1)
    for _ in range(200):
        R = rotation(random.normal(size=3), random.uniform(-np.pi, np.pi))
        q_xyzw = unit_quaternion(R + random.normal(scale=1e-7, size=(3, 3)))
        assert abs(np.linalg.norm(q_xyzw) - 1) < 1e-12
        np.testing.assert_allclose(matrix_of(q_xyzw), R, atol=1e-6)


def test_quaternion_sign_is_continuous_over_two_turns():
    frame = MapFrame(1.0)
    previous = None
    for angle in np.linspace(0, 4 * np.pi, 200):
        T = np.eye(4)
        T[:3, :3] = rotation((0.2, 1.0, 0.1), angle)
        q_xyzw = frame.pose(T).q_xyzw
        if previous is not None:
            assert np.abs(q_xyzw - previous).max() < 0.05
        previous = q_xyzw


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_a_pose_that_is_not_finite_is_refused_and_forgotten(bad):
    frame = MapFrame(1.0)
    broken = turned()
    broken[0, 3] = bad
    with pytest.raises(FloatingPointError):
        frame.pose(broken)
    np.testing.assert_allclose(frame.pose(straight(5)).T_map_body[:3, 3], 0, atol=1e-12)


def test_rotations_of_half_precision_give_true_ones_with_signs_that_do_not_jump():
    random = np.random.default_rng(2)
    axis, frame, previous = random.normal(size=3), MapFrame(1.0), None
    for angle in np.linspace(0, 6 * np.pi, 300):
        axis += random.normal(scale=0.02, size=3)
        T = np.eye(4)
        rounded = torch.from_numpy(rotation(axis, angle)).bfloat16()
        T[:3, :3] = rounded.double().numpy()
        pose = frame.pose(T)
        R, q_xyzw = pose.T_map_body[:3, :3], pose.q_xyzw
        assert np.isfinite(pose.T_map_body).all()
        np.testing.assert_allclose(R @ R.T, np.eye(3), atol=1e-12)
        np.testing.assert_allclose(matrix_of(q_xyzw), R, atol=1e-9)
        assert abs(np.linalg.norm(q_xyzw) - 1) < 1e-12
        if previous is not None:
            assert q_xyzw @ previous > 0.9
        previous = q_xyzw


def test_a_known_first_pose_stays_where_it_is_whatever_the_scale():
    T_map_first = np.eye(4)
    T_map_first[:3, :3], T_map_first[:3, 3] = rotation((0.1, 1.0, 0.0), 0.4), (0.2, -0.1, 0.5)
    frame = MapFrame(3.0, T_map_first=T_map_first)
    first, second = frame.pose(turned()).T_map_body, frame.pose(straight(2)).T_map_body
    np.testing.assert_allclose(first, T_map_first, atol=1e-12)
    np.testing.assert_allclose(second, T_map_first @ translation(0, 0, 6), atol=1e-12)
    frame.scale = 1.0
    again = frame.pose(straight(2)).T_map_body
    np.testing.assert_allclose(again, T_map_first @ translation(0, 0, 2), atol=1e-12)
    np.testing.assert_allclose(frame.origin, T_map_first[:3, 3])


def translation(*xyz):
    T = np.eye(4)
    T[:3, 3] = xyz
    return T
