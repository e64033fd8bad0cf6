"""Turned pictures: the same pixels, rays and points of the world, however the camera lies."""

from fake_engine import straight
from lingbot_map.images.view import (
    camera_rotation,
    rotate_back,
    rotate_image,
    rotated_intrinsics,
    rotated_size,
    ROTATIONS,
)
from lingbot_map.mapping.points import PointFilter
from lingbot_map.streaming.frame import FrameResult
from lingbot_map.streaming.preprocess import crop_map
from mapped import mapped
import numpy as np
import pytest
import torch

K = np.array([[50.0, 0, 21.5], [0, 60.0, 12.25], [0, 0, 1]])
SIZE = (41, 31)  # width, height
ALL = list(ROTATIONS)


def result(size=(641, 479), target=56, seed=0):
    """Return a result with random depth of a picture of `size`."""
    mapping = crop_map(*size, target, 14)
    w, h = mapping.network_size
    g = torch.Generator().manual_seed(seed)
    K_network = np.array([[70.0, 0, w / 2], [0, 72.0, h / 2], [0, 0, 1]])
    return FrameResult(
        'tag', 3, True, straight(2), mapping.to_original(K_network), K_network,
        1 + torch.rand((h, w), generator=g), 1 + torch.rand((h, w), generator=g),
        torch.randint(0, 256, (h, w, 3), generator=g).byte(), mapping, {},
    )  # fmt: skip


@pytest.mark.parametrize('degrees', ALL)
def test_the_picture_turns_clockwise(degrees):
    picture = np.zeros((31, 41, 3), np.uint8)
    picture[0, 20] = 255  # the middle of the top edge
    turned = rotate_image(picture, degrees)
    assert turned.shape[1::-1] == rotated_size(SIZE, degrees)
    ((v, u),) = np.argwhere(turned[..., 0])
    assert (u, v) == {0: (20, 0), 90: (30, 20), 180: (20, 30), 270: (0, 20)}[degrees]


@pytest.mark.parametrize('degrees', ALL)
def test_a_point_is_seen_in_the_same_pixel(degrees):
    for u, v in ((0, 0), (40, 0), (7, 30), (20, 11)):
        picture = np.zeros((31, 41), np.uint8)
        picture[v, u] = 1
        ((turned_v, turned_u),) = np.argwhere(rotate_image(picture, degrees))
        ray = np.linalg.inv(K) @ (u, v, 1)
        seen = rotated_intrinsics(K, degrees, SIZE) @ camera_rotation(degrees) @ ray
        assert seen / seen[2] == pytest.approx((turned_u, turned_v, 1))


@pytest.mark.parametrize('degrees', ALL)
def test_rotations_are_rotations_about_the_optical_axis(degrees):
    R = camera_rotation(degrees)
    assert np.linalg.det(R) == pytest.approx(1)
    np.testing.assert_array_equal(R @ (0, 0, 1), (0, 0, 1))
    angle = np.degrees(np.arctan2(R[1, 0], R[0, 0])) % 360
    assert angle == pytest.approx(degrees)


@pytest.mark.parametrize('degrees', ALL)
def test_turned_back_points_are_where_they_were_in_the_world(degrees):
    turned = result()
    back = rotate_back(turned, degrees)
    choose = PointFilter()
    there, here = (choose(mapped(r, r.T_world_cam)) for r in (turned, back))
    assert len(here) == turned.depth.numel()
    keys = ['rgb', 'confidence']
    there, here = np.sort(there, order=keys), np.sort(here, order=keys)
    np.testing.assert_array_equal(here[keys], there[keys])
    for axis in 'xyz':
        np.testing.assert_allclose(here[axis], there[axis], atol=1e-5)


@pytest.mark.parametrize('degrees', ALL)
def test_turned_back_arrays_lie_like_the_camera_s_picture(degrees):
    turned = result()
    back = rotate_back(turned, degrees)
    for name in ('depth', 'confidence', 'rgb'):
        again = rotate_image(getattr(back, name).numpy(), degrees)
        np.testing.assert_array_equal(again, getattr(turned, name).numpy())
    assert back.depth.is_contiguous()
    assert back.depth.shape == back.mapping.network_size[::-1]
    assert back.mapping.original_size == rotated_size(turned.mapping.original_size, degrees)
    assert (back.tag, back.index, back.is_keyframe) == ('tag', 3, True)


@pytest.mark.parametrize('degrees', ALL)
@pytest.mark.parametrize('size', [(641, 479), (300, 900), (64, 48)])
def test_the_mapping_still_leads_from_network_to_original_pixels(degrees, size):
    turned = result(size)
    back = rotate_back(turned, degrees)
    np.testing.assert_allclose(
        back.mapping.to_original(back.network_intrinsics), back.intrinsics, atol=1e-9
    )
    np.testing.assert_allclose(
        back.mapping.to_network(back.intrinsics), back.network_intrinsics, atol=1e-9
    )
    assert (np.diag(back.intrinsics) > 0).all()
    assert abs(back.intrinsics[0, 1]) + abs(back.intrinsics[1, 0]) < 1e-9
    original_size = rotated_size(size, degrees)
    np.testing.assert_allclose(
        rotated_intrinsics(back.intrinsics, degrees, original_size), turned.intrinsics, atol=1e-9
    )


def test_an_upright_camera_costs_nothing():
    turned = result()
    assert rotate_back(turned, 0) is turned
    picture = np.zeros((4, 5, 3), np.uint8)
    assert rotate_image(picture, 0) is picture
