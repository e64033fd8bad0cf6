"""Detect camera motion from the images alone, before the network runs."""

import numpy as np
from torch import Tensor
from torch.nn import functional as F

_COLUMNS = 32  # width of the downsampled grey images that are compared; cells are about square
_TILE = 4  # edge length in cells of the tiles that are evaluated separately
_NOISE = 1.0  # [grey levels] difference of a cell between two images of the same view
_MAX_GAIN = 2.0  # largest change of exposure that is compensated


class MotionGate:
    """
    Passes images whose view differs from that of the last image that passed.

    The image must shift by more than `threshold` [% of the image width], as the median over all
    textured tiles, so a person walking past (less than half of the tiles) does not count. With a
    slow camera, an image passes whenever the shift has added up to the threshold. Noise and
    changes of overall brightness do not count. With threshold None all images pass.
    """

    def __init__(self, threshold: float | None):
        self._threshold = threshold
        self.clear()

    def clear(self) -> None:
        """Let the next image pass."""
        self._reference: np.ndarray | None = None

    def passes(self, image: Tensor) -> bool:
        """Return whether an image (3, h, w) uint8 shows motion; the first one always does."""
        if self._threshold is None:
            return True
        small = shrink(image)
        moves = self._reference is None or shift(small, self._reference) > self._threshold
        if moves:
            self._reference = small
        return moves


def shrink(image: Tensor) -> np.ndarray:
    """Downsample an image (3, h, w) uint8 to grey cells (rows, columns) on the host."""
    height, width = image.shape[1:]
    rows = _TILE * max(round(_COLUMNS * height / width / _TILE), 1)
    grey = image.float().mean(0, keepdim=True)
    return F.adaptive_avg_pool2d(grey, (rows, _COLUMNS))[0].cpu().numpy()


def shift(small: np.ndarray, reference: np.ndarray) -> float:
    """
    Return the shift between two images of `shrink` [% of the width].

    Per tile it is the change of grey level divided by the gradient; the result is the median over
    all tiles with a gradient. Shifts far above one cell (3 %) are not accurate, only large.
    """
    now, before = _tiles(small), _tiles(reference)
    gain = np.median((before.std(1) + _NOISE) / (now.std(1) + _NOISE))
    change = gain.clip(1 / _MAX_GAIN, _MAX_GAIN) * now - before
    change -= np.median(change)
    change = np.clip(np.square(change).mean(1) - _NOISE**2, 0.0, None)
    slope = (_squared_slope(small) + _squared_slope(reference)) / 2
    textured = slope > _NOISE**2
    if not textured.any():
        return 0.0
    return float(100 / _COLUMNS * np.median(np.sqrt(change[textured] / slope[textured])))


def _squared_slope(small: np.ndarray) -> np.ndarray:
    """Return the mean squared gradient of each tile (tiles,), per cell."""
    return _tiles(sum(np.square(slope) for slope in np.gradient(small))).mean(1)


def _tiles(small: np.ndarray) -> np.ndarray:
    """Rearrange cells (rows, columns) to (tiles, cells)."""
    rows, columns = small.shape[0] // _TILE, small.shape[1] // _TILE
    split = small.reshape(rows, _TILE, columns, _TILE)
    return split.swapaxes(1, 2).reshape(rows * columns, -1)
