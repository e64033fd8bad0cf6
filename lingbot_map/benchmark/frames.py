"""Frames for measurements: noise for speed, a rendered room for accuracy; always the same."""

from collections.abc import Iterator

from lingbot_map.benchmark.setup import Setup
from lingbot_map.synthetic.rendering import render_clips
from lingbot_map.synthetic.rooms import RoomConfig
import numpy as np

_SEED = 42
_DIFFERENT = 64  # noise frames, then they repeat: drawing them anew would take longer than a frame
_ROOM = 10_000
_ROOM_STEP = (0.022, 0.032)  # [m] between frames, as of a camera that is carried at 10 Hz


def noise(setup: Setup, count: int) -> Iterator[np.ndarray]:
    """Yield images (H, W, 3) uint8 of the size of the network's input."""
    shape = (min(count, _DIFFERENT), setup.image_height, setup.image_width, 3)
    frames = np.random.default_rng(_SEED).integers(0, 256, shape, dtype=np.uint8)
    for i in range(count):
        yield frames[i % _DIFFERENT]


def room(setup: Setup, count: int) -> np.ndarray:
    """Return images (N, H, W, 3) uint8 of a walk through a room, drawn on the CPU."""
    config = RoomConfig(setup.image_width, setup.image_height, count, _ROOM_STEP)
    rgb = render_clips([_ROOM], config, 'cpu').rgb[0]
    return rgb.permute(0, 2, 3, 1).contiguous().numpy()
