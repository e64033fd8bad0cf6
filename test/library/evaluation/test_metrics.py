"""Trajectory errors against figures worked out by hand."""

from lingbot_map.evaluation.metrics import (
    Alignment,
    associate,
    ate,
    MetricsError,
    path_length,
    rpe,
    umeyama,
)
import numpy as np
import pytest

CORNERS = np.array([[0.0, 0, 0], [1, 0, 0], [1, 2, 0], [1, 2, 3]])


def about_z(degrees):
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])


def line_of_poses(xs, yaw_step_deg=0.0):
    poses = np.tile(np.eye(4), (len(xs), 1, 1))
    poses[:, 0, 3] = xs
    for i, pose in enumerate(poses):
        pose[:3, :3] = about_z(i * yaw_step_deg)
    return poses


def test_umeyama_finds_the_similarity_that_was_applied():
    known = Alignment(
        2.5, about_z(30) @ about_z(5).T[[1, 2, 0]][:, [1, 2, 0]], np.array([1.0, -2, 3])
    )
    found = umeyama(CORNERS, known(CORNERS))
    assert found.scale == pytest.approx(2.5)
    np.testing.assert_allclose(found.R, known.R, atol=1e-12)
    np.testing.assert_allclose(found.t, known.t, atol=1e-12)


def test_inverse_undoes_a_similarity():
    similarity = Alignment(0.5, about_z(70), np.array([4.0, 5, 6]))
    np.testing.assert_allclose(similarity.inverse()(similarity(CORNERS)), CORNERS, atol=1e-12)


def test_umeyama_without_scale_keeps_it_at_one():
    found = umeyama(CORNERS, 3.0 * CORNERS, with_scale=False)
    assert found.scale == 1.0
    np.testing.assert_allclose(found.R, np.eye(3), atol=1e-12)


def test_umeyama_never_mirrors():
    mirrored = CORNERS * [1, 1, -1]
    assert np.linalg.det(umeyama(CORNERS, mirrored).R) == pytest.approx(1.0)


def test_sim3_ate_of_a_similar_path_is_zero():
    estimate = Alignment(0.2, about_z(100), np.array([9.0, 9, 9]))(CORNERS)
    result = ate(estimate, CORNERS)
    assert result.error.rmse == pytest.approx(0.0, abs=1e-12)
    assert result.alignment.scale == pytest.approx(5.0)
    assert result.error.count == 4


def test_ate_without_alignment_counts_every_distance():
    truth = np.zeros((4, 3))
    estimate = np.array([[3.0, 4, 0], [0, 0, 0], [0, 1, 0], [0, 0, 2]])  # 5, 0, 1, 2
    error = ate(estimate, truth, 'none').error
    assert error.rmse == pytest.approx(np.sqrt((25 + 0 + 1 + 4) / 4))
    assert (error.mean, error.median, error.max) == pytest.approx((2.0, 1.5, 5.0))


def test_se3_ate_leaves_a_wrong_scale_as_error():
    truth = np.array([[-1.0, 0, 0], [1, 0, 0], [0, -1, 0], [0, 1, 0]])
    result = ate(2.0 * truth, truth, 'se3')
    assert result.error.rmse == pytest.approx(1.0)  # each of the four is one unit too far out
    assert ate(2.0 * truth, truth, 'sim3').error.rmse == pytest.approx(0.0, abs=1e-12)


def test_ate_of_a_straight_path_is_defined():
    line = np.outer(np.arange(5.0), [1, 2, 3])
    assert ate(line, 2 * line[:, [2, 1, 0]]).error.rmse == pytest.approx(0.0, abs=1e-9)


def test_rpe_of_one_percent_drift():
    truth = line_of_poses(np.arange(11.0))
    result = rpe(line_of_poses(1.01 * np.arange(11.0)), truth)
    assert result.translation.mean == pytest.approx(0.01)
    assert result.translation.count == 10
    assert result.rotation_deg.max == pytest.approx(0.0, abs=1e-9)
    assert rpe(line_of_poses(1.01 * np.arange(11.0)), truth, delta=5).translation.mean == (
        pytest.approx(0.05)
    )


def test_rpe_of_a_turning_drift():
    still = line_of_poses(np.zeros(7))
    turning = line_of_poses(np.zeros(7), yaw_step_deg=1.5)
    assert rpe(turning, still).rotation_deg.rmse == pytest.approx(1.5)
    assert rpe(turning, still, delta=4).rotation_deg.mean == pytest.approx(6.0)


def test_rpe_measures_half_a_turn():
    half_turn = line_of_poses(np.zeros(2), yaw_step_deg=180)
    assert rpe(half_turn, line_of_poses(np.zeros(2))).rotation_deg.max == pytest.approx(180.0)


def test_path_length():
    assert path_length(CORNERS) == pytest.approx(6.0)
    assert path_length(CORNERS[:1]) == 0.0


def test_associate_pairs_the_nearest_within_tolerance():
    i, j = associate([0, 100, 205, 900], [98, 200, 210, 400], tolerance_ns=50)
    assert i.tolist() == [1, 2]
    assert j.tolist() == [0, 1]  # 205 is as far from 200 as from 210: the earlier one


def test_associate_with_one_or_no_partner():
    assert [a.tolist() for a in associate([5, 7], [6], 1)] == [[0, 1], [0, 0]]
    assert [a.tolist() for a in associate([5, 7], [], 1)] == [[], []]


@pytest.mark.parametrize(
    ('estimate', 'truth', 'words'),
    [
        (np.ones((5, 3)), CORNERS, 'shapes'),
        (np.zeros((0, 3)), np.zeros((0, 3)), 'no pair'),
        (np.full((4, 3), np.nan), CORNERS, 'not finite'),
        (np.ones((4, 3)), CORNERS, 'estimated path does not move'),
        (CORNERS, np.ones((4, 3)), 'true path does not move'),
        (np.ones((1, 3)), np.ones((1, 3)), 'does not move'),
    ],
)
def test_paths_that_cannot_be_aligned_are_named(estimate, truth, words):
    with pytest.raises(MetricsError, match=words):
        ate(estimate, truth)


def test_too_few_poses_for_rpe():
    with pytest.raises(MetricsError, match='3 poses are too few for a step of 3'):
        rpe(line_of_poses(range(3)), line_of_poses(range(3)), delta=3)


def test_unknown_alignment_is_named():
    with pytest.raises(ValueError, match="alignment is 'sim4'"):
        ate(CORNERS, CORNERS, 'sim4')
