"""The pixel layouts of sensor_msgs/Image that are turned into RGB, on plain arrays."""

import numpy as np

CHANNELS_TO_RGB = {  # encoding -> which bytes of a pixel are red, green, blue; how many it has
    'rgb8': ((0, 1, 2), 3),
    'bgr8': ((2, 1, 0), 3),
    'rgba8': ((0, 1, 2), 4),
    'bgra8': ((2, 1, 0), 4),
    'mono8': ((0, 0, 0), 1),
}


class RawImageError(ValueError):
    """Tell in one line why an image message holds no picture that can be used."""


def raw_to_rgb(data, encoding: str, height: int, width: int, step: int) -> np.ndarray:
    """
    Return an image message's pixels as contiguous rgb uint8 (H, W, 3); alpha is dropped.

    `step` is the number of bytes from row to row and may exceed the pixels. An rgb8 image
    without padding is a view of `data`, every other one a copy.
    """
    if encoding not in CHANNELS_TO_RGB:
        raise RawImageError(f"encoding '{encoding}' is not one of {' '.join(CHANNELS_TO_RGB)}")
    order, channels = CHANNELS_TO_RGB[encoding]
    if min(height, width) < 1 or step < width * channels:
        raise RawImageError(f'a {width}x{height} {encoding} image has no rows of {step} bytes')
    flat = np.frombuffer(data, np.uint8)
    if len(flat) < step * (height - 1) + width * channels:
        raise RawImageError(f'the image holds {len(flat)} bytes, not {height} rows of {step}')
    pixels = np.lib.stride_tricks.as_strided(
        flat, (height, width, channels), (step, channels, 1), writeable=False)
    if encoding == 'rgb8':
        return np.ascontiguousarray(pixels)
    return np.ascontiguousarray(pixels[:, :, order])
