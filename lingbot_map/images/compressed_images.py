"""From a compressed image message to RGB, whoever made the message object."""

import io
import struct
import zlib

from lingbot_map.images.decoding import check_size, demosaic, is_mosaic, UnsupportedImage
from lingbot_map.streaming.preprocess import picture_rgb
import numpy as np
from PIL import Image

_FORMATS = ('JPEG', 'PNG', 'TIFF', 'WEBP')  # what cameras send; Pillow knows stranger ones
DAMAGED_PICTURE = (  # what Pillow lets through from the layers below it
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
        with Image.open(io.BytesIO(message.data), formats=_FORMATS) as picture:
            check_size(*picture.size)
            rgb = picture_rgb(picture)
            raw = picture.format != 'JPEG' and picture.mode in ('L', 'I;16', 'I;16B', 'I')
    except UnsupportedImage:
        raise
    except DAMAGED_PICTURE:
        raise UnsupportedImage(
            f'its {len(message.data)} bytes in format {shown} are not a jpeg or png picture, or '
            'are damaged',
            f'data in format {shown}',
        ) from None
    return demosaic(rgb[..., 0], encoding) if raw and is_mosaic(encoding) else rgb
