"""Masks, rectification and turning together, from the camera's picture to points and back."""

from dataclasses import replace

from lingbot_map.config import MODEL_PRESETS
from lingbot_map.errors import UserError
from lingbot_map.images.camera import camera_of
from lingbot_map.images.mask import load_mask
from lingbot_map.images.view import GREY, rotate_image, ROTATIONS, View
from lingbot_map.mapping.points import PointFilter
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.settings import StreamConfig
from lingbot_map.streaming.engine import StreamEngine
from lingbot_map.streaming.preprocess import resize_pillow
from mapped import mapped
import numpy as np
from PIL import Image as Picture
import pytest
from test_camera_model import distort, DISTORTIONS, info, K, P
from test_turning import result
import torch

W, H = 64, 48
BORDERS = '3,5,7,11'  # left, top, right, bottom


def noise(seed=0, size=(W, H)):
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)


def inside(borders=(3, 5, 7, 11)):
    seen = np.zeros((H, W), bool)
    seen[borders[1] : H - borders[3], borders[0] : W - borders[2]] = True
    return seen


def test_borders_are_left_top_right_bottom():
    np.testing.assert_array_equal(load_mask(BORDERS).valid(W, H), inside())
    np.testing.assert_array_equal(load_mask(' 3, 5 ,7, 11 ').valid(W, H), inside())


def test_black_pixels_of_a_file_are_masked(tmp_path):
    seen = np.random.default_rng(1).random((H, W)) < 0.7
    Picture.fromarray((seen * 255).astype(np.uint8)).save(tmp_path / 'mask.png')
    mask = load_mask(str(tmp_path / 'mask.png'))
    np.testing.assert_array_equal(mask.valid(W, H), seen)
    with pytest.raises(UserError, match='64x48.*32x24'):
        mask.valid(32, 24)


def test_no_mask_is_none():
    assert load_mask('') is None
    assert load_mask(' ') is None


def test_what_is_no_mask_is_said(tmp_path):
    (tmp_path / 'text.png').write_text('no picture')
    Picture.new('L', (4, 4)).save(tmp_path / 'black.png')
    for text, word in (
        ('1,2,3', "'1,2,3'"),
        ('-1,0,0,0', "'-1,0,0,0'"),
        ('/nowhere/mask.png', 'neither'),
        ('~no-such-user/mask.png', 'neither'),
        (str(tmp_path / 'text.png'), 'damaged'),
        (str(tmp_path / 'black.png'), 'whole image'),
    ):
        with pytest.raises(UserError, match=word):
            load_mask(text)
    for borders in ('40,0,24,0', '0,48,0,0', '0,0,0,100'):
        with pytest.raises(UserError, match=borders):
            load_mask(borders).valid(W, H)


def test_nothing_to_do_costs_nothing():
    view, picture, turned = View((W, H)), noise(), result()
    assert view.prepare(picture) is picture
    assert view.restore(turned) is turned


def test_an_overlay_behind_the_mask_never_reaches_the_network():
    """Two frames with the same content and different overlays are the same for the network."""
    view = View((W, H), valid=inside())
    first, second = noise(0), noise(1)
    second[inside()] = first[inside()]
    assert (first != second).any()
    prepared = view.prepare(first)
    np.testing.assert_array_equal(prepared, view.prepare(second))
    np.testing.assert_array_equal(prepared[inside()], first[inside()])
    assert (prepared[~inside()] == GREY).all()
    np.testing.assert_array_equal(first, noise(0))  # the message's own pixels are left alone


def size_of_raw(upright, degrees):
    return upright[::-1] if degrees % 180 else upright


@pytest.mark.parametrize('degrees', ROTATIONS)
def test_no_network_pixel_that_a_masked_pixel_has_a_part_in_becomes_a_point(degrees):
    """The network halves the picture and crops it, so each of its pixels is a block of 2x2."""
    width, height = size_of_raw((56, 84), degrees)
    seen = np.random.default_rng(4).random((height, width)) < 0.95
    view = View((width, height), valid=seen, degrees=degrees)
    assert view.prepare(noise(size=view.size)).shape == (84, 56, 3)
    assert view.upright_size == (56, 84)
    restored = view.restore(result((56, 84), target=28))
    blocks = rotate_image(seen.astype(np.uint8), degrees).reshape(42, 2, 28, 2).all(axis=(1, 3))
    kept = np.isfinite(rotate_image(restored.depth.numpy(), degrees))
    np.testing.assert_array_equal(kept, blocks[7:35])
    assert len(PointFilter()(mapped(restored, restored.T_world_cam))) == kept.sum() > 100


def test_what_the_lens_never_showed_is_masked_too():
    P_wide = P * [[0.5], [0.5], [1.0]] + [[0, 0, 50, 0], [0, 0, 40, 0], [0, 0, 0, 0]]
    view = View((200, 160), camera_of(info(p=P_wide), False))
    prepared = view.prepare(np.full((160, 200, 3), 255, np.uint8))
    assert (prepared[0, 0] == GREY).all()
    assert (prepared[80, 100] == 255).all()
    depth = view.restore(result((200, 160), target=98)).depth
    assert torch.isnan(depth[0, 0])
    assert torch.isfinite(depth[42, 49])


@pytest.mark.parametrize('known', [True, False])
@pytest.mark.parametrize('degrees', ROTATIONS)
def test_known_intrinsics_are_those_of_the_rectified_camera(degrees, known):
    view = View((200, 160), camera_of(info(), False), degrees=degrees, replace_intrinsics=known)
    seen = result(size_of_raw((200, 160), degrees), target=98)
    restored = view.restore(seen)
    if known:
        np.testing.assert_allclose(restored.intrinsics, P[:, :3], atol=1e-9)
    else:
        assert abs(restored.intrinsics[0, 0] - P[0, 0]) > 1
    np.testing.assert_allclose(
        restored.network_intrinsics, restored.mapping.to_network(restored.intrinsics), atol=1e-9
    )


@pytest.mark.parametrize('model', DISTORTIONS)
@pytest.mark.parametrize('degrees', ROTATIONS)
def test_points_project_to_the_raw_pixels_that_they_were_seen_in(degrees, model):
    """The raw picture says where each of its pixels is: red is u, green is v."""
    view = View(
        (200, 160), camera_of(info(model), False), degrees=degrees, replace_intrinsics=True
    )
    v, u = np.indices((160, 200))
    prepared = view.prepare(np.stack((u, v, np.full_like(u, 255)), axis=-1).astype(np.uint8))
    upright = prepared.shape[1::-1]
    seen = result(upright, target=round(upright[0] / 14) * 14)
    seen = replace(seen, rgb=torch.from_numpy(resize_pillow(prepared, seen.mapping).copy()))
    restored = view.restore(seen)
    points = PointFilter()(mapped(restored))  # in the rectified camera's frame
    assert len(points) > 0.5 * restored.depth.numel()
    x, y = distort(model, DISTORTIONS[model], points['x'] / points['z'], points['y'] / points['z'])
    raw_u, raw_v = K[0, 0] * x + K[0, 2], K[1, 1] * y + K[1, 2]
    away = np.hypot((points['rgb'] >> 16) - raw_u, (points['rgb'] >> 8 & 255) - raw_v)
    assert np.median(away) < 1
    assert np.quantile(away, 0.99) < 2


def test_odd_sizes_become_whole_patches_and_intrinsics_follow():
    torch.manual_seed(0)
    model = GCTStream.from_config(MODEL_PRESETS['tiny']).eval()
    engine = StreamEngine(model, StreamConfig(num_scale_frames=1, image_width=56))
    (seen,) = engine.push(noise(size=(641, 479)), 'tag')
    assert seen.depth.shape == (42, 56)
    assert seen.mapping.original_size == (641, 479)
    center = seen.intrinsics[:2, 2]
    assert center == pytest.approx((320.5, 239.5))
    focal = np.diag(seen.intrinsics)[:2] / np.diag(seen.network_intrinsics)[:2]
    assert focal == pytest.approx((641 / 56, 479 / 42))
