"""Deviations are what they are called, and none where nothing differs."""

import json
import math

from lingbot_map.benchmark.__main__ import main
from lingbot_map.benchmark.accuracy import accuracy_lines, Deviation, deviation, Track
import numpy as np

SMALL = ['--model', 'tiny', '--weights', 'recipe', '--image-width', '84', '--image-height', '56',
         '--device', 'cpu', '--num-scale-frames', '2', '--sliding-window', '2', '--frames', '6',
         '--accuracy']  # fmt: skip


def deviations(tmp_path, *arguments):
    file = tmp_path / 'accuracy.json'
    assert main([*SMALL, *arguments, '--json', str(file)]) == 0
    return json.loads(file.read_text())['deviations']


def test_a_known_difference_is_found():
    angle = math.radians(3)
    turn = np.array([[math.cos(angle), -math.sin(angle), 0.0],
                     [math.sin(angle), math.cos(angle), 0.0], [0.0, 0.0, 1.0]])  # fmt: skip
    reference = Track(np.tile(np.eye(4), (2, 1, 1)), np.full((2, 4, 5), 2.0, np.float32))
    reference.T_world_cam[:, :3, 3] = 7.0, 8.0, 9.0
    T, depth = reference.T_world_cam.copy(), reference.depth.copy()
    T[1, :3, :3] = turn
    T[1, :3, 3] += 0.03, 0.0, 0.04
    depth[1, :3] *= 1.5  # 12 of 20 pixels
    found = deviation(Track(T, depth), reference)
    np.testing.assert_allclose(found.translation_percent, [0, 2.5], atol=1e-9)
    np.testing.assert_allclose(found.rotation_deg, [0, 3], atol=1e-6)
    np.testing.assert_allclose(found.depth_percent, [0, 50], atol=1e-4)


def test_the_ratio_to_eager_is_that_of_the_medians():
    eager = Deviation(*(np.array([1.0, 2.0, 9.0]),) * 3)
    twice = Deviation(*(np.array([4.0, 0.0, 5.0]),) * 3)
    lines = accuracy_lines({'eager': eager, 'default, sdpa': twice})
    row = next(line for line in lines if line.startswith('default'))
    assert row.split()[2:] == ['4.0000', '5.0000', '2.00'] * 3
    assert lines[-1].split() == ['2', *['9.0000'] * 3, *['5.0000'] * 3]


def test_float32_on_a_cpu_is_the_reference(tmp_path, capsys):
    found = deviations(tmp_path)
    assert list(found) == ['eager', 'auto -> off, sdpa']
    for each in found.values():
        assert set(each) == {'translation_percent', 'rotation_deg', 'depth_percent'}
        assert all(values == [0.0] * 6 for values in each.values())
    assert '      -' in capsys.readouterr().out  # no ratio to nothing


def test_half_precision_deviates_but_little(tmp_path):
    found = deviations(tmp_path, '--dtype', 'bfloat16', '--compare', 'off,auto')
    assert list(found) == ['eager', 'off, sdpa', 'auto -> off, sdpa']
    assert found['eager'] == found['off, sdpa'] == found['auto -> off, sdpa']
    assert 0 < max(found['eager']['rotation_deg']) < 10
    assert 0 < np.median(found['eager']['depth_percent']) < 10


def test_heads_of_half_precision_add_to_it(tmp_path):
    found = deviations(tmp_path, '--heads-dtype', 'bf16')
    assert max(found['eager']['depth_percent']) == 0
    assert max(found['auto -> off, sdpa']['depth_percent']) > 0


def test_the_same_call_gives_the_same_numbers(tmp_path):
    arguments = (tmp_path, '--dtype', 'bfloat16')
    assert deviations(*arguments) == deviations(*arguments)
