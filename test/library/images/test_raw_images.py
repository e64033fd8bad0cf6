"""Every encoding that holds a picture, against colours computed here; and what is refused."""

from array import array

from image_messages import (
    encode,
    encode_yuv,
    ENCODINGS,
    from_yuv,
    INTERLEAVED,
    MOSAICS,
    PAIRS,
    QUADS,
    raw,
    to_yuv,
    yuv_planes,
)
from lingbot_map.images.decoding import to_rgb, UnsupportedImage
import numpy as np
import pytest
from sensor_msgs.msg import Image

SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 5), (4, 6), (5, 4), (7, 3)]  # H, W
RED = (250, 10, 20)


def noise(height, width, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def flat(color, height, width):
    return np.full((height, width, 3), color, np.uint8)


def is_mono(encoding):
    return 'mono' in encoding or encoding.endswith('C1')


@pytest.mark.parametrize('padding', [0, 1, 7])
@pytest.mark.parametrize('bigendian', [0, 1])
@pytest.mark.parametrize('encoding', INTERLEAVED)
def test_interleaved_values_arrive_exactly(encoding, bigendian, padding):
    for height, width in SIZES:
        rgb = noise(height, width)
        decoded = to_rgb(encode(encoding, rgb, padding, bigendian))
        expected = np.repeat(rgb[..., :1], 3, axis=2) if is_mono(encoding) else rgb
        np.testing.assert_array_equal(decoded, expected)
        assert decoded.dtype == np.uint8
        assert decoded.flags.c_contiguous


@pytest.mark.parametrize('encoding', ['mono16', '16UC1'])
@pytest.mark.parametrize('bigendian', [0, 1])
def test_half_of_the_range_is_mid_grey(encoding, bigendian):
    rows = np.full((4, 3), 0x8000, '>u2' if bigendian else '<u2').view(np.uint8)
    decoded = to_rgb(raw(encoding, rows, 4, 3, bigendian))
    np.testing.assert_array_equal(decoded, np.full((4, 3, 3), 128))


def test_a_step_that_is_no_multiple_of_the_pixel_does_not_skew_rows():
    rgb = noise(9, 3)
    message = encode('rgb8', rgb, padding=1)
    assert message.step == 10
    np.testing.assert_array_equal(to_rgb(message), rgb)


@pytest.mark.parametrize('bigendian', [0, 1])
@pytest.mark.parametrize('encoding', MOSAICS)
def test_a_mosaic_of_one_colour_has_that_colour_up_to_its_border(encoding, bigendian):
    for height, width in SIZES:
        if min(height, width) < 2:
            continue  # too small for a whole tile, some colour is nowhere
        for color in (RED, (3, 200, 7), (5, 6, 240), (90, 100, 110)):
            rgb = flat(color, height, width)
            decoded = to_rgb(encode(encoding, rgb, padding=3, bigendian=bigendian))
            np.testing.assert_array_equal(decoded, rgb)


@pytest.mark.parametrize('encoding', MOSAICS)
def test_a_mosaic_of_slopes_is_within_two_levels(encoding):
    v, u = np.indices((20, 30))
    rgb = np.stack((40 + 5 * u, 200 - 4 * u + 2 * v, 30 + 9 * v), axis=-1).astype(np.uint8)
    decoded = to_rgb(encode(encoding, rgb)).astype(int)
    assert np.abs(decoded - rgb)[1:-1, 1:-1].max() <= 2


def test_a_mosaic_of_a_single_row_is_no_error():
    for shape in ((1, 1), (1, 6), (6, 1)):
        assert to_rgb(encode('bayer_gbrg8', noise(*shape))).shape == (*shape, 3)


@pytest.mark.parametrize('padding', [0, 1, 2, 10])
@pytest.mark.parametrize('encoding', [*PAIRS, *QUADS, 'nv24'])
def test_yuv_of_one_colour_is_within_two_levels(encoding, padding):
    for height, width in SIZES:
        for color in (RED, (3, 200, 7), (5, 6, 240), (90, 100, 110), (255, 255, 255), (0, 0, 0)):
            decoded = to_rgb(encode(encoding, flat(color, height, width), padding))
            assert decoded.shape == (height, width, 3)
            assert decoded.flags.c_contiguous
            assert np.abs(decoded.astype(int) - color).max() <= 2


@pytest.mark.parametrize('encoding', [*PAIRS, *QUADS, 'nv24'])
def test_each_yuv_pixel_has_its_own_light_and_the_colour_of_its_block(encoding):
    rng = np.random.default_rng(5)
    across, down = (2 if encoding != 'nv24' else 1), (2 if encoding in QUADS else 1)
    for height, width in SIZES:
        uv = rng.integers(100, 156, (-(-height // down), -(-width // across), 2))
        uv = uv.repeat(down, axis=0).repeat(across, axis=1)[:height, :width]
        luma = rng.integers(90, 170, (height, width, 1))
        yuv = np.concatenate((luma, uv), axis=2)
        decoded = to_rgb(encode_yuv(encoding, yuv))
        assert np.abs(decoded - from_yuv(yuv)).max() <= 2


@pytest.mark.parametrize('encoding', PAIRS)
def test_an_odd_row_may_end_before_the_second_pixel_of_its_pair(encoding):
    rgb = flat(RED, 4, 5)
    rows = np.frombuffer(encode(encoding, rgb).data, np.uint8).reshape(4, 12)[:, :10]
    decoded = to_rgb(raw(encoding, rows, 4, 5)).astype(int)
    assert np.abs(decoded - rgb).max() <= 2


@pytest.mark.parametrize('encoding', QUADS)
@pytest.mark.parametrize('step', [6, 9, 12])
def test_planes_without_padding_are_read_whatever_step_says(encoding, step):
    rgb = flat(RED, 4, 6)
    message = encode(encoding, rgb)
    message.step = step  # bytes of a row of light, 1.5 bytes a pixel, 2 bytes a pixel
    assert np.abs(to_rgb(message).astype(int) - rgb).max() <= 2


@pytest.mark.parametrize('encoding', QUADS)
def test_odd_planes_may_have_rows_of_their_own_length(encoding):
    rgb = flat(RED, 3, 5)
    luma, chroma = yuv_planes(encoding, to_yuv(rgb))
    tight = np.concatenate((luma[:, :5].ravel(), chroma.ravel()))[None]
    decoded = to_rgb(raw(encoding, tight, 3, 5, step=5)).astype(int)
    assert np.abs(decoded - rgb).max() <= 2


def test_the_last_row_may_lack_its_padding():
    for encoding in ENCODINGS:
        rgb = flat(RED, 4, 6)
        message = encode(encoding, rgb, padding=4)
        whole = to_rgb(message)
        message.data = message.data[:-4]
        np.testing.assert_array_equal(to_rgb(message), whole)


def test_unpadded_rgb_is_not_copied():
    message = encode('rgb8', noise(2, 3))
    rgb = to_rgb(message)
    message.data[0] = 42
    assert rgb[0, 0, 0] == 42


@pytest.mark.parametrize(
    ('encoding', 'words'),
    [
        ('foo8', ["'foo8'", 'not supported', 'rgb8']),
        ('', ["''", 'not supported']),
        ('32FC1', ["'32FC1'", 'numeric data']),
        ('16UC3', ["'16UC3'", 'numeric data']),
        ('8UC2', ["'8UC2'", 'numeric data']),
        ('64FC3', ["'64FC3'", 'numeric data']),
        ('8SC1', ["'8SC1'", 'numeric data']),
        ('16SC1', ["'16SC1'"]),
        ('8UC', ["'8UC'"]),
        ('RGB8', ["'RGB8'"]),
        ('rgb8\nx' * 100, ['not supported']),
    ],
)
def test_what_is_no_picture_is_refused_by_name(encoding, words):
    with pytest.raises(UnsupportedImage) as caught:
        to_rgb(raw(encoding, noise(4, 32, 1)[..., 0], 4, 4))
    text = str(caught.value)
    assert '\n' not in text
    assert len(text) < 300
    assert all(word in text for word in words)
    assert caught.value.kind == f'encoding {encoding[:40]!r}'


@pytest.mark.parametrize(
    ('change', 'kind', 'words'),
    [
        ({'height': 0}, 'size', ['3x0']),
        ({'width': 0}, 'size', ['0x2']),
        ({'width': 2**31}, 'size', [f'{2**31}x2']),
        ({'height': 2**32 - 1}, 'size', [f'3x{2**32 - 1}']),
        ({'step': 8}, 'step', ['step 8', '9 bytes']),
        ({'step': 0}, 'step', ['step 0']),
        ({'data': array('B', [0] * 17)}, 'data length', ['17 bytes', 'needs 18']),
        ({'data': array('B')}, 'data length', ['0 bytes']),
        ({'step': 2**32 - 1}, 'data length', ['18 bytes']),
    ],
)
def test_a_malformed_image_is_refused_with_the_value(change, kind, words):
    message = encode('rgb8', noise(2, 3))
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(UnsupportedImage) as caught:
        to_rgb(message)
    assert caught.value.kind == kind
    assert '\n' not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


def test_no_malformed_message_raises_anything_else():
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(3000):
        height, width = (int(rng.integers(0, 9)) for _ in range(2))
        data = array('B', rng.bytes(int(rng.integers(0, 400))))
        message = Image(
            height=height,
            width=width,
            encoding=str(rng.choice(ENCODINGS)),
            step=int(rng.choice([0, 1, width, 2 * width, 3 * width, 40, 2**32 - 1])),
            is_bigendian=int(rng.integers(0, 256)),
        )
        message.data = data
        try:
            rgb = to_rgb(message)
        except UnsupportedImage:
            refused += 1
        else:
            assert (rgb.shape, rgb.dtype) == ((height, width, 3), np.uint8)
    assert 500 < refused < 2500
