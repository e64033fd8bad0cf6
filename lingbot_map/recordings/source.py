"""
Sources of stamped images, and those of image files and videos.

A source has a length, a `frame_id` and a count of `skipped` images. It yields (stamp_ns, rgb) with
strictly increasing stamps, rgb uint8 (H, W, 3). It reads lazily and can be iterated repeatedly;
with `lazy` the caller chooses which images to decode. Bad input raises SourceError with a one-line
text, as early as possible.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
import os
from pathlib import Path
import re
from typing import BinaryIO, Protocol

from lingbot_map.errors import UserError
from lingbot_map.images.decoding import DAMAGED_IMAGE
from lingbot_map.streaming.preprocess import open_rgb
import numpy as np
from PIL import Image

IMAGE_SUFFIXES = ('.bmp', '.jpeg', '.jpg', '.png', '.tif', '.tiff', '.webp')
BAG_SUFFIXES = ('.bag', '.db3', '.mcap')
DEFAULT_FRAME_ID = 'camera_optical_frame'
DEFAULT_FPS = 10.0

_EXIF_ORIENTATION = 0x0112
_TRUNCATED_BELOW = 0.9  # of the frame count, which containers only estimate


class SourceError(UserError):
    """The input cannot be used; the text is one line with the remedy."""


class Source(Protocol):
    """Interface of all sources."""

    frame_id: str
    skipped: int

    def __len__(self) -> int:
        """Return the number of images (an estimate for some videos)."""

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (stamp_ns, rgb uint8 (H, W, 3)) with strictly increasing stamps."""
        for stamp_ns, read in self.lazy():
            yield stamp_ns, read()

    def lazy(self) -> Iterator[tuple[int, Callable[[], np.ndarray]]]:
        """Yield (stamp_ns, read); `read()` decodes the image and is valid until the next step."""


def is_bag(path: Path) -> bool:
    """Return whether `path` looks like a rosbag2 folder, one of its files, or a ROS 1 bag."""
    if path.is_dir():
        return (path / 'metadata.yaml').exists() or any(
            file.suffix in BAG_SUFFIXES for file in path.iterdir()
        )
    return path.suffix in BAG_SUFFIXES


def read_image(file: BinaryIO | Path, name: str) -> np.ndarray:
    """
    Decode an image file to rgb uint8 (H, W, 3) as in spec section 3.

    Applies the EXIF orientation and composites RGBA over white. Raises SourceError, which mentions
    `name`, if the file is damaged or not an image.
    """
    try:
        return open_rgb(file)
    except DAMAGED_IMAGE:
        raise SourceError(f"'{name}' is not an image or is damaged") from None


class FileSource(Source):
    """Read image files of equal size with the given ascending stamps [ns]."""

    def __init__(self, files: Sequence[Path], stamps_ns: Sequence[int]):
        self.frame_id = DEFAULT_FRAME_ID
        self.skipped = 0
        self._files, self._stamps_ns = files, stamps_ns
        _check_one_size(files)

    def __len__(self) -> int:
        return len(self._files)

    def lazy(self) -> Iterator[tuple[int, Callable[[], np.ndarray]]]:
        for stamp_ns, file in zip(self._stamps_ns, self._files, strict=True):
            yield stamp_ns, partial(read_image, file, str(file))


def folder_source(path: Path, fps: float) -> FileSource:
    """Return the images of a folder in natural order of their names, or a single image."""
    files = image_files(path) if path.is_dir() else [path]
    if not files:
        raise SourceError(
            f"'{path}' contains no images ({' '.join(IMAGE_SUFFIXES)}), no bag and no video"
        )
    return FileSource(files, even_stamps(len(files), fps))


def even_stamps(count: int, fps: float) -> list[int]:
    """Return stamps [ns] at `fps`; the first is one period, since 0 means "not set" in ROS."""
    return [round(i * 1e9 / fps) for i in range(1, count + 1)]


def image_files(folder: Path) -> list[Path]:
    """Return the image files of a folder in natural order of their names."""
    files = [
        file
        for file in folder.iterdir()
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith('.')
    ]
    return sorted(files, key=_natural_key)


def _natural_key(file: Path) -> list[tuple[int, int | str]]:
    """Return a sort key that puts 2.jpg before 10.jpg."""
    return [
        (0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r'(\d+)', file.name)
    ]


def _check_one_size(files: Sequence[Path]) -> None:
    first = _upright_size(files[0])
    for file in files[1:]:
        size = _upright_size(file)
        if size != first:
            raise SourceError(
                f"'{file}' is {size[0]}x{size[1]} and '{files[0].name}' is {first[0]}x{first[1]}: "
                'all images must be of one camera and have one size'
            )


def _upright_size(file: Path) -> tuple[int, int]:
    """Return (width, height) after the EXIF orientation; reads only the header of the file."""
    try:
        with Image.open(file) as image:
            # getexif would decode the whole PNG to look for tags after its pixels.
            tagged = image.format != 'PNG' or 'exif' in image.info
            sideways = tagged and image.getexif().get(_EXIF_ORIENTATION, 1) >= 5
            return image.size[::-1] if sideways else image.size
    except DAMAGED_IMAGE:
        raise SourceError(f"'{file}' is not an image or is damaged") from None


class VideoSource(Source):
    """Decode every n-th frame of a video with OpenCV, about `fps` per second (0: all)."""

    def __init__(self, path: Path, fps: float):
        self.frame_id = DEFAULT_FRAME_ID
        self.skipped = 0
        self._path = path
        capture = self._open()
        import cv2

        self._rate = capture.get(cv2.CAP_PROP_FPS)
        self._count = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        capture.release()
        if not self._rate > 0:
            raise SourceError(f"'{path}' has no frame rate: extract its images to a folder")
        self._every = max(1, round(self._rate / fps)) if fps else 1

    def __len__(self) -> int:
        return max(0, -(-self._count // self._every))

    def lazy(self) -> Iterator[tuple[int, Callable[[], np.ndarray]]]:
        capture = self._open()
        decoded = 0
        try:
            while capture.grab():
                if decoded % self._every == 0:
                    yield round((decoded + 1) * 1e9 / self._rate), partial(self._decode, capture)
                decoded += 1
        finally:
            capture.release()
        if decoded < self._count * _TRUNCATED_BELOW:
            raise SourceError(
                f"'{self._path}' is truncated or damaged: {decoded} of its "
                f'{self._count} frames can be decoded'
            )

    def _decode(self, capture) -> np.ndarray:
        ok, bgr = capture.retrieve()
        if not ok:
            raise SourceError(f"'{self._path}' is damaged: a frame cannot be decoded")
        return bgr[:, :, ::-1].copy()

    def _open(self):
        # Silence FFmpeg and OpenCV: the SourceError already says what is wrong.
        os.environ.setdefault('OPENCV_FFMPEG_LOGLEVEL', '-8')
        import cv2

        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
        capture = cv2.VideoCapture(str(self._path))
        if not capture.isOpened():
            raise SourceError(
                f"'{self._path}' is not a readable video, image, image folder or bag"
            )
        return capture
