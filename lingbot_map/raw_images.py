"""From the pixels of an image message to RGB, whoever made the message object."""

import cv2
import numpy as np

_ENCODINGS = {  # channels, and how OpenCV calls the way to RGB; None: already there
    'rgb8': (3, None),
    'bgr8': (3, cv2.COLOR_BGR2RGB),
    'rgba8': (4, cv2.COLOR_RGBA2RGB),
    'bgra8': (4, cv2.COLOR_BGRA2RGB),
    'mono8': (1, cv2.COLOR_GRAY2RGB),
}
_MAX_SIDE = 16384  # beyond any camera: such a size is a damaged message


class UnsupportedImage(ValueError):
    """Says in one line what is wrong with an image message."""


def to_rgb(message) -> np.ndarray:
    """
    Return the pixels (H, W, 3) uint8, contiguous; for unpadded rgb8 a view of the message.

    `message` is a sensor_msgs/Image of rclpy or of rosbags; alpha is dropped. UnsupportedImage:
    encoding, size, step or data length are not those of a picture.
    """
    if message.encoding not in _ENCODINGS:
        raise UnsupportedImage(
            f"encoding '{message.encoding}' is not supported: publish one of "
            f'{", ".join(_ENCODINGS)}'
        )
    channels, to_rgb_code = _ENCODINGS[message.encoding]
    pixels = _pixels(message, channels)
    if to_rgb_code is None:
        return np.ascontiguousarray(pixels)
    return cv2.cvtColor(pixels, to_rgb_code)


def _pixels(message, channels: int) -> np.ndarray:
    """Return a view (H, W, channels) of the data without the padding at the end of the rows."""
    height, width, step = message.height, message.width, message.step
    if not (0 < height <= _MAX_SIDE and 0 < width <= _MAX_SIDE):
        raise UnsupportedImage(
            f'size {width}x{height} is not that of a picture: both sides must '
            f'be 1 to {_MAX_SIDE} pixels'
        )
    row = width * channels
    if step < row:
        raise UnsupportedImage(
            f'step {step} is less than the {row} bytes of a row of {width} '
            f'{message.encoding} pixels'
        )
    needed = step * (height - 1) + row
    if len(message.data) < needed:
        raise UnsupportedImage(
            f'data has {len(message.data)} bytes, {width}x{height} '
            f'{message.encoding} with step {step} needs {needed}'
        )
    return np.ndarray(
        (height, width, channels), np.uint8, buffer=message.data, strides=(step, channels, 1)
    )
