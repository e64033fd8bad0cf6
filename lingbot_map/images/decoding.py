"""
From the pixels of an image message to RGB, whoever made the message object.

The encodings are those of sensor_msgs/image_encodings that hold a picture, and nv12. 16-bit values
lose their low byte, as in image files; 8UC3 and 8UC4 are BGR and BGRA, OpenCV's own order; YUV is
BT.601 with the narrow range, which is what V4L2 cameras send.
"""

from functools import partial
import io
import re
import struct
import zlib

import cv2
from lingbot_map.streaming.preprocess import picture_rgb
import numpy as np
from PIL import Image

MAX_SIDE = 16384  # beyond any camera: such a size is a damaged message
_CODES = {  # channels, and how OpenCV calls the way to RGB; None: already there
    'mono': (1, cv2.COLOR_GRAY2RGB),
    'rgb': (3, None),
    'bgr': (3, cv2.COLOR_BGR2RGB),
    'rgba': (4, cv2.COLOR_RGBA2RGB),
    'bgra': (4, cv2.COLOR_BGRA2RGB),
}
_UNNAMED = {'8UC1': 'mono8', '8UC3': 'bgr8', '8UC4': 'bgra8', '16UC1': 'mono16'}
_MOSAICS = {
    'bayer_rggb': cv2.COLOR_BayerRGGB2RGB,
    'bayer_bggr': cv2.COLOR_BayerBGGR2RGB,
    'bayer_gbrg': cv2.COLOR_BayerGBRG2RGB,
    'bayer_grbg': cv2.COLOR_BayerGRBG2RGB,
}
_MOSAIC_BORDER = 2  # even, so that the pattern keeps its phase
_NARROW_BT601 = np.array(  # [Y U V 1] to RGB
    [
        [1.164383, 0.0, 1.596027, -222.921],
        [1.164383, -0.391762, -0.812968, 135.576],
        [1.164383, 2.017232, 0.0, -276.836],
    ]
)
_NUMBERS = re.compile(r'(8|16|32|64)[USF]C?\d*')
_SUPPORTED = (
    'rgb8, bgr8, rgba8, bgra8, mono8, 8UC1, 8UC3, 8UC4, bayer_rggb8 (or another pattern), any of '
    'these with 16 bits, uyvy, yuyv, nv12, nv21 or nv24'
)
_FORMATS = ('JPEG', 'PNG', 'TIFF', 'WEBP')  # what cameras send; Pillow knows stranger ones
DAMAGED_IMAGE = (  # what Pillow lets through from the layers below it
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    OverflowError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


class UnsupportedImage(ValueError):
    """Says in one line what is wrong with an image message; `kind` is the same for its likes."""

    def __init__(self, text: str, kind: str):
        super().__init__(text)
        self.kind = kind


def to_rgb(message) -> np.ndarray:
    """
    Return the pixels (H, W, 3) uint8, contiguous; for unpadded rgb8 a view of the message.

    `message` is a sensor_msgs/Image of rclpy or of rosbags; alpha is dropped. UnsupportedImage:
    encoding, size, step or data length are not those of a picture.
    """
    decode = _DECODERS.get(message.encoding)
    if decode is None:
        raise _refusal(message.encoding)
    check_size(message.width, message.height)
    return decode(message)


def check_size(width: int, height: int) -> None:
    """Raise UnsupportedImage for sizes [px] that no picture has."""
    if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE):
        raise UnsupportedImage(
            f'size {width}x{height} is not that of a picture: both sides must '
            f'be 1 to {MAX_SIDE} pixels',
            'size',
        )


def is_mosaic(encoding: str) -> bool:
    """Tell whether an encoding is a Bayer pattern."""
    return encoding.removesuffix('16').removesuffix('8') in _MOSAICS


def demosaic(mosaic: np.ndarray, encoding: str) -> np.ndarray:
    """Return RGB (H, W, 3) uint8 of a Bayer mosaic (H, W) uint8."""
    # OpenCV cannot see beyond the border: it repeats the colours beside it, and leaves two rows
    # black. Mirrored values continue the pattern.
    b = _MOSAIC_BORDER
    padded = cv2.copyMakeBorder(mosaic, b, b, b, b, cv2.BORDER_REFLECT_101)
    rgb = cv2.cvtColor(padded, _MOSAICS[encoding.removesuffix('16').removesuffix('8')])
    return np.ascontiguousarray(rgb[b:-b, b:-b])


def _refusal(encoding: str) -> UnsupportedImage:
    shown = repr(encoding[:40])
    if _NUMBERS.fullmatch(encoding):
        text = f'encoding {shown} means numbers, such as depth, and not colours'
    else:
        text = f'encoding {shown} is not known'
    return UnsupportedImage(f'{text}: publish {_SUPPORTED}', f'encoding {shown}')


def _interleaved(message, channels: int, value_bytes: int, code: int | None) -> np.ndarray:
    pixels = _values(message, channels, value_bytes)
    if code is None:
        return np.ascontiguousarray(pixels)
    return cv2.cvtColor(pixels, code)


def _mosaic(message, value_bytes: int) -> np.ndarray:
    return demosaic(_values(message, 1, value_bytes)[..., 0], message.encoding)


def _values(message, channels: int, value_bytes: int) -> np.ndarray:
    """Return (H, W, channels) uint8 without the padding of the rows; of 16 bits the high byte."""
    rows = _rows(message, message.width * channels * value_bytes)
    if value_bytes == 2:
        rows = np.ascontiguousarray(rows[:, 0 if message.is_bigendian else 1 :: 2])
    return rows.reshape(message.height, message.width, channels)


def _rows(message, row: int) -> np.ndarray:
    """Return a view (H, row) of the data without the padding at the end of the rows."""
    height, step = message.height, message.step
    if step < row:
        raise _short_step(message, row)
    _check_length(message, step * (height - 1) + row)
    return np.ndarray((height, row), np.uint8, buffer=message.data, strides=(step, 1))


def _short_step(message, row: int) -> UnsupportedImage:
    return UnsupportedImage(
        f'step {message.step} is less than the {row} bytes of a row of {message.width} '
        f'{message.encoding} pixels',
        'step',
    )


def _check_length(message, needed: int) -> None:
    if len(message.data) < needed:
        raise UnsupportedImage(
            f'data has {len(message.data)} bytes, {message.width}x{message.height} '
            f'{message.encoding} with step {message.step} needs {needed}',
            'data length',
        )


def _yuv_pairs(message, code: int) -> np.ndarray:
    """Decode YUV 4:2:2, whose pixels share U and V in pairs."""
    height, width = message.height, message.width
    even = width + width % 2
    full = message.step >= 2 * even and len(message.data) >= message.step * (height - 1) + 2 * even
    pairs = _rows(message, 2 * (even if full else width)).reshape(height, -1, 2)
    if pairs.shape[1] % 2:  # the last pixel lacks its partner, and with it V: take that before
        partner = pairs[:, -2:-1] if width > 1 else np.full_like(pairs, 128)
        pairs = np.concatenate((pairs, partner), axis=1)
    return np.ascontiguousarray(cv2.cvtColor(pairs, code)[:, :width])


def _yuv_quads(message, code: int) -> np.ndarray:
    """Decode YUV 4:2:0 of two planes, where 2x2 pixels share a pair of U and V."""
    height, width = message.height, message.width
    even = width + width % 2
    luma, chroma = _planes(message, even, (height + 1) // 2, 1)
    luma = cv2.copyMakeBorder(luma, 0, height % 2, 0, width % 2, cv2.BORDER_REPLICATE)
    rgb = cv2.cvtColorTwoPlane(luma, chroma.reshape(-1, even // 2, 2), code)
    return np.ascontiguousarray(rgb[:height, :width])


def _yuv_full(message) -> np.ndarray:
    """Decode YUV 4:4:4 of two planes, where each pixel has its own pair of U and V."""
    luma, chroma = _planes(message, 2 * message.width, message.height, 2)
    uv = chroma.reshape(message.height, message.width, 2)
    return cv2.transform(np.concatenate((luma[..., None], uv), axis=2), _NARROW_BT601)


def _planes(message, chroma_row: int, chroma_height: int, ratio: int) -> list[np.ndarray]:
    """
    Return views of luma (H, W) and, below it, chroma (chroma_height, chroma_row).

    `step` is that of luma, `ratio` times it that of chroma. Drivers that write something else into
    it, such as the width times the mean bytes of a pixel, send rows without padding.
    """
    height, width, step = message.height, message.width, message.step
    chroma_step = ratio * step
    needed = step * height + chroma_step * (chroma_height - 1) + chroma_row
    if step < width or chroma_step < chroma_row or len(message.data) < needed:
        step, chroma_step = width, chroma_row
        if len(message.data) != width * height + chroma_row * chroma_height:
            _check_length(message, needed)
            raise _short_step(message, chroma_row // ratio)
    return [
        np.ndarray(shape, np.uint8, message.data, begin, (stride, 1))
        for shape, begin, stride in (
            ((height, width), 0, step),
            ((chroma_height, chroma_row), step * height, chroma_step),
        )
    ]


def _decoders() -> dict:
    """Return for each encoding the function that makes RGB (H, W, 3) of a message."""
    table = {}
    for bits in (8, 16):
        for name, (channels, code) in _CODES.items():
            table[f'{name}{bits}'] = partial(
                _interleaved, channels=channels, value_bytes=bits // 8, code=code
            )
        for name in _MOSAICS:
            table[f'{name}{bits}'] = partial(_mosaic, value_bytes=bits // 8)
    table |= {name: table[meaning] for name, meaning in _UNNAMED.items()}
    for name, code in (('uyvy', cv2.COLOR_YUV2RGB_UYVY), ('yuyv', cv2.COLOR_YUV2RGB_YUYV)):
        table[name] = partial(_yuv_pairs, code=code)
    table |= {'yuv422': table['uyvy'], 'yuv422_yuy2': table['yuyv']}  # their older names
    for name, code in (('nv12', cv2.COLOR_YUV2RGB_NV12), ('nv21', cv2.COLOR_YUV2RGB_NV21)):
        table[name] = partial(_yuv_quads, code=code)
    return table | {'nv24': _yuv_full}


_DECODERS = _decoders()


def compressed_to_rgb(message) -> np.ndarray:
    """
    Return the picture (H, W, 3) uint8, the same as if its data were an image file.

    `message` is a sensor_msgs/CompressedImage of rclpy or of rosbags; a Bayer mosaic that was
    compressed without loss becomes colours. UnsupportedImage: not a picture, or a damaged one.
    """
    encoding, _, codec = (part.strip() for part in message.format.partition(';'))
    shown = repr(message.format[:60])
    if codec.startswith('compressedDepth'):
        raise UnsupportedImage(
            f'format {shown} means depth and not colours: publish jpeg or png', f'format {shown}'
        )
    try:
        with Image.open(io.BytesIO(message.data), formats=_FORMATS) as image:
            check_size(*image.size)
            rgb = picture_rgb(image)
            raw = image.format != 'JPEG' and image.mode in ('L', 'I;16', 'I;16B', 'I')
    except UnsupportedImage:
        raise
    except DAMAGED_IMAGE:
        raise UnsupportedImage(
            f'its {len(message.data)} bytes in format {shown} are not a jpeg or png picture, or '
            'are damaged',
            f'data in format {shown}',
        ) from None
    return demosaic(rgb[..., 0], encoding) if raw and is_mosaic(encoding) else rgb
