"""The motion gate on views whose motion is known [% of the width]."""

from itertools import pairwise

from lingbot_map.streaming.motion_gate import MotionGate, shift, shrink
from moving_view import noisy, panorama, view
import numpy as np
import pytest
import torch

WIDTH, HEIGHT = 168, 126
PICTURE = panorama(height=HEIGHT)
PERCENT = WIDTH / 100  # px
THRESHOLD = 0.5


def at(percent):
    return view(PICTURE, 200 + percent * PERCENT, WIDTH, HEIGHT)


def tensor(rgb):
    return torch.tensor(rgb).permute(2, 0, 1)


def passed(images, threshold=THRESHOLD):
    """Return which images pass one gate, one after the other."""
    gate = MotionGate(threshold)
    return [gate.passes(tensor(rgb)) for rgb in images]


def motion(now, before):
    return shift(shrink(tensor(now)), shrink(tensor(before)))


@pytest.mark.parametrize('percent', [0.6, 1.0, 2.0])
@pytest.mark.parametrize('sign', [1, -1])
def test_motion_is_measured_in_percent_of_the_width(percent, sign):
    assert motion(at(sign * percent), at(0.0)) == pytest.approx(percent, rel=0.25)


@pytest.mark.parametrize(('width', 'height'), [(518, 392), (518, 294), (168, 168), (84, 56)])
def test_it_is_the_same_for_all_sizes_of_the_image(width, height):
    picture = panorama(2 * width, height)
    views = [view(picture, 20 + percent * width / 100, width, height) for percent in (0, 0.2, 2)]
    assert passed(views) == [True, False, True]


def test_a_first_image_passes_and_the_same_again_does_not():
    gate = MotionGate(THRESHOLD)
    image = tensor(at(0.0))
    assert [gate.passes(image) for _ in range(3)] == [True, False, False]
    gate.clear()
    assert [gate.passes(image) for _ in range(2)] == [True, False]


def test_the_noise_of_a_sensor_is_no_motion():
    rng = np.random.default_rng(1)
    assert passed([noisy(at(0.0), 8.0, rng) for _ in range(20)]) == [True] + [False] * 19
    assert all(passed([noisy(at(2.0 * i), 8.0, rng) for i in range(10)]))


@pytest.mark.parametrize(('gain', 'offset'), [(1.3, 0), (0.6, 0), (1.0, 30), (0.8, -15)])
def test_a_step_of_the_brightness_is_no_motion(gain, offset):
    def grey(rgb):
        return 50 + 0.5 * rgb  # far from black and white, where brightness is cut off

    rng = np.random.default_rng(2)
    first, still, moved = (
        noisy(rgb, 4.0, rng)
        for rgb in (grey(at(0.0)), gain * grey(at(0.0)) + offset, gain * grey(at(2.0)) + offset)
    )
    assert passed([first, still, moved]) == [True, False, True]


def test_a_camera_that_creeps_passes_each_time_it_has_come_far_enough():
    creep = [at(0.05 * i) for i in range(101)]  # 5 % in all
    assert all(motion(now, before) < THRESHOLD for before, now in pairwise(creep))
    passes = np.flatnonzero(passed(creep))
    assert 7 <= len(passes) <= 11
    assert np.diff(passes).max() <= 15 and np.diff(passes).min() >= 6


def test_somebody_who_walks_by_is_no_motion_and_hides_none():
    images = []
    for i in range(4):
        rgb = at(2.0 * (i == 3)).copy()
        rgb[20:, 15 * i : 15 * i + 50] = (40, 60, 90)
        images.append(rgb)
    assert passed(images) == [True, False, False, True]


@pytest.mark.parametrize('value', [0, 1])
def test_a_frame_around_the_picture_that_never_moves_hides_no_motion(value):
    frame = value * np.random.default_rng(5).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    images = []
    for step in (0.0, 0.0, 2.0):
        rgb = frame.copy()
        rgb[16:-16, 16:-16] = at(step)[16:-16, 16:-16]
        images.append(rgb)
    assert passed(images) == [True, False, True]


def test_where_there_is_nothing_to_see_there_is_no_motion():
    rng = np.random.default_rng(3)
    wall = np.full((HEIGHT, WIDTH, 3), 128, np.uint8)
    images = [wall, wall // 2, noisy(wall, 4.0, rng), at(0.0), wall]
    assert passed(images) == [True, False, False, True, True]


def test_other_pictures_pass_up_to_the_greatest_threshold_that_can_be_set():
    rng = np.random.default_rng(4)
    noise = [rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8) for _ in range(5)]
    assert all(passed([at(0.0), at(50.0), at(200.0), at(10.0)], 3.0))
    assert all(passed(noise, 3.0))


def test_without_a_threshold_every_image_passes():
    assert all(passed([at(0.0)] * 3, None))
