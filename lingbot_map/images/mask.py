"""Pixels that are not of the world: the robot's own body, an overlay, black bars."""

from dataclasses import dataclass
import os
from pathlib import Path
import re

from lingbot_map.errors import UserError
from lingbot_map.images.decoding import DAMAGED_PICTURE
from lingbot_map.streaming.preprocess import open_rgb
import numpy as np

_BORDERS = re.compile(r'\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*')


@dataclass(frozen=True, eq=False)
class ImageMask:
    """Says which pixels of the camera's picture count."""

    name: str
    borders: tuple[int, int, int, int] = (0, 0, 0, 0)  # left, top, right, bottom [px]
    picture: np.ndarray | None = None  # (H, W) bool instead of borders

    def seen(self, width: int, height: int) -> np.ndarray:
        """Return (H, W) bool for pictures of this size; UserError if that leaves nothing."""
        if self.picture is not None:
            if self.picture.shape != (height, width):
                wrong = 'x'.join(map(str, self.picture.shape[::-1]))
                raise UserError(
                    f"the mask '{self.name}' has {wrong} pixels and the images have "
                    f'{width}x{height}: make it at their size'
                )
            return self.picture
        left, top, right, bottom = self.borders
        seen = np.zeros((height, width), bool)
        seen[top : max(0, height - bottom), left : max(0, width - right)] = True
        if not seen.any():
            raise UserError(
                f"the borders '{self.name}' leave nothing of images of {width}x{height}"
            )
        return seen


def load_mask(text: str) -> ImageMask | None:
    """
    Return the mask that `text` describes: 'left,top,right,bottom' in pixels, or a picture file.

    Pixels that are black in the file are masked. '' is no mask. Raises UserError.
    """
    if not text.strip():
        return None
    borders = _BORDERS.fullmatch(text)
    if borders:
        return ImageMask(text, tuple(int(width) for width in borders.groups()))
    path = Path(os.path.expanduser(text))  # leaves a user that there is not
    if not path.is_file():
        raise UserError(
            f"'{text}' is neither a picture file nor the widths of borders, such as '0,40,0,40' "
            'for left, top, right and bottom in pixels'
        )
    try:
        picture = open_rgb(path).any(axis=2)
    except DAMAGED_PICTURE:
        raise UserError(f"'{text}' is not a picture or is damaged") from None
    if not picture.any():
        raise UserError(f"'{text}' is black everywhere and would mask the whole image")
    return ImageMask(text, picture=picture)
