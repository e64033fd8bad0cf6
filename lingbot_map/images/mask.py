"""Masks for pixels that do not show the scene: the robot's body, overlays, black borders."""

from dataclasses import dataclass
import os
from pathlib import Path
import re

from lingbot_map.errors import UserError
from lingbot_map.images.decoding import DAMAGED_IMAGE
from lingbot_map.streaming.preprocess import open_rgb
import numpy as np

_BORDERS = re.compile(r'\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*')


@dataclass(frozen=True, eq=False)
class ImageMask:
    """Selects the valid pixels of raw images, by borders or by an image of the mask."""

    name: str
    borders: tuple[int, int, int, int] = (0, 0, 0, 0)  # left, top, right, bottom [px]
    pixels: np.ndarray | None = None  # (H, W) bool, true = valid; replaces borders

    def valid(self, width: int, height: int) -> np.ndarray:
        """Return valid pixels (H, W) bool; raise UserError for a wrong size or if none is left."""
        if self.pixels is not None:
            if self.pixels.shape != (height, width):
                wrong = 'x'.join(map(str, self.pixels.shape[::-1]))
                raise UserError(
                    f"the mask '{self.name}' has {wrong} pixels and the images have "
                    f'{width}x{height}: use a mask of the same size'
                )
            return self.pixels
        left, top, right, bottom = self.borders
        valid = np.zeros((height, width), bool)
        valid[top : max(0, height - bottom), left : max(0, width - right)] = True
        if not valid.any():
            raise UserError(
                f"the borders '{self.name}' mask the whole image of {width}x{height} pixels"
            )
        return valid


def load_mask(text: str) -> ImageMask | None:
    """
    Return the mask given by `text`: 'left,top,right,bottom' in pixels, or an image file.

    Black pixels of the file are masked. '' means no mask. Raises UserError.
    """
    if not text.strip():
        return None
    borders = _BORDERS.fullmatch(text)
    if borders:
        return ImageMask(text, tuple(int(width) for width in borders.groups()))
    path = Path(os.path.expanduser(text))  # unlike Path.expanduser, ignores unknown users
    if not path.is_file():
        raise UserError(
            f"'{text}' is neither an image file nor border widths left,top,right,bottom in "
            "pixels, such as '0,40,0,40'"
        )
    try:
        image = open_rgb(path).any(axis=2)
    except DAMAGED_IMAGE:
        raise UserError(f"'{text}' is damaged or not an image") from None
    if not image.any():
        raise UserError(f"'{text}' is all black and would mask the whole image")
    return ImageMask(text, pixels=image)
