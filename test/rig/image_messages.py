"""Image messages with known colours, made without the decoder's tools; sizes are (H, W)."""

from array import array

import cv2
import numpy as np
from sensor_msgs.msg import CompressedImage, Image

_ORDERS = {'rgb': 'rgb', 'bgr': 'bgr', 'rgba': 'rgba', 'bgra': 'bgra', 'mono': 'r'}
_UNNAMED = {'8UC1': 'mono8', '8UC3': 'bgr8', '8UC4': 'bgra8', '16UC1': 'mono16'}
INTERLEAVED = [f'{name}{bits}' for name in _ORDERS for bits in (8, 16)] + list(_UNNAMED)
MOSAICS = [f'bayer_{p}{bits}' for p in ('rggb', 'bggr', 'gbrg', 'grbg') for bits in (8, 16)]
PAIRS = ['uyvy', 'yuv422', 'yuyv', 'yuv422_yuy2']
QUADS = ['nv12', 'nv21']
ENCODINGS = [*INTERLEAVED, *MOSAICS, *PAIRS, *QUADS, 'nv24']


def raw(encoding, rows, height, width, bigendian=0, step=None):
    """Return an Image of rows (N, bytes); `step` where it is not their length."""
    message = Image(
        height=height,
        width=width,
        encoding=encoding,
        is_bigendian=bigendian,
        step=rows.shape[1] if step is None else step,
    )
    message.data = array('B', rows.tobytes())
    return message


def encode(encoding, rgb, padding=0, bigendian=0):
    """Return RGB (H, W, 3) uint8 as a message; mono encodings take red."""
    if encoding not in INTERLEAVED and encoding not in MOSAICS:
        return encode_yuv(encoding, to_yuv(rgb), padding)
    height, width = rgb.shape[:2]
    values = _mosaic(encoding, rgb) if encoding in MOSAICS else _interleaved(encoding, rgb)
    rows = _values_as_bytes(values, encoding, bigendian).reshape(height, -1)
    return raw(encoding, _padded(rows, padding), height, width, bigendian)


def encode_yuv(encoding, yuv, padding=0):
    """Return values (H, W, 3) as a message; U and V that pixels share are the first's."""
    luma, *chroma = yuv_planes(encoding, yuv)
    chroma = [_padded(plane, 2 * padding if encoding == 'nv24' else padding) for plane in chroma]
    luma = _padded(luma, padding)
    data = np.concatenate([plane.ravel() for plane in (luma, *chroma)])[None]
    return raw(encoding, data, *yuv.shape[:2], step=luma.shape[1])


def _padded(rows, padding):
    return np.pad(rows, ((0, 0), (0, padding)), constant_values=99)


def png(rgb, format='rgb8; png compressed bgr8'):
    return compressed(rgb[..., ::-1], '.png', format)


def compressed(bgr, suffix, format):
    ok, data = cv2.imencode(suffix, bgr)
    assert ok
    return CompressedImage(format=format, data=array('B', data.tobytes()))


def to_yuv(rgb):
    """Return BT.601 values (H, W, 3) float of the narrow range: Y 16..235, U and V 16..240."""
    r, g, b = np.moveaxis(rgb.astype(float) / 255, -1, 0)
    luma = 0.299 * r + 0.587 * g + 0.114 * b
    return np.stack(
        (16 + 219 * luma, 128 + 224 * (b - luma) / 1.772, 128 + 224 * (r - luma) / 1.402), axis=-1
    )


def from_yuv(yuv):
    """Return RGB (H, W, 3) float of the values that `to_yuv` gives."""
    luma, u, v = np.moveaxis(np.asarray(yuv, float), -1, 0)
    luma, u, v = (luma - 16) / 219, (u - 128) / 224 * 1.772, (v - 128) / 224 * 1.402
    r, b = luma + v, luma + u
    g = (luma - 0.299 * r - 0.114 * b) / 0.587
    return 255 * np.stack((r, g, b), axis=-1)


def yuv_planes(encoding, yuv):
    """Return the planes, each as rows (N, bytes) without padding, of values (H, W, 3)."""
    height, width = yuv.shape[:2]
    wide = np.rint(np.pad(yuv, ((0, height % 2), (0, width % 2), (0, 0)), mode='edge'))
    wide = wide.astype(np.uint8)
    luma, uv = wide[:height, :, 0], wide[..., 1:]
    if encoding in PAIRS:
        shared = uv[:height, ::2].reshape(height, -1)
        order = (shared, luma) if encoding in ('uyvy', 'yuv422') else (luma, shared)
        return [np.stack(order, axis=-1).reshape(height, -1)]
    if encoding == 'nv24':
        return [luma[:, :width], uv[:height, :width].reshape(height, -1)]
    shared = uv[::2, ::2, :: -1 if encoding == 'nv21' else 1]
    return [luma, shared.reshape(len(shared), -1)]


def _interleaved(encoding, rgb):
    name = _UNNAMED.get(encoding, encoding).rstrip('168')
    planes = {'r': rgb[..., 0], 'g': rgb[..., 1], 'b': rgb[..., 2], 'a': rgb[..., 0] // 2}
    return np.stack([planes[plane] for plane in _ORDERS[name]], axis=-1)


def _mosaic(encoding, rgb):
    pattern = encoding[6:10]  # the colours of a 2x2 tile, row by row
    v, u = np.indices(rgb.shape[:2])
    channel = np.array(['rgb'.index(c) for c in pattern])[2 * (v % 2) + u % 2]
    return np.take_along_axis(rgb, channel[..., None], axis=2)


def _values_as_bytes(values, encoding, bigendian):
    """16-bit values get a low byte of their own, which must not matter."""
    if '16' not in encoding:
        return values.astype(np.uint8)
    wide = values.astype(np.uint16) * 256 + 0x5A
    return wide.astype('>u2' if bigendian else '<u2').view(np.uint8)
