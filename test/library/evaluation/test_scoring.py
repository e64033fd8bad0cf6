"""All figures of a trajectory against cases worked out by hand, and against evo's programs."""

import json
import os
import shutil
import subprocess
import zipfile

from lingbot_map.evaluation.metrics import Alignment, MetricsError, rpe_over_path
from lingbot_map.evaluation.scoring import match, pose_errors, score, ScoreOptions
from lingbot_map.mapping.export import write_tum
from lingbot_map.recordings.pose_files import PoseTrack
import numpy as np
import pytest

SECOND = 10**9
OPTIONS = ScoreOptions(rpe_frames=(1, 10), rpe_metres=(1.0, 50.0))


def about_z(degrees):
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])


def straight(count=41, step=0.1, yaw_step_deg=0.0):
    """Return poses along x, with a heading that may turn."""
    T = np.tile(np.eye(4), (count, 1, 1))
    T[:, 0, 3] = step * np.arange(count)
    T[:, :3, :3] = [about_z(i * yaw_step_deg) for i in range(count)]
    return T


def winding(count=120, seed=3):
    """Return smooth poses in all directions, 0.05 m to 0.1 m apart."""
    t = np.linspace(0, 4 * np.pi, count)
    T = np.tile(np.eye(4), (count, 1, 1))
    T[:, :3, 3] = np.stack((0.7 * t, np.sin(t), 0.4 * np.cos(0.7 * t)), axis=1)
    T[:, :3, :3] = [about_z(20 * np.sin(a)) @ about_z(9 * a)[[2, 0, 1]][:, [2, 0, 1]] for a in t]
    noise = 0.01 * np.random.default_rng(seed).standard_normal((count, 3))
    T[:, :3, 3] += noise
    return T


def stamps(count):
    return np.arange(1, count + 1) * SECOND // 10


def scored(T, T_true, options=OPTIONS):
    track = PoseTrack('truth', stamps(len(T_true)), T_true)
    return score(match(stamps(len(T)), T, track, 0.02), options)


def moved(T, similarity):
    """Return the poses as another world sees them."""
    T = T.copy()
    T[:, :3, 3] = similarity(T[:, :3, 3])
    T[:, :3, :3] = similarity.R @ T[:, :3, :3]
    return T


def test_a_similar_path_has_no_error_and_its_scale_is_found():
    truth = winding()
    known = Alignment(2.5, about_z(40)[[1, 2, 0]][:, [1, 2, 0]], np.array([3.0, -1, 2]))
    figures, notes = scored(moved(truth, known.inverse()), truth)
    assert figures['scale'] == pytest.approx(2.5)
    assert figures['ate']['sim3']['rmse'] == pytest.approx(0, abs=1e-12)
    assert figures['rpe']['sim3']['frames']['10']['translation']['max'] < 1e-12
    assert figures['rpe']['sim3']['frames']['10']['rotation_deg']['max'] < 1e-9
    assert figures['drift_percent']['sim3'] == pytest.approx(0, abs=1e-9)
    assert figures['ate']['se3']['rmse'] > 0.1 < figures['ate']['none']['rmse']
    assert notes == []


def test_a_drift_of_one_percent():
    truth = straight()
    estimate = truth.copy()
    estimate[:, 0, 3] *= 1.01
    figures, _ = scored(estimate, truth)
    se3 = figures['rpe']['se3']
    assert se3['frames']['1']['translation']['rmse'] == pytest.approx(0.001)
    assert se3['frames']['10']['translation']['rmse'] == pytest.approx(0.010)
    assert se3['metres']['1']['translation']['mean'] == pytest.approx(0.010)
    assert figures['drift_percent']['se3'] == pytest.approx(1.0)
    assert figures['path_length_m'] == pytest.approx(4.0)
    # none: error i * 0.001 for i = 0 .. 40; aligned: the same about the middle
    assert figures['ate']['none']['max'] == pytest.approx(0.040)
    assert figures['ate']['se3']['max'] == pytest.approx(0.020)
    assert figures['ate_percent_of_path']['none'] == pytest.approx(100 * 0.001 * np.sqrt(540) / 4)
    # a scale of 1 / 1.01 takes all of it away
    assert figures['scale'] == pytest.approx(1 / 1.01)
    assert figures['drift_percent']['sim3'] == pytest.approx(0, abs=1e-9)


def test_a_turn_of_half_a_degree_per_frame():
    figures, _ = scored(straight(yaw_step_deg=0.5), straight())
    rotation = figures['rpe']['se3']
    assert rotation['frames']['1']['rotation_deg']['rmse'] == pytest.approx(0.5)
    assert rotation['frames']['10']['rotation_deg']['median'] == pytest.approx(5.0)
    assert rotation['metres']['1']['rotation_deg']['max'] == pytest.approx(5.0)


def test_steps_that_the_path_does_not_hold_are_left_out():
    figures, notes = scored(straight(5), straight(5))
    assert figures['rpe']['se3'] == {'frames': {'1': figures['rpe']['se3']['frames']['1']},
                                     'metres': {}}  # fmt: skip
    assert figures['drift_percent'] == {'se3': None, 'sim3': None}
    assert notes == []


def test_stretches_end_at_the_nearest_pose_within_a_tenth():
    truth = straight(5)
    truth[:, 0, 3] = [0.0, 0.4, 0.95, 2.0, 3.05]  # fits: 0 -> 2, 2 -> 3 and 3 -> 4
    estimate = truth.copy()
    estimate[2:, 1, 3] = 0.3
    error = rpe_over_path(estimate, truth, 1.0)
    assert (error.translation.count, error.translation.max) == (3, pytest.approx(0.3))
    assert error.translation.mean == pytest.approx(0.1)
    with pytest.raises(MetricsError, match='path of 3.05 is too short for a segment of 7'):
        rpe_over_path(estimate, truth, 7.0)


def test_a_path_that_does_not_move_has_no_scale():
    still = np.tile(np.eye(4), (41, 1, 1))
    figures, notes = scored(still, straight())
    assert figures['scale'] is figures['ate']['sim3'] is figures['rpe']['sim3'] is None
    assert figures['ate']['se3']['max'] == pytest.approx(2.0)
    assert notes == ['the estimated path does not move: no scale can be found']


def test_errors_over_time_are_those_after_the_alignment():
    truth = straight()
    known = Alignment(2.0, about_z(90), np.array([1.0, 2, 3]))
    estimate = moved(truth, known.inverse())
    estimate[7, :3, 3] += np.array([0.25, 0, 0])
    estimate[9, :3, :3] = estimate[9, :3, :3] @ about_z(12)
    track = PoseTrack('truth', stamps(41), truth)
    distances, angles = pose_errors(match(stamps(41), estimate, track, 0.01), known)
    assert distances[7] == pytest.approx(0.5) and np.delete(distances, 7).max() < 1e-12
    assert angles[9] == pytest.approx(12) and np.delete(angles, 9).max() < 1e-6


def test_each_pose_is_used_once():
    """The truth has half the rate: every second image has no true pose of its own."""
    track = PoseTrack('truth', stamps(40)[::2], straight(40)[::2])
    matched = match(stamps(40), straight(40), track, tolerance_s=0.2)
    assert len(matched.stamps_ns) == 20
    np.testing.assert_array_equal(matched.T, matched.T_true)
    assert matched.largest_gap_s == 0


@pytest.mark.parametrize('seed', range(20))
def test_the_nearest_pairs_come_first(seed):
    """Images or poses may be the denser ones, also in a part of the recording only."""
    random = np.random.default_rng(seed)
    ours, theirs = (np.unique(random.integers(0, 10**6, random.integers(1, 60))) for _ in 'ab')
    matched = match(ours, straight(len(ours)), PoseTrack('t', theirs, straight(len(theirs))), 1e-4)
    gaps = np.abs(ours[:, None] - theirs[None])
    expected, used = {}, set()
    for i, j in zip(*np.unravel_index(np.argsort(gaps, axis=None), gaps.shape), strict=True):
        if gaps[i, j] <= 10**5 and i not in expected and j not in used:
            expected[i] = j
            used.add(j)
    assert matched.stamps_ns.tolist() == [ours[i] for i in sorted(expected)]
    indices = np.rint(matched.T_true[:, 0, 3] / 0.1).astype(int)
    assert indices.tolist() == [expected[i] for i in sorted(expected)]


def test_dense_truth_over_a_part_does_not_count_an_image_twice():
    track = PoseTrack('mocap', 2 * SECOND + np.arange(90) * SECOND // 100, straight(90))
    matched = match(stamps(100), straight(100), track, 0.02)
    assert matched.stamps_ns.tolist() == stamps(100)[19:28].tolist() + [stamps(100)[28]]
    assert len(set(matched.stamps_ns.tolist())) == len(matched.stamps_ns)


def test_a_tolerance_is_kept_and_the_gap_reported():
    late = stamps(10) + np.array([0, 0, 0, 15, 0, 0, 30, 0, 0, 0]) * 10**6
    matched = match(stamps(10), straight(10), PoseTrack('truth', late, straight(10)), 0.02)
    assert len(matched.stamps_ns) == 9
    assert matched.largest_gap_s == pytest.approx(0.015)


def test_another_time_base_is_one_line_with_both_spans():
    track = PoseTrack('/gt', stamps(10) + 1_700_000_000 * SECOND, straight(10))
    with pytest.raises(MetricsError, match='0.100 to 1.000 s, poses 1700000000.100 to') as raised:
        match(stamps(10), straight(10), track, 0.02)
    assert '\n' not in str(raised.value) and 'another time base' in str(raised.value)


def evo(program, folder, *options):
    """Return the statistics that one of evo's programs finds for the two files of the test."""
    result = folder / 'result.zip'
    result.unlink(missing_ok=True)
    done = subprocess.run(
        [program, 'tum', 'truth.tum', 'estimate.tum', *options, '--save_results', str(result)],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != '_ROS_WHEELS_BOOTSTRAP_COMPLETE'}
        | {'HOME': str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(result) as archive:
        return json.loads(archive.read('stats.json'))


@pytest.mark.skipif(
    not shutil.which('evo_ape'), reason='evo (GPL) is not installed: pip install evo'
)
def test_evo_gives_the_same_figures(tmp_path):
    truth = winding()
    noise = 0.05 * np.random.default_rng(1).standard_normal((len(truth), 3))
    estimate = moved(truth, Alignment(0.4, about_z(70), np.array([1.0, 2, 3])))
    estimate[:, :3, 3] += noise
    estimate[:, :3, :3] = [R @ about_z(i * 0.3) for i, R in enumerate(estimate[:, :3, :3])]
    write_tum(tmp_path / 'truth.tum', stamps(len(truth)).tolist(), truth)
    write_tum(tmp_path / 'estimate.tum', stamps(len(truth)).tolist(), estimate)
    figures, _ = scored(estimate, truth, ScoreOptions(rpe_frames=(1, 10), rpe_metres=(1.0, 5.0)))

    for alignment, options in (('none', []), ('se3', ['-a']), ('sim3', ['-a', '-s'])):
        theirs = evo('evo_ape', tmp_path, *options)
        for name in ('rmse', 'mean', 'median', 'max'):
            assert figures['ate'][alignment][name] == pytest.approx(theirs[name], rel=1e-6)
    for unit, key, steps in (('f', 'frames', ('1', '10')), ('m', 'metres', ('1', '5'))):
        for step in steps:
            ours = figures['rpe']['sim3'][key][step]
            pairs = ['-d', step, '-u', unit, '--all_pairs', '--pairs_from_reference', '-a', '-s']
            for relation, part in (('trans_part', 'translation'), ('angle_deg', 'rotation_deg')):
                theirs = evo('evo_rpe', tmp_path, '-r', relation, '-t', '0.1', *pairs)
                for name in ('rmse', 'mean', 'median', 'max'):
                    assert ours[part][name] == pytest.approx(theirs[name], rel=1e-5)
