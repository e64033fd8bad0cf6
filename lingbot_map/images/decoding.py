"""
Decode raw and compressed image messages of rclpy or rosbags to RGB.

Supports the colour and grey encodings of sensor_msgs/image_encodings, and nv12. 16-bit values lose
their low byte, as in image files; 8UC3 and 8UC4 are BGR and BGRA, as in OpenCV; YUV is BT.601 with
narrow range, as V4L2 cameras send it. Compressed images are JPEG, PNG, TIFF or WebP.
"""

from functools import partial
import io
import re
import struct
import zlib

import cv2
from lingbot_map.errors import UserError
from lingbot_map.streaming.preprocess import picture_rgb
import numpy as np
from PIL import Image

MAX_SIDE = 16384  # [px]; larger than any camera, so the message is damaged
_CODES = {  # channels, OpenCV conversion code to RGB (None: is RGB)
    'mono': (1, cv2.COLOR_GRAY2RGB),
    'rgb': (3, None),
    'bgr': (3, cv2.COLOR_BGR2RGB),
    'rgba': (4, cv2.COLOR_RGBA2RGB),
    'bgra': (4, cv2.COLOR_BGRA2RGB),
}
_ALIASES = {'8UC1': 'mono8', '8UC3': 'bgr8', '8UC4': 'bgra8', '16UC1': 'mono16'}
_MOSAICS = {
    'bayer_rggb': cv2.COLOR_BayerRGGB2RGB,
    'bayer_bggr': cv2.COLOR_BayerBGGR2RGB,
    'bayer_gbrg': cv2.COLOR_BayerGBRG2RGB,
    'bayer_grbg': cv2.COLOR_BayerGRBG2RGB,
}
_MOSAIC_BORDER = 2  # [px]; even, to keep the phase of the pattern
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
_FORMATS = ('JPEG', 'PNG', 'TIFF', 'WEBP')  # of compressed images; Pillow supports more
DAMAGED_IMAGE = (  # what Pillow raises for damaged files
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


class UnsupportedImage(UserError):
    """An image message cannot be decoded; `kind` is equal for errors of the same cause."""

    def __init__(self, text: str, kind: str):
        super().__init__(text)
        self.kind = kind


def to_rgb(message) -> np.ndarray:
    """
    Decode a sensor_msgs/Image to contiguous RGB (H, W, 3) uint8, without alpha.

    For unpadded rgb8 the result is a view of the message. Raises UnsupportedImage if encoding,
    size, step or data length is invalid.
    """
    decode = _DECODERS.get(message.encoding)
    if decode is None:
        raise _refusal(message.encoding)
    check_size(message.width, message.height)
    return decode(message)


def compressed_to_rgb(message) -> np.ndarray:
    """
    Decode a sensor_msgs/CompressedImage to RGB (H, W, 3) uint8, as if it were an image file.

    A Bayer mosaic with lossless compression is converted to colour. Raises UnsupportedImage if the
    data is damaged or not an image.
    """
    encoding, _, codec = (part.strip() for part in message.format.partition(';'))
    shown = repr(message.format[:60])
    if codec.startswith('compressedDepth'):
        raise UnsupportedImage(
            f'format {shown} is depth, not colour: publish jpeg or png', f'format {shown}'
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
            f'its {len(message.data)} bytes in format {shown} are damaged or not a jpeg or png '
            'image',
            f'data in format {shown}',
        ) from None
    return demosaic(rgb[..., 0], encoding) if raw and is_mosaic(encoding) else rgb


def check_size(width: int, height: int) -> None:
    """Raise UnsupportedImage for an invalid image size [px]."""
    if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE):
        raise UnsupportedImage(
            f'image size {width}x{height} is invalid: both sides must be 1 to {MAX_SIDE} pixels',
            'size',
        )


def is_mosaic(encoding: str) -> bool:
    """Return whether an encoding is a Bayer pattern."""
    return encoding.removesuffix('16').removesuffix('8') in _MOSAICS


def demosaic(mosaic: np.ndarray, encoding: str) -> np.ndarray:
    """Convert a Bayer mosaic (H, W) uint8 to RGB (H, W, 3) uint8."""
    # At the border OpenCV repeats the colours beside it and leaves two rows black. Mirrored
    # padding continues the pattern there.
    b = _MOSAIC_BORDER
    padded = cv2.copyMakeBorder(mosaic, b, b, b, b, cv2.BORDER_REFLECT_101)
    rgb = cv2.cvtColor(padded, _MOSAICS[encoding.removesuffix('16').removesuffix('8')])
    return np.ascontiguousarray(rgb[b:-b, b:-b])


def _refusal(encoding: str) -> UnsupportedImage:
    shown = repr(encoding[:40])
    if _NUMBERS.fullmatch(encoding):
        text = f'encoding {shown} is numeric data such as depth, not colour'
    else:
        text = f'encoding {shown} is not supported'
    return UnsupportedImage(f'{text}: publish {_SUPPORTED}', f'encoding {shown}')


def _interleaved(message, channels: int, value_bytes: int, code: int | None) -> np.ndarray:
    pixels = _values(message, channels, value_bytes)
    if code is None:
        return np.ascontiguousarray(pixels)
    return cv2.cvtColor(pixels, code)


def _mosaic(message, value_bytes: int) -> np.ndarray:
    return demosaic(_values(message, 1, value_bytes)[..., 0], message.encoding)


def _values(message, channels: int, value_bytes: int) -> np.ndarray:
    """Return (H, W, channels) uint8 without row padding; the high byte of 16-bit values."""
    rows = _rows(message, message.width * channels * value_bytes)
    if value_bytes == 2:
        rows = np.ascontiguousarray(rows[:, 0 if message.is_bigendian else 1 :: 2])
    return rows.reshape(message.height, message.width, channels)


def _rows(message, row: int) -> np.ndarray:
    """Return a view (H, row) of the data without row padding; `row` is in bytes."""
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
    """Decode YUV 4:2:2, where two pixels in a row share U and V."""
    height, width = message.height, message.width
    even = width + width % 2
    full = message.step >= 2 * even and len(message.data) >= message.step * (height - 1) + 2 * even
    pairs = _rows(message, 2 * (even if full else width)).reshape(height, -1, 2)
    if pairs.shape[1] % 2:  # the last pixel has no partner, so no V: use that of the previous pair
        partner = pairs[:, -2:-1] if width > 1 else np.full_like(pairs, 128)
        pairs = np.concatenate((pairs, partner), axis=1)
    return np.ascontiguousarray(cv2.cvtColor(pairs, code)[:, :width])


def _yuv_quads(message, code: int) -> np.ndarray:
    """Decode two-plane YUV 4:2:0, where 2x2 pixels share U and V."""
    height, width = message.height, message.width
    even = width + width % 2
    luma, chroma = _planes(message, even, (height + 1) // 2, 1)
    luma = cv2.copyMakeBorder(luma, 0, height % 2, 0, width % 2, cv2.BORDER_REPLICATE)
    rgb = cv2.cvtColorTwoPlane(luma, chroma.reshape(-1, even // 2, 2), code)
    return np.ascontiguousarray(rgb[:height, :width])


def _yuv_full(message) -> np.ndarray:
    """Decode two-plane YUV 4:4:4, where each pixel has its own U and V."""
    luma, chroma = _planes(message, 2 * message.width, message.height, 2)
    uv = chroma.reshape(message.height, message.width, 2)
    return cv2.transform(np.concatenate((luma[..., None], uv), axis=2), _NARROW_BT601)


def _planes(message, chroma_row: int, chroma_height: int, ratio: int) -> list[np.ndarray]:
    """
    Return views of luma (H, W) and of chroma (chroma_height, chroma_row), which follows it.

    The step of luma is `message.step`, that of chroma `ratio` times as much. Some drivers set step
    to another value, such as the width times the mean bytes per pixel; their rows have no padding.
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
    """Return {encoding: function that decodes a message to RGB (H, W, 3)}."""
    table = {}
    for bits in (8, 16):
        for name, (channels, code) in _CODES.items():
            table[f'{name}{bits}'] = partial(
                _interleaved, channels=channels, value_bytes=bits // 8, code=code
            )
        for name in _MOSAICS:
            table[f'{name}{bits}'] = partial(_mosaic, value_bytes=bits // 8)
    table |= {name: table[meaning] for name, meaning in _ALIASES.items()}
    for name, code in (('uyvy', cv2.COLOR_YUV2RGB_UYVY), ('yuyv', cv2.COLOR_YUV2RGB_YUYV)):
        table[name] = partial(_yuv_pairs, code=code)
    table |= {'yuv422': table['uyvy'], 'yuv422_yuy2': table['yuyv']}  # older names
    for name, code in (('nv12', cv2.COLOR_YUV2RGB_NV12), ('nv21', cv2.COLOR_YUV2RGB_NV21)):
        table[name] = partial(_yuv_quads, code=code)
    return table | {'nv24': _yuv_full}


_DECODERS = _decoders()
