"""Open any recording: its images, and the ground-truth poses that belong to them."""

from collections.abc import Sequence
import os
from pathlib import Path

from lingbot_map.recordings.bags import BagSource, read_pose_topic
from lingbot_map.recordings.datasets import open_dataset
from lingbot_map.recordings.pose_files import PoseTrack, read_truth_file
from lingbot_map.recordings.source import (
    DEFAULT_FPS,
    folder_source,
    IMAGE_SUFFIXES,
    is_bag,
    Source,
    SourceError,
    VideoSource,
)

NO_TRUTH = 'none'
_LEAST_FPS, _MOST_FPS = 1e-3, 1e3  # beyond these, stamps exceed the ROS range or coincide


def open_source(path: str | os.PathLike, image_topic: str = '', fps: float = 0.0) -> Source:
    """
    Return the source at `path`, checked as far as possible without decoding all images.

    `image_topic`: topic of a bag; '' means its only image topic. `fps`: stamp rate [Hz] of an
    image folder (0: 10 Hz), or frames per second to take from a video (0: every frame). Raises
    SourceError.
    """
    path = Path(path)
    try:
        return _open_source(path, image_topic, fps)
    except PermissionError as error:
        raise SourceError(f"'{path}' cannot be read: {error.strerror.lower()}") from None


def _open_source(path: Path, image_topic: str, fps: float) -> Source:
    if not path.exists():
        raise SourceError(f"'{path}' does not exist")
    if any(0xD800 <= ord(letter) < 0xE000 for letter in str(path.resolve())):
        raise SourceError(f'the name {os.fsencode(path)!r} is not UTF-8: rename it')
    if fps and not _LEAST_FPS <= fps <= _MOST_FPS:
        raise SourceError(f'fps is {fps}: set it to {_LEAST_FPS:g} to {_MOST_FPS:g} Hz')
    if is_bag(path):
        if fps:
            raise SourceError(f"'{path}' is a bag with stamps of its own: remove fps")
        return BagSource(path, image_topic)
    if image_topic:
        raise SourceError(f"'{path}' is not a bag: remove the image topic '{image_topic}'")
    if path.is_dir():
        return open_dataset(path, fps) or folder_source(path, fps or DEFAULT_FPS)
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return folder_source(path, fps or DEFAULT_FPS)
    return VideoSource(path, fps)


def find_truth(
    path: Path, source: Source, wanted: str = '', frame: str = '', stamps_ns: Sequence[int] = ()
) -> PoseTrack | None:
    """
    Return the ground-truth poses named by `wanted`: a file, a topic of the bag, or 'none'.

    '' means the ground truth in the recording itself, if any. A KITTI file has one line per image
    and no stamps: `stamps_ns` gives the stamps of all images, else they are read from the source.
    Raises SourceError.
    """
    if wanted == NO_TRUTH:
        return None
    if wanted and Path(wanted).is_file():
        stamps_ns = stamps_ns or [stamp_ns for stamp_ns, _ in source.lazy()]
        return read_truth_file(Path(wanted), stamps_ns)
    if is_bag(path):
        return read_pose_topic(path, wanted, frame)
    if wanted:
        raise SourceError(
            f"ground truth '{wanted}' is not a file, and '{path}' is not a bag with topics"
        )
    return source.truth() if hasattr(source, 'truth') else None
