"""Rectification, against the distortion formulas written out here."""

from lingbot_map.images.camera import camera_of, CameraInfoError
import numpy as np
import pytest
from sensor_msgs.msg import CameraInfo, RegionOfInterest

W, H = 200, 160
K = np.array([[150.0, 0, 98.0], [0, 155.0, 82.0], [0, 0, 1]])
P = np.array([[130.0, 0, 101.0, 0], [0, 131.0, 77.0, 0], [0, 0, 1, 0]])
EYE = np.eye(3)
DISTORTIONS = {
    'plumb_bob': [-0.28, 0.07, 0.002, -0.001, 0.01],
    'rational_polynomial': [0.4, -0.2, 0.001, -0.002, 0.05, 0.6, -0.1, 0.02],
    'equidistant': [-0.03, 0.01, -0.004, 0.001],
    'fisheye': [-0.03, 0.01, -0.004, 0.001],
}


def info(model='plumb_bob', d=None, k=K, r=EYE, p=P, size=(W, H), **fields):
    d = DISTORTIONS.get(model, []) if d is None else d
    message = CameraInfo(width=size[0], height=size[1], distortion_model=model, d=d, **fields)
    message.k, message.r, message.p = (np.array(m, float).ravel() for m in (k, r, p))
    return message


def distort(model, d, x, y):
    """Return where the lens moves the normalised point (x, y)."""
    r = np.hypot(x, y)
    if model in ('equidistant', 'fisheye'):
        angle = np.arctan(r)
        long = angle * (1 + sum(k * angle ** (2 * i + 2) for i, k in enumerate(d)))
        scale = np.where(r > 0, long / np.maximum(r, 1e-12), 1)
        return x * scale, y * scale
    k1, k2, p1, p2, k3, k4, k5, k6 = [*d, *[0.0] * (8 - len(d))]
    radial = (1 + k1 * r**2 + k2 * r**4 + k3 * r**6) / (1 + k4 * r**2 + k5 * r**4 + k6 * r**6)
    return (
        x * radial + 2 * p1 * x * y + p2 * (r**2 + 2 * x**2),
        y * radial + p1 * (r**2 + 2 * y**2) + 2 * p2 * x * y,
    )


def raw_pixels(model, d, R, K_rectified):
    """Return for each rectified pixel the raw (u, v), both (H, W)."""
    v, u = np.indices((H, W), float)
    rays = np.linalg.inv(K_rectified) @ np.stack((u, v, np.ones_like(u))).reshape(3, -1)
    x, y, z = R.T @ rays
    x, y = distort(model, d, x / z, y / z)
    return (K[0, 0] * x + K[0, 2]).reshape(H, W), (K[1, 1] * y + K[1, 2]).reshape(H, W)


def ruler():
    """Return a picture whose red is u and whose green is v."""
    v, u = np.indices((H, W))
    return np.stack((u, v, np.full_like(u, 200)), axis=-1).astype(np.uint8)


def assert_rectifies(camera, model, d, R, K_rectified):
    rectified = camera.rectify(ruler(), (0, 0, 0)).astype(int)
    u, v = raw_pixels(model, d, R, K_rectified)
    inside = (u > 0) & (v > 0) & (u < W - 1) & (v < H - 1)
    assert inside.mean() > 0.5
    assert np.abs(rectified[..., 0] - u)[inside].max() <= 1
    assert np.abs(rectified[..., 1] - v)[inside].max() <= 1
    outside = (u < -1) | (v < -1) | (u > W) | (v > H)
    assert not rectified[outside].any()


def turned(degrees):
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])


@pytest.mark.parametrize('R', [EYE, turned(4)], ids=['mono', 'stereo'])
@pytest.mark.parametrize('model', DISTORTIONS)
def test_pixels_move_as_the_model_says(model, R):
    camera = camera_of(info(model, r=R), False)
    np.testing.assert_array_equal(camera.K, P[:, :3])
    assert camera.size == (W, H)
    assert_rectifies(camera, model, DISTORTIONS[model], R, P[:, :3])


def test_without_p_and_r_the_rectified_camera_has_k():
    camera = camera_of(info(p=np.zeros((3, 4)), r=np.zeros((3, 3))), False)
    np.testing.assert_array_equal(camera.K, K)
    assert_rectifies(camera, 'plumb_bob', DISTORTIONS['plumb_bob'], EYE, K)


@pytest.mark.parametrize('d', [[], [0.0] * 5])
@pytest.mark.parametrize('model', ['plumb_bob', '', 'of my own'])
def test_without_distortion_pixels_stay(model, d):
    camera = camera_of(info(model, d), False)
    picture = ruler()
    assert camera.rectify(picture, (0, 0, 0)) is picture
    np.testing.assert_array_equal(camera.K, K)


def test_rectified_pictures_are_described_by_p():
    camera = camera_of(info(), True)
    picture = ruler()
    assert camera.rectify(picture, (0, 0, 0)) is picture
    np.testing.assert_array_equal(camera.K, P[:, :3])


def test_binning_and_region_of_interest_move_the_camera():
    roi = RegionOfInterest(x_offset=40, y_offset=20, width=120, height=100)
    camera = camera_of(info('', k=K, binning_x=2, binning_y=2, roi=roi), False)
    assert camera.size == (60, 50)
    point = np.array([0.1, -0.05, 1.0])
    full = K @ point
    np.testing.assert_allclose((camera.K @ point)[:2], (full[:2] - (40, 20)) / 2)


def test_zeros_beyond_the_coefficients_of_a_model_are_ignored():
    d = DISTORTIONS['equidistant']
    camera = camera_of(info('equidistant', [*d, 0.0]), False)
    assert_rectifies(camera, 'equidistant', d, EYE, P[:, :3])


@pytest.mark.parametrize(
    ('message', 'word'),
    [
        (info(k=np.zeros((3, 3))), 'not calibrated'),
        (CameraInfo(width=W, height=H), 'not calibrated'),
        (info('thin_prism', [0.1]), "'thin_prism'"),
        (info('plumb_bob', [0.1, 0.2, 0.3]), '4 or 5'),
        (info('equidistant', [0.1] * 5), '4 coefficients'),
        (info(d=[np.nan] * 5), 'NaN'),
        (info(k=K + np.inf), 'NaN'),
        (info(k=-K), 'focal'),
        (info(p=-P), 'focal'),
        (info(r=2 * EYE), 'R'),
        (info(size=(0, 0)), '0x0'),
        (info(size=(2**31, 5)), f'{2**31}x5'),
        (info(binning_x=1000), '0x160'),
    ],
)
def test_numbers_that_make_no_camera_are_refused(message, word):
    with pytest.raises(CameraInfoError, match=word) as caught:
        camera_of(message, False)
    assert '\n' not in str(caught.value)
