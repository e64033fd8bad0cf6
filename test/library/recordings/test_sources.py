"""Folders and videos made here, read back; and what is said about bad ones."""

import os

import cv2
from lingbot_map.recordings.open import open_source
from lingbot_map.recordings.source import SourceError
import numpy as np
from PIL import Image
import pytest


def picture(seed=0, height=6, width=8):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write_pictures(folder, names):
    folder.mkdir(exist_ok=True)
    for seed, name in enumerate(names):
        Image.fromarray(picture(seed)).save(folder / name)


def write_video(path, frames=30, rate=30.0):
    # OpenCV's own encoder: FFmpeg would fix its log level before the code under test can
    writer = cv2.VideoWriter(
        str(path), cv2.CAP_OPENCV_MJPEG, cv2.VideoWriter_fourcc(*'MJPG'), rate, (64, 48)
    )
    assert writer.isOpened()
    for i in range(frames):
        writer.write(np.full((48, 64, 3), (8 * i, 100, 50), np.uint8))  # blue grows
    writer.release()


def test_folder_yields_exact_pixels_in_natural_order(tmp_path):
    write_pictures(tmp_path, ['10.png', '9.png', 'a.png', '1.png'])
    (tmp_path / 'notes.txt').write_text('not a picture, not looked at')
    source = open_source(tmp_path)
    stamps, images = zip(*source, strict=True)
    assert len(source) == 4
    assert stamps == (100_000_000, 200_000_000, 300_000_000, 400_000_000)  # 10 Hz
    for image, seed in zip(images, (3, 1, 0, 2), strict=True):
        np.testing.assert_array_equal(image, picture(seed))
        assert image.dtype == np.uint8


def test_fps_sets_the_stamps_of_a_folder(tmp_path):
    write_pictures(tmp_path, ['0.png', '1.png', '2.png'])
    assert [stamp for stamp, _ in open_source(tmp_path, fps=30)] == [
        33_333_333,
        66_666_667,
        100_000_000,
    ]


def test_a_source_can_be_read_twice(tmp_path):
    write_pictures(tmp_path, ['0.png', '1.png'])
    source = open_source(tmp_path)
    assert [stamp for stamp, _ in source] == [stamp for stamp, _ in source]


def test_a_single_picture_is_a_source(tmp_path):
    write_pictures(tmp_path, ['0.PNG'])
    ((_, image),) = open_source(tmp_path / '0.PNG')
    np.testing.assert_array_equal(image, picture(0))


def test_exif_orientation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it rotated a quarter clockwise
    Image.fromarray(picture()).save(tmp_path / 'a.png', exif=exif)
    ((_, image),) = open_source(tmp_path)
    np.testing.assert_array_equal(image, np.rot90(picture(), k=-1))


def test_a_folder_of_png_is_opened_without_decoding_it(tmp_path, monkeypatch):
    tag = Image.Exif()
    tag[0x0112] = 6
    Image.new('RGB', (8, 4)).save(tmp_path / '0.png', exif=tag)
    Image.new('RGB', (4, 8)).save(tmp_path / '1.png')
    monkeypatch.setattr('PIL.PngImagePlugin.PngImageFile.load', None)
    assert len(open_source(tmp_path)) == 2


def test_rgba_is_composited_over_white(tmp_path):
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[0, 0] = 10, 20, 30, 255
    rgba[0, 1] = 0, 0, 0, 51  # a fifth opaque black
    Image.fromarray(rgba).save(tmp_path / 'a.png')
    ((_, image),) = open_source(tmp_path)
    np.testing.assert_array_equal(image, [[[10, 20, 30], [204] * 3], [[255] * 3, [255] * 3]])


def test_sixteen_bit_grey_keeps_its_steps(tmp_path):
    Image.fromarray(np.array([[0x8000, 0x00FF, 0xFFFF]], np.uint16)).save(tmp_path / 'a.png')
    ((_, image),) = open_source(tmp_path)
    np.testing.assert_array_equal(image[0, :, 0], [128, 0, 255])


def test_video_yields_rgb_frames_with_its_rate(tmp_path):
    write_video(tmp_path / 'a.avi')
    source = open_source(tmp_path / 'a.avi')
    frames = list(source)
    assert len(source) == len(frames) == 30
    assert frames[0][0] == 33_333_333 and frames[29][0] == 1_000_000_000
    red, green, blue = frames[20][1].reshape(-1, 3).mean(axis=0)
    assert (red, green, blue) == pytest.approx((50, 100, 160), abs=6)


def test_fps_takes_every_nth_frame_of_a_video(tmp_path):
    write_video(tmp_path / 'a.avi')
    source = open_source(tmp_path / 'a.avi', fps=9)  # every round(30 / 9) = 3rd
    blues = [image[..., 2].mean() for _, image in source]
    assert len(source) == 10
    assert blues == pytest.approx([24 * i for i in range(10)], abs=6)


@pytest.fixture
def bad_inputs(tmp_path):
    """Return name -> (path, what the message must name)."""
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'text').mkdir()
    (tmp_path / 'text' / 'a.jpg').write_text('not a picture')
    write_pictures(tmp_path / 'cut', ['0.png', '1.png'])
    data = (tmp_path / 'cut' / '1.png').read_bytes()
    (tmp_path / 'cut' / '1.png').write_bytes(data[: len(data) // 2])
    write_pictures(tmp_path / 'sizes', ['0.png'])
    Image.fromarray(picture(height=7)).save(tmp_path / 'sizes' / '1.png')
    (tmp_path / 'a.txt').write_text('not a readable video')
    write_video(tmp_path / 'whole.avi')
    data = (tmp_path / 'whole.avi').read_bytes()
    (tmp_path / 'cut.avi').write_bytes(data[: len(data) // 2])
    return {
        'missing': (tmp_path / 'nowhere', 'nowhere.*does not exist'),
        'empty': (tmp_path / 'empty', 'empty.*no images'),
        'text': (tmp_path / 'text', 'a.jpg.*not an image'),
        'cut': (tmp_path / 'cut', '1.png.*damaged'),
        'sizes': (tmp_path / 'sizes', '1.png.*8x7.*0.png.*8x6.*one size'),
        'no video': (tmp_path / 'a.txt', 'a.txt.*not a readable video'),
        'cut video': (tmp_path / 'cut.avi', r'cut.avi.*\d+ of its 30 frames'),
    }


@pytest.mark.parametrize(
    'name', ['missing', 'empty', 'text', 'cut', 'sizes', 'no video', 'cut video']
)
def test_bad_input_is_one_line_with_its_name(bad_inputs, name, capfd):
    path, words = bad_inputs[name]
    with pytest.raises(SourceError, match=words) as raised:
        list(open_source(path))
    assert '\n' not in str(raised.value)
    assert capfd.readouterr().err == ''  # no words of FFmpeg or OpenCV beside ours


@pytest.mark.parametrize('fps', [-1.0, float('nan'), float('inf'), 1e-12, 1e12])
def test_an_impossible_fps_is_named(tmp_path, fps):
    write_pictures(tmp_path, ['0.png'])
    with pytest.raises(SourceError, match=f'fps is {fps}'):
        open_source(tmp_path, fps=fps)


def test_a_name_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / os.fsdecode(b'caf\xe9')
    path.mkdir()
    write_pictures(path, ['0.png'])
    with pytest.raises(SourceError, match=r"caf\\xe9' is not UTF-8: rename it"):
        open_source(path)


def test_a_topic_without_a_bag_is_refused(tmp_path):
    write_pictures(tmp_path, ['0.png'])
    with pytest.raises(SourceError, match="not a bag.*'/image'"):
        open_source(tmp_path, image_topic='/image')
