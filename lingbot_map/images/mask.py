"""Pixels that are not of the world: the robot's own body, an overlay, black bars."""

from dataclasses import dataclass
import os
from pathlib import Path
import re

from lingbot_map.images.decoding import DAMAGED_IMAGE
from lingbot_map.streaming.preprocess import open_rgb
import numpy as np

_BORDERS = re.compile(r'\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*')


class MaskError(ValueError):
    """Tells in one line why a mask cannot be used."""


@dataclass(frozen=True, eq=False)
class ImageMask:
    """Says which pixels of the camera's image count."""

    name: str
    borders: tuple[int, int, int, int] = (0, 0, 0, 0)  # left, top, right, bottom [px]
    pixels: np.ndarray | None = None  # (H, W) bool instead of borders

    def valid(self, width: int, height: int) -> np.ndarray:
        """Return (H, W) bool for pictures of this size; MaskError if that leaves nothing."""
        if self.pixels is not None:
            if self.pixels.shape != (height, width):
                wrong = 'x'.join(map(str, self.pixels.shape[::-1]))
                raise MaskError(
                    f"the mask '{self.name}' has {wrong} pixels and the images have "
                    f'{width}x{height}: make it at their size'
                )
            return self.pixels
        left, top, right, bottom = self.borders
        valid = np.zeros((height, width), bool)
        valid[top : max(0, height - bottom), left : max(0, width - right)] = True
        if not valid.any():
            raise MaskError(
                f"the borders '{self.name}' leave nothing of images of {width}x{height}"
            )
        return valid


def load_mask(text: str) -> ImageMask | None:
    """
    Return the mask that `text` describes: 'left,top,right,bottom' in pixels, or an image file.

    Pixels that are black in the file are masked. '' is no mask. Raises MaskError.
    """
    if not text.strip():
        return None
    borders = _BORDERS.fullmatch(text)
    if borders:
        return ImageMask(text, tuple(int(width) for width in borders.groups()))
    path = Path(os.path.expanduser(text))  # leaves a user that there is not
    if not path.is_file():
        raise MaskError(
            f"'{text}' is neither an image file nor the widths of borders, such as '0,40,0,40' "
            'for left, top, right and bottom in pixels'
        )
    try:
        image = open_rgb(path).any(axis=2)
    except DAMAGED_IMAGE:
        raise MaskError(f"'{text}' is not an image or is damaged") from None
    if not image.any():
        raise MaskError(f"'{text}' is black everywhere and would mask the whole image")
    return ImageMask(text, pixels=image)
