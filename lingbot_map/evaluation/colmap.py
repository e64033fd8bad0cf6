"""
A reconstruction as a COLMAP text model, which nerfstudio, gsplat tools and COLMAP itself read.

Layout: images/*.jpg and sparse/0/{cameras,images,points3D}.txt. Every keyframe is an image with a
PINHOLE camera of its own, since the network estimates the field of view of each. The world is
the map frame (z up, map units); points carry no tracks.
"""

from pathlib import Path

from lingbot_map.evaluation.run import PlacedFrame
from lingbot_map.geometry import invert
from lingbot_map.mapping.export import replacing, write_bytes
from lingbot_map.mapping.map_frame import unit_quaternion
import numpy as np
from PIL import Image

_JPEG_QUALITY = 95
_MAX_POINTS = 200_000  # of more, evenly chosen ones: readers of the text load all of them at once


class ColmapModel:
    """Collects keyframes and writes their pictures at once, the model at the end."""

    def __init__(self, folder: Path):
        self._images = folder / 'images'
        self._sparse = folder / 'sparse' / '0'
        self._images.mkdir(parents=True)
        self._sparse.mkdir(parents=True)
        self._cameras: list[str] = []
        self._poses: list[str] = []

    def __call__(self, placed: PlacedFrame) -> None:
        """Add the picture if it is a keyframe."""
        if not placed.result.is_keyframe:
            return
        number = len(self._cameras) + 1
        name = f'{stamp_name(placed.stamp_ns)}.jpg'
        with replacing(self._images / name) as file:
            Image.fromarray(placed.rgb).save(file, 'JPEG', quality=_JPEG_QUALITY)
        height, width = placed.rgb.shape[:2]
        K = placed.result.intrinsics
        self._cameras.append(
            f'{number} PINHOLE {width} {height} {_numbers((K[0, 0], K[1, 1], K[0, 2], K[1, 2]))}'
        )
        T_cam_map = invert(placed.T_map_cam)
        x, y, z, w = unit_quaternion(T_cam_map[:3, :3])
        pose = _numbers((w, x, y, z, *T_cam_map[:3, 3]))
        self._poses += [f'{number} {pose} {number} {name}', '']  # the second line: no 2D points

    def write(self, points: np.ndarray) -> None:
        """Write the text files with points (N,) POINT_DTYPE of the map."""
        chosen = points[:: max(1, -(-len(points) // _MAX_POINTS))]
        rows = [
            f'{number} {_numbers((p["x"], p["y"], p["z"]))} '
            f'{p["rgb"] >> 16 & 255} {p["rgb"] >> 8 & 255} {p["rgb"] & 255} 0'
            for number, p in enumerate(chosen, start=1)
        ]
        for name, comment, lines in (
            ('cameras', 'CAMERA_ID MODEL WIDTH HEIGHT fx fy cx cy', self._cameras),
            (
                'images',
                'IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME, then 2D points',
                self._poses,
            ),
            ('points3D', 'POINT3D_ID X Y Z R G B ERROR TRACK[]', rows),
        ):
            text = '\n'.join((f'# {comment}', *lines)) + '\n'
            write_bytes(self._sparse / f'{name}.txt', text.encode())


def stamp_name(stamp_ns: int) -> str:
    """Return a file name of a stamp [ns]: its seconds, with nine decimals."""
    return f'{stamp_ns // 10**9}.{stamp_ns % 10**9:09d}'


def _numbers(values) -> str:
    return ' '.join(f'{value:.9g}' for value in values)
