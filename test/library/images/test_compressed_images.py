"""Compressed images: the same pixels as a file and as a raw topic, or one reason."""

from array import array
import io

import cv2
from image_messages import compressed, encode, png
from lingbot_map.images.decoding import compressed_to_rgb, to_rgb, UnsupportedImage
from lingbot_map.streaming.preprocess import open_rgb
import numpy as np
from PIL import Image as Picture
import pytest
from sensor_msgs.msg import CompressedImage


def noise(height=42, width=57, channels=3):
    shape = (height, width, channels)
    return np.random.default_rng(3).integers(0, 256, shape, np.uint8)


def smooth():
    v, u = np.indices((48, 64))
    return np.stack((4 * u, 255 - 5 * v, 2 * u + v), axis=-1).astype(np.uint8)


def stored(encoding, rgb):
    """Return what compressed_image_transport puts into a png of a raw image, as OpenCV has it."""
    pixels = rgb[..., 0] if encoding.startswith('mono') else rgb[..., ::-1]
    if encoding.endswith('16'):
        return pixels.astype(np.uint16) * 256 + 0x5A
    return pixels


@pytest.mark.parametrize('encoding', ['rgb8', 'bgr8', 'mono8', 'rgb16', 'bgr16', 'mono16'])
def test_file_raw_topic_and_png_topic_have_identical_pixels(encoding, tmp_path):
    rgb = noise()
    from_raw = to_rgb(encode(encoding, rgb, padding=3))
    message = compressed(stored(encoding, rgb), '.png', f'{encoding}; png compressed bgr8')
    (tmp_path / 'picture.png').write_bytes(message.data)
    np.testing.assert_array_equal(open_rgb(tmp_path / 'picture.png'), from_raw)
    np.testing.assert_array_equal(compressed_to_rgb(message), from_raw)


@pytest.mark.parametrize('format', ['png', '', 'rgb8; png compressed bgr8', 'jpeg', 'nonsense'])
def test_the_data_decide_and_not_the_name_of_the_format(format):
    np.testing.assert_array_equal(compressed_to_rgb(png(noise(), format)), noise())


def test_a_jpeg_topic_has_the_pixels_of_a_jpeg_file(tmp_path):
    message = compressed(smooth()[..., ::-1], '.jpg', 'rgb8; jpeg compressed bgr8')
    (tmp_path / 'picture.jpg').write_bytes(message.data)
    decoded = compressed_to_rgb(message)
    np.testing.assert_array_equal(decoded, open_rgb(tmp_path / 'picture.jpg'))
    assert np.abs(decoded.astype(int) - smooth()).mean() < 3


def test_a_grey_jpeg_becomes_three_equal_channels():
    decoded = compressed_to_rgb(compressed(smooth()[..., 0], '.jpg', 'mono8; jpeg compressed '))
    assert decoded.shape == (48, 64, 3)
    np.testing.assert_array_equal(decoded[..., 0], decoded[..., 2])


@pytest.mark.parametrize('encoding', ['bayer_rggb8', 'bayer_gbrg16'])
def test_a_mosaic_in_a_png_becomes_the_colours_of_the_raw_topic(encoding):
    raw = encode(encoding, smooth())
    dtype = '<u2' if encoding.endswith('16') else 'u1'
    mosaic = np.frombuffer(raw.data, dtype).reshape(48, 64)
    message = compressed(mosaic, '.png', f'{encoding}; png compressed ')
    np.testing.assert_array_equal(compressed_to_rgb(message), to_rgb(raw))


def test_a_jpeg_of_a_bayer_camera_is_grey_already():
    grey = smooth()[..., 0]
    message = compressed(grey, '.jpg', 'bayer_rggb8; jpeg compressed mono8')
    decoded = compressed_to_rgb(message)
    np.testing.assert_array_equal(decoded[..., 0], decoded[..., 1])


@pytest.mark.parametrize('suffix', ['.tiff', '.webp'])
def test_other_codecs_that_cameras_use(suffix):
    decoded = compressed_to_rgb(compressed(smooth()[..., ::-1], suffix, suffix[1:]))
    assert np.abs(decoded.astype(int) - smooth()).mean() < 3


def gif():
    data = io.BytesIO()
    Picture.fromarray(noise()).save(data, 'GIF')
    return data.getvalue()


@pytest.mark.parametrize(
    ('format', 'data', 'words'),
    [
        ('16UC1; compressedDepth png', png(noise()).data, ['depth', 'jpeg or png']),
        ('32FC1; compressedDepth', b'\0' * 30, ['depth']),
        ('h264', b'\0\0\0\1\x67' * 20, ["'h264'", '100 bytes']),
        ('jpeg', b'', ['0 bytes']),
        ('jpeg', b'\xff\xd8\xff', ['damaged']),
        ('png', png(noise()).data[:2000], ['damaged']),
        ('jpeg', compressed(noise(), '.jpg', '').data[:2000], ['damaged']),
        ('gif', gif(), ["'gif'"]),
        ('x\ny' * 300, b'123', ['damaged']),
    ],
)
def test_what_is_no_picture_is_refused_with_the_format(format, data, words):
    with pytest.raises(UnsupportedImage) as caught:
        compressed_to_rgb(CompressedImage(format=format, data=array('B', data)))
    text = str(caught.value)
    assert '\n' not in text
    assert len(text) < 300
    assert all(word in text for word in words)
    assert repr(format[:60]) in caught.value.kind


def test_an_absurd_size_is_refused_before_it_is_decoded():
    message = png(np.zeros((1, 16385, 3), np.uint8))
    with pytest.raises(UnsupportedImage, match='16385x1'):
        compressed_to_rgb(message)


@pytest.mark.parametrize('suffix', ['.jpg', '.png', '.tiff'])
def test_no_damage_raises_anything_else(suffix):
    rng = np.random.default_rng(2)
    whole = np.frombuffer(compressed(smooth(), suffix, '').data, np.uint8)
    refused = 0
    for _ in range(150):
        data = whole[: rng.integers(1, len(whole))] if rng.random() < 0.3 else whole.copy()
        where = rng.integers(0, min(len(data), 700), 4)
        data = data.copy()
        data[where] = rng.integers(0, 256, 4)
        try:
            rgb = compressed_to_rgb(CompressedImage(data=array('B', data.tobytes())))
        except UnsupportedImage:
            refused += 1
        else:
            assert rgb.dtype == np.uint8
            assert rgb.ndim == 3
    assert refused > 20


def test_an_exif_orientation_is_applied_as_for_files(tmp_path):
    exif = Picture.Exif()
    exif[0x0112] = 6
    Picture.fromarray(smooth()).save(tmp_path / 'turned.jpg', exif=exif)
    data = (tmp_path / 'turned.jpg').read_bytes()
    decoded = compressed_to_rgb(CompressedImage(format='jpeg', data=array('B', data)))
    assert decoded.shape == (64, 48, 3)
    np.testing.assert_array_equal(decoded, open_rgb(tmp_path / 'turned.jpg'))


def test_cv2_and_pillow_agree_on_a_png():
    message = png(noise())
    decoded = cv2.imdecode(np.frombuffer(message.data, np.uint8), cv2.IMREAD_COLOR)
    np.testing.assert_array_equal(compressed_to_rgb(message), decoded[..., ::-1])
