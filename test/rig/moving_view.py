"""Views of a camera that pans along a wide picture, by any fraction of a pixel."""

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 84, 56  # of the tiny network
_PIXELS_PER_SPOT = 10


def panorama(width=1000, height=HEIGHT, seed=0):
    """Return a wide picture of smooth spots."""
    spots = (height // _PIXELS_PER_SPOT, width // _PIXELS_PER_SPOT, 3)
    coarse = np.random.default_rng(seed).integers(0, 256, spots, dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def view(picture, x, width=WIDTH, height=HEIGHT):
    """Return what the camera sees (height, width, 3) when it has panned by `x` pixels."""
    box = (x, 0, x + width, height)
    return np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC, box))


def noisy(rgb, sigma, rng):
    """Return the image with noise of a sensor [grey levels]."""
    return (rgb + rng.normal(0, sigma, rgb.shape)).clip(0, 255).astype(np.uint8)
