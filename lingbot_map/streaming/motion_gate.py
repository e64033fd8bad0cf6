"""Tell from the pictures alone whether the camera moves, before the network runs."""

import numpy as np
from torch import Tensor
from torch.nn import functional as F

_COLUMNS = 32  # of the small grey pictures that are compared; their cells are about square
_TILE = 4  # cells along each edge of the tiles that are judged apart
_NOISE = 1.0  # grey levels between the cells of two pictures of the same scene
_GREATEST_GAIN = 2.0  # by which a camera's exposure may change and the view be the same


class MotionGate:
    """
    Passes images that show another view than the last image that passed.

    The scene has to move by more than `threshold` [% of the image's width], in the middle of all
    parts of the image that show something: who walks by moves less than half of them. A camera
    that creeps passes each time it has come that far. Noise, and a change of the brightness as a
    whole, is no motion. A threshold of None passes all.
    """

    def __init__(self, threshold: float | None):
        self._threshold = threshold
        self.clear()

    def clear(self) -> None:
        """Let the next image pass."""
        self._reference: np.ndarray | None = None

    def passes(self, image: Tensor) -> bool:
        """Tell whether an image (3, h, w) uint8 shows motion; a first one always does."""
        if self._threshold is None:
            return True
        small = shrink(image)
        moves = self._reference is None or shift(small, self._reference) > self._threshold
        if moves:
            self._reference = small
        return moves


def shrink(image: Tensor) -> np.ndarray:
    """Return an image (3, h, w) uint8 as few grey cells (rows, columns) on the host."""
    height, width = image.shape[1:]
    rows = _TILE * max(round(_COLUMNS * height / width / _TILE), 1)
    grey = image.float().mean(0, keepdim=True)
    return F.adaptive_avg_pool2d(grey, (rows, _COLUMNS))[0].cpu().numpy()


def shift(small: np.ndarray, reference: np.ndarray) -> float:
    """
    Return how far the scene has moved between two pictures of `shrink` [% of the width].

    It is what moves a slope past a cell by the difference seen there, for the median tile with
    any slope. Far more than a cell, some 3 %, it only tells that much has changed.
    """
    now, before = _tiles(small), _tiles(reference)
    gain = np.median((before.std(1) + _NOISE) / (now.std(1) + _NOISE))
    change = gain.clip(1 / _GREATEST_GAIN, _GREATEST_GAIN) * now - before
    change -= np.median(change)
    change = np.clip(np.square(change).mean(1) - _NOISE**2, 0.0, None)
    slope = (_squared_slope(small) + _squared_slope(reference)) / 2
    shown = slope > _NOISE**2
    if not shown.any():
        return 0.0
    return float(100 / _COLUMNS * np.median(np.sqrt(change[shown] / slope[shown])))


def _squared_slope(small: np.ndarray) -> np.ndarray:
    """Return the mean square of the slope in each tile (tiles,), per cell."""
    return _tiles(sum(np.square(slope) for slope in np.gradient(small))).mean(1)


def _tiles(small: np.ndarray) -> np.ndarray:
    """Return the cells (rows, columns) by tiles (tiles, cells)."""
    rows, columns = small.shape[0] // _TILE, small.shape[1] // _TILE
    split = small.reshape(rows, _TILE, columns, _TILE)
    return split.swapaxes(1, 2).reshape(rows * columns, -1)
