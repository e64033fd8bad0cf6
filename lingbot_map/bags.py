"""
Pictures and reference poses out of rosbag2 (sqlite3, mcap) and ROS 1 bags, without ROS.

Reading goes through the optional package `rosbags`. Types come from the bag's own definitions, or
from ROS 2 Jazzy where an old bag has none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
import io
from pathlib import Path
import struct

from lingbot_map.geometry import quaternion_to_matrix, rigid
from lingbot_map.raw_images import to_rgb, UnsupportedImage
from lingbot_map.sources import BAG_SUFFIXES, DEFAULT_FRAME_ID, read_picture, SourceError
import numpy as np
import torch

IMAGE_TYPES = ('sensor_msgs/msg/Image', 'sensor_msgs/msg/CompressedImage')
POSE_OF_TYPE = {  # type -> the geometry_msgs/Pose in a message
    'geometry_msgs/msg/PoseStamped': lambda message: message.pose,
    'geometry_msgs/msg/PoseWithCovarianceStamped': lambda message: message.pose.pose,
    'nav_msgs/msg/Odometry': lambda message: message.pose.pose,
}
_TRUTH_NAMES = ('ground_truth', 'groundtruth')


@dataclass(frozen=True)
class PoseTrack:
    """Stamped poses of one topic, ascending in time."""

    topic: str
    stamps_ns: np.ndarray  # (N,) int64
    T: np.ndarray  # (N, 4, 4) float64, body to the topic's frame


class BagSource:
    """
    Read the pictures of one topic in the order of the recording.

    Stamps are the header's; a header without one takes the time of recording. A picture whose
    stamp does not lie after the one before is left out and counted in `skipped`.
    """

    def __init__(self, path: Path, image_topic: str):
        self._path = path
        self.skipped = 0
        with _reading(path) as reader:
            self.image_topic = _pick_image_topic(path, _message_counts(reader), image_topic)
            self._count = sum(c.msgcount for c in _connections(reader, self.image_topic))
            _, first = next(_messages(reader, self.image_topic), (0, None))
        if first is None:
            raise SourceError(
                f"'{path}' is damaged: none of the {self._count} images of "
                f"'{self.image_topic}' can be found"
            )
        self._rgb(first)  # an encoding that cannot be read shows at once
        self.frame_id = first.header.frame_id or DEFAULT_FRAME_ID

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        self.skipped = found = 0
        newest = -1
        for recorded_ns, message in self._all_messages():
            found += 1
            stamp = _stamp_ns(message) or recorded_ns
            if stamp <= newest:
                self.skipped += 1
                continue
            newest = stamp
            yield stamp, self._rgb(message)
        if found < self._count:
            raise SourceError(
                f"'{self._path}' is damaged: {found} of the {self._count} images of "
                f"'{self.image_topic}' can be read"
            )

    def _all_messages(self) -> Iterator[tuple[int, object]]:
        with _reading(self._path) as reader:
            yield from _messages(reader, self.image_topic)

    def _rgb(self, message) -> np.ndarray:
        name = f'{self._path} {self.image_topic}'
        if hasattr(message, 'format'):
            return read_picture(io.BytesIO(message.data), name)
        try:
            return to_rgb(message)
        except UnsupportedImage as error:
            raise SourceError(f"'{name}': {error}") from None


def read_ground_truth(path: Path, topic: str = '') -> PoseTrack | None:
    """
    Return the poses of `topic`; '' takes the only pose topic named like ground truth, if any.

    Raises SourceError for a topic that is not there or holds no poses.
    """
    with _reading(path) as reader:
        topics = {
            name: msgtype
            for name, msgtype, _ in _message_counts(reader)
            if msgtype in POSE_OF_TYPE
        }
        if not topic:
            named = [name for name in topics if any(word in name for word in _TRUTH_NAMES)]
            if len(named) != 1:
                return None
            topic = named[0]
        topic = _absolute(topic)
        if topic not in topics:
            raise SourceError(
                f"'{path}' has no poses on '{topic}'; pose topics: {_listing(topics.items())}"
            )
        return _pose_track(topic, POSE_OF_TYPE[topics[topic]], _messages(reader, topic))


def _pose_track(topic: str, pose_of, messages: Iterator[tuple[int, object]]) -> PoseTrack:
    rows = []
    for recorded_ns, message in messages:
        pose = pose_of(message)
        p, q = pose.position, pose.orientation
        rows.append((_stamp_ns(message) or recorded_ns, p.x, p.y, p.z, q.x, q.y, q.z, q.w))
    rows.sort(key=lambda row: row[0])
    values = torch.tensor([row[1:] for row in rows], dtype=torch.float64).reshape(-1, 7)
    T = rigid(quaternion_to_matrix(values[:, 3:]), values[:, :3])
    return PoseTrack(topic, np.array([row[0] for row in rows], np.int64), T.numpy())


@contextmanager
def _reading(path: Path):
    """Open a bag; whatever is broken in it comes out as one SourceError."""
    try:
        import apsw
        from rosbags.highlevel import AnyReader, AnyReaderError
        from rosbags.rosbag1 import ReaderError as Ros1ReaderError
        from rosbags.rosbag2 import ReaderError as Ros2ReaderError
        from rosbags.rosbag2.reader import zstd
        from rosbags.typesys import get_typestore, Stores
    except ImportError as error:
        raise SourceError(
            f"'{path}' is a bag, which needs the package rosbags (pip install rosbags): {error}"
        ) from None
    # what rosbags lets through from the layers below it when bytes are missing or wrong
    damage = (
        AnyReaderError,
        Ros1ReaderError,
        Ros2ReaderError,
        apsw.Error,
        zstd.ZstdError,
        struct.error,
        OSError,
        EOFError,
        ValueError,
        TypeError,
        LookupError,
        OverflowError,
        MemoryError,
        AssertionError,
    )
    try:
        with AnyReader(
            _bag_files(path), default_typestore=get_typestore(Stores.ROS2_JAZZY)
        ) as reader:
            yield reader
    except SourceError:
        raise
    except damage as error:
        reason = ' '.join(str(error).split()) or type(error).__name__
        raise SourceError(f"'{path}' is cut short or damaged, or not a bag: {reason}") from None


def _bag_files(path: Path) -> list[Path]:
    """Return what rosbags opens: the folder, or its storage files if metadata.yaml is missing."""
    if path.is_file() or (path / 'metadata.yaml').exists():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in BAG_SUFFIXES)


def _message_counts(reader) -> list[tuple[str, str, int]]:
    """Return (topic, type, number of messages) for each topic."""
    return [
        (name, info.msgtype or 'several types', info.msgcount)
        for name, info in sorted(reader.topics.items())
    ]


def _pick_image_topic(path: Path, counts: list[tuple[str, str, int]], wanted: str) -> str:
    images = [
        (name, msgtype) for name, msgtype, count in counts if msgtype in IMAGE_TYPES and count
    ]
    if wanted:
        wanted = _absolute(wanted)
        if wanted in dict(images):
            return wanted
        raise SourceError(
            f"'{path}' has no images on '{wanted}'; image topics: {_listing(images)}"
        )
    if not images:
        raise SourceError(
            f"'{path}' has no image topic; its topics: "
            f'{_listing((name, msgtype) for name, msgtype, _ in counts)}'
        )
    if len(images) > 1:
        raise SourceError(
            f"'{path}' has several image topics, choose one with --image-topic: {_listing(images)}"
        )
    return images[0][0]


def _messages(reader, topic: str) -> Iterator[tuple[int, object]]:
    """Yield (time of recording [ns], message) of one topic."""
    for connection, recorded_ns, raw in reader.messages(connections=_connections(reader, topic)):
        yield recorded_ns, reader.deserialize(raw, connection.msgtype)


def _connections(reader, topic: str) -> list:
    return [connection for connection in reader.connections if connection.topic == topic]


def _stamp_ns(message) -> int:
    stamp = message.header.stamp
    return stamp.sec * 10**9 + stamp.nanosec


def _absolute(topic: str) -> str:
    return topic if topic.startswith('/') else f'/{topic}'


def _listing(topics) -> str:
    return ', '.join(f'{name} ({msgtype})' for name, msgtype in topics) or 'none'
