"""The drawn map, looked at pixel by pixel."""

import io

from lingbot_map.evaluation.map_picture import render_map
from lingbot_map.mapping.points import POINT_DTYPE
import numpy as np
from PIL import Image
import pytest

FLOOR, CEILING, BOX = (10, 40, 250), (20, 250, 30), (250, 10, 240)
PATH, START, END = (0xFF, 0x9F, 0x1C), (0x2E, 0xC4, 0x6F), (0xFF, 0x4D, 0x5E)
WALK = np.array([[0.0, 0, 0], [1, 0, 0], [2, 1, 0]])


def sheet(colour, z, x=(-2, 4), y=(-2, 2), count=300):
    xs, ys = np.meshgrid(np.linspace(*x, count), np.linspace(*y, count))
    points = np.zeros(count * count, POINT_DTYPE)
    points['x'], points['y'], points['z'] = xs.ravel(), ys.ravel(), z
    points['rgb'] = colour[0] << 16 | colour[1] << 8 | colour[2]
    return points


def drawn(*args, **kwargs):
    picture = Image.open(io.BytesIO(render_map(*args, **kwargs)))
    assert picture.format == 'PNG'
    return np.asarray(picture.convert('RGB')).astype(int)


def where(picture, colour, tolerance=3):
    """Return rows and columns of the pixels of a colour."""
    return np.nonzero((np.abs(picture - colour) <= tolerance).all(axis=2))


def count(picture, colour):
    return len(where(picture, colour, tolerance=40)[0])  # the grid tints some pixels


def test_the_top_view_looks_under_the_ceiling():
    room = np.concatenate((sheet(FLOOR, -1.0), sheet(CEILING, 1.5)))
    picture = drawn(room, WALK)
    assert count(picture, FLOOR) > 20 * count(picture, CEILING) > 0
    assert count(drawn(room, np.empty((0, 3))), CEILING) > 20 * count(picture, CEILING)


def test_left_is_up_and_forward_is_right_in_the_top_view():
    room = np.concatenate((sheet(FLOOR, -1.0), sheet(BOX, -0.5, x=(3, 3.5), y=(1, 1.5))))
    picture = drawn(room, WALK)
    rows, columns = where(picture, BOX, tolerance=40)
    top = rows < np.median(rows) + 50  # the side view shows it again, thinner and lower
    floor_rows, floor_columns = where(picture, FLOOR, tolerance=40)
    assert np.median(columns[top]) > np.median(floor_columns) + 100
    assert np.median(rows[top]) < np.median(floor_rows) - 50


def test_the_nearest_point_hides_the_others():
    stack = np.concatenate([sheet(BOX, -0.5), sheet(FLOOR, -1.0)])  # the lower one comes last
    picture = drawn(stack, WALK)
    assert count(picture, BOX) > 20 * count(picture, FLOOR)


def test_path_start_and_end_are_marked_in_both_views():
    picture = drawn(np.empty(0, POINT_DTYPE), WALK)
    for colour in (PATH, START, END):
        rows, _ = where(picture, colour)
        gaps = np.flatnonzero(np.diff(np.unique(rows)) > 15)
        assert len(gaps) >= 2  # top view, side view and legend lie apart


def test_ground_truth_is_drawn_and_makes_room_for_itself():
    far = WALK + [0, 3, 0]
    without, with_truth = drawn(sheet(FLOOR, -1.0), WALK), drawn(sheet(FLOOR, -1.0), WALK, far)
    assert len(where(with_truth, (0xF4, 0xF6, 0xF8))[0]) > (
        len(where(without, (0xF4, 0xF6, 0xF8))[0]) + 100
    )


def test_stray_points_do_not_shrink_the_map():
    floor = sheet(FLOOR, -1.0)
    stray = floor[:50].copy()
    stray['x'] = 1e6
    picture = drawn(np.concatenate((floor, stray)), WALK)
    assert count(picture, FLOOR) > 0.9 * count(drawn(floor, WALK), FLOOR)


@pytest.mark.parametrize('path', [np.empty((0, 3)), np.zeros((1, 3)), np.zeros((5, 3))])
def test_nothing_and_standing_still_can_be_drawn(path):
    assert drawn(np.empty(0, POINT_DTYPE), path).size > 0
    assert drawn(sheet(FLOOR, -1.0)[:1], path).size > 0


def test_a_long_walk_stays_a_picture_of_sane_size():
    picture = drawn(np.empty(0, POINT_DTYPE), WALK * [1000, 1, 1])
    assert 400 < picture.shape[0] < 2000 and 400 < picture.shape[1] < 2000


@pytest.mark.parametrize('title', ['run_$a_{1$', r'cost $\frac$'])
def test_any_title_can_be_drawn(title):
    assert drawn(sheet(FLOOR, -1.0)[:1], WALK, None, title).size > 0
