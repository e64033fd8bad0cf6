"""
Read images, camera_info and ground-truth poses from rosbag2 (sqlite3, mcap) and ROS 1 bags.

Needs the optional package `rosbags`, but no ROS installation. Message types come from the bag's
own definitions, or from ROS 2 Jazzy if an old bag has none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
import struct
from types import SimpleNamespace

from lingbot_map.images.decoding import compressed_to_rgb, to_rgb, UnsupportedImage
from lingbot_map.recordings.pose_files import pose_track, PoseTrack
from lingbot_map.recordings.source import BAG_SUFFIXES, DEFAULT_FRAME_ID, Source, SourceError
import numpy as np

IMAGE_TYPES = ('sensor_msgs/msg/Image', 'sensor_msgs/msg/CompressedImage')
_INFO_TYPE = 'sensor_msgs/msg/CameraInfo'
_POSE_TYPES = {  # type -> function that returns the message's geometry_msgs/Pose
    'geometry_msgs/msg/PoseStamped': lambda message: message.pose,
    'geometry_msgs/msg/PoseWithCovarianceStamped': lambda message: message.pose.pose,
    'nav_msgs/msg/Odometry': lambda message: message.pose.pose,
}
_TRANSFORM_TYPE = 'geometry_msgs/msg/TransformStamped'
_TRANSFORMS_TYPES = ('tf2_msgs/msg/TFMessage', 'tf/msg/tfMessage')
_TYPES = (*_POSE_TYPES, _TRANSFORM_TYPE, *_TRANSFORMS_TYPES)
_TRUTH_NAMES = ('ground_truth', 'groundtruth')


class BagSource(Source):
    """
    Read the images of one topic in recording order.

    The stamp is that of the header, or the recording time if the header has none. An image whose
    stamp is not newer than the previous one is skipped and counted in `skipped`.
    """

    def __init__(self, path: Path, image_topic: str):
        self._path = path
        self.skipped = 0
        with _open_bag(path) as reader:
            self.topics = _topic_counts(reader)
            self.image_topic = _pick_image_topic(path, self.topics, image_topic)
            self._count = sum(c.msgcount for c in _connections(reader, self.image_topic))
            _, first = next(_messages(reader, self.image_topic), (0, None))
        if first is None:
            raise SourceError(
                f"'{path}' is damaged: none of the {self._count} images of "
                f"'{self.image_topic}' can be found"
            )
        self._rgb(first)  # fails now if the encoding is not supported
        self.frame_id = first.header.frame_id or DEFAULT_FRAME_ID

    def __len__(self) -> int:
        return self._count

    def lazy(self) -> Iterator[tuple[int, Callable[[], np.ndarray]]]:
        self.skipped = found = 0
        newest = -1
        for recorded_ns, message in self._messages_of_topic():
            found += 1
            stamp = _stamp_of(message) or recorded_ns
            if stamp <= newest:
                self.skipped += 1
                continue
            newest = stamp
            yield stamp, partial(self._rgb, message)
        if found < self._count:
            raise SourceError(
                f"'{self._path}' is damaged: {found} of the {self._count} images of "
                f"'{self.image_topic}' can be read"
            )

    def _messages_of_topic(self) -> Iterator[tuple[int, object]]:
        with _open_bag(self._path) as reader:
            yield from _messages(reader, self.image_topic)

    def _rgb(self, message) -> np.ndarray:
        name = f'{self._path} {self.image_topic}'
        decode = compressed_to_rgb if hasattr(message, 'format') else to_rgb
        try:
            return decode(message)
        except UnsupportedImage as error:
            raise SourceError(f"'{name}': {error}") from None


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


def read_camera_info(path: Path, image_topic: str, topic: str = ''):
    """
    Return the first sensor_msgs/CameraInfo of `topic`, with ROS 2 field names.

    '' means `camera_info` in the namespace of `image_topic`; returns None if that is missing.
    ROS 1 messages have upper-case fields (K, D), which are renamed. Raises SourceError if `topic`
    has no CameraInfo.
    """
    with _open_bag(path) as reader:
        infos = [
            (t, kind) for t, kind, count in _topic_counts(reader) if kind == _INFO_TYPE and count
        ]
        if not topic:
            namespace = image_topic.removesuffix('/compressed').rpartition('/')[0]
            topic = f'{namespace}/camera_info'
            if topic not in dict(infos):
                return None
        if _absolute(topic) not in dict(infos):
            raise SourceError(
                f"'{path}' has no camera_info on '{_absolute(topic)}'; "
                f'such topics: {_listing(infos)}'
            )
        _, info = next(_messages(reader, _absolute(topic)))
    return SimpleNamespace(**{f.name.lower(): getattr(info, f.name) for f in fields(info)})


def read_pose_topic(path: Path, topic: str = '', frame: str = '') -> PoseTrack | None:
    """
    Return the poses of `topic`.

    '' means the only pose topic with "ground_truth" or "groundtruth" in its name; returns None
    if there is not exactly one. `frame` selects a child frame of transforms. Raises SourceError
    if the topic is missing or has no poses, or if the frame is missing or ambiguous.
    """
    with _open_bag(path) as reader:
        topics = {name: kind for name, kind, _ in _topic_counts(reader) if kind in _TYPES}
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
        poses = list(_poses(_messages(reader, topic), topics[topic]))
    return _track(f'{path.name} {topic}', poses, frame)


def _poses(stamped_messages: Iterator[tuple[int, object]], kind: str) -> Iterator[tuple]:
    """Yield (parent, child, stamp [ns], x, y, z, qx, qy, qz, qw) for each pose."""
    for recorded_ns, message in stamped_messages:
        if kind in _POSE_TYPES:
            pose = _POSE_TYPES[kind](message)
            yield _row(message, recorded_ns, pose.position, pose.orientation)
            continue
        for item in message.transforms if kind in _TRANSFORMS_TYPES else [message]:
            yield _row(item, recorded_ns, item.transform.translation, item.transform.rotation)


def _row(message, recorded_ns: int, p, q) -> tuple:
    child = getattr(message, 'child_frame_id', '').lstrip('/')
    stamp_ns = _stamp_of(message) or recorded_ns
    return (message.header.frame_id, child, stamp_ns, p.x, p.y, p.z, q.x, q.y, q.z, q.w)


def _track(name: str, poses: list[tuple], frame: str) -> PoseTrack:
    children = sorted({child for _, child, *_ in poses if child})
    if frame:
        if frame.lstrip('/') not in children:
            raise SourceError(
                f"'{name}' has no poses of the frame '{frame}'; its frames: "
                f'{", ".join(children) or "none"}'
            )
        children = [frame.lstrip('/')]
        poses = [pose for pose in poses if pose[1] == children[0]]
    if len(children) > 1:
        raise SourceError(
            f"'{name}' has several frames, choose one with --gt-frame: {', '.join(children)}"
        )
    parents = sorted({parent for parent, *_ in poses})
    if len(parents) > 1:
        raise SourceError(
            f"'{name}' gives the frame '{children[0] if children else ''}' in several parents: "
            f'{", ".join(parents)}'
        )
    return pose_track(name, [pose[2:] for pose in poses], ''.join(children))


@contextmanager
def _open_bag(path: Path):
    """Open a bag with rosbags; raise SourceError for any damage in it."""
    try:
        from rosbags.highlevel import AnyReader, AnyReaderError
        from rosbags.rosbag1 import ReaderError as Ros1ReaderError
        from rosbags.rosbag2 import ReaderError as Ros2ReaderError
        from rosbags.rosbag2.reader import zstd
        from rosbags.rosbag2.storage_sqlite3 import apsw
        from rosbags.typesys import get_typestore, Stores
    except ImportError as error:
        raise SourceError(
            f"'{path}' is a bag and needs the package rosbags (pip install rosbags): {error}"
        ) from None
    # rosbags does not wrap these errors of its parsers when bytes are missing or wrong.
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
            _complete_types(reader)
            yield reader
    except SourceError:
        raise
    except damage as error:
        reason = ' '.join(str(error).split()) or type(error).__name__
        raise SourceError(f"'{path}' is truncated, damaged or not a bag: {reason}") from None


def _complete_types(reader) -> None:
    """Add the message types that the bag does not define, from ROS 2 Jazzy."""
    own = reader.typestore.fielddefs
    if all(connection.msgtype in own for connection in reader.connections):
        return
    known = reader.default_typestore.fielddefs
    reader.typestore.register({name: known[name] for name in known if name not in own})


def _bag_files(path: Path) -> list[Path]:
    """Return the paths to open: the bag, or its storage files if metadata.yaml is missing."""
    if path.is_file() or (path / 'metadata.yaml').exists():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in BAG_SUFFIXES)


def _topic_counts(reader) -> list[tuple[str, str, int]]:
    """Return (topic, type, number of messages) for each topic."""
    return [
        (name, info.msgtype or 'several types', info.msgcount)
        for name, info in sorted(reader.topics.items())
    ]


def _messages(reader, topic: str) -> Iterator[tuple[int, object]]:
    """Yield (recording time [ns], message) for each message of a topic."""
    for connection, recorded_ns, raw in reader.messages(connections=_connections(reader, topic)):
        yield recorded_ns, reader.deserialize(raw, connection.msgtype)


def _connections(reader, topic: str) -> list:
    return [connection for connection in reader.connections if connection.topic == topic]


def _stamp_of(message) -> int:
    """Return the stamp of a message's header [ns]."""
    stamp = message.header.stamp
    return stamp.sec * 10**9 + stamp.nanosec


def _absolute(topic: str) -> str:
    """Return the topic with a leading slash, as bags store it."""
    return topic if topic.startswith('/') else f'/{topic}'


def _listing(topics) -> str:
    """Format (topic, type) pairs for an error message."""
    return ', '.join(f'{name} ({msgtype})' for name, msgtype in topics) or 'none'
