"""Reference poses out of bags: pose topics, and transforms of /tf chosen by their child frame."""

from collections.abc import Iterator
from pathlib import Path

from lingbot_map.recordings.bags import (
    absolute,
    listing,
    messages,
    reading,
    stamp_of,
    topic_counts,
)
from lingbot_map.recordings.pose_files import pose_track, PoseTrack
from lingbot_map.recordings.source import SourceError

_POSE_TYPES = {  # type -> the geometry_msgs/Pose in a message
    'geometry_msgs/msg/PoseStamped': lambda message: message.pose,
    'geometry_msgs/msg/PoseWithCovarianceStamped': lambda message: message.pose.pose,
    'nav_msgs/msg/Odometry': lambda message: message.pose.pose,
}
_TRANSFORM_TYPE = 'geometry_msgs/msg/TransformStamped'
_TRANSFORMS_TYPES = ('tf2_msgs/msg/TFMessage', 'tf/msg/tfMessage')
_TYPES = (*_POSE_TYPES, _TRANSFORM_TYPE, *_TRANSFORMS_TYPES)
_TRUTH_NAMES = ('ground_truth', 'groundtruth')


def read_pose_topic(path: Path, topic: str = '', frame: str = '') -> PoseTrack | None:
    """
    Return the poses of `topic`; '' takes the only pose topic named like ground truth, if any.

    `frame` chooses among the child frames of transforms. Raises SourceError for a topic that is
    not there or holds no poses, and for a choice that is not one.
    """
    with reading(path) as reader:
        topics = {name: kind for name, kind, _ in topic_counts(reader) if kind in _TYPES}
        if not topic:
            named = [name for name in topics if any(word in name for word in _TRUTH_NAMES)]
            if len(named) != 1:
                return None
            topic = named[0]
        topic = absolute(topic)
        if topic not in topics:
            raise SourceError(
                f"'{path}' has no poses on '{topic}'; pose topics: {listing(topics.items())}"
            )
        poses = list(_poses(messages(reader, topic), topics[topic]))
    return _track(f'{path.name} {topic}', poses, frame)


def _poses(of_topic: Iterator[tuple[int, object]], kind: str) -> Iterator[tuple]:
    """Yield (parent, child, stamp [ns], x, y, z, qx, qy, qz, qw)."""
    for recorded_ns, message in of_topic:
        if kind in _POSE_TYPES:
            pose = _POSE_TYPES[kind](message)
            yield _row(message, recorded_ns, pose.position, pose.orientation)
            continue
        for item in message.transforms if kind in _TRANSFORMS_TYPES else [message]:
            yield _row(item, recorded_ns, item.transform.translation, item.transform.rotation)


def _row(message, recorded_ns: int, p, q) -> tuple:
    child = getattr(message, 'child_frame_id', '').lstrip('/')
    stamp_ns = stamp_of(message) or recorded_ns
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
            f"'{name}' holds several frames, choose one with --gt-frame: {', '.join(children)}"
        )
    parents = sorted({parent for parent, *_ in poses})
    if len(parents) > 1:
        raise SourceError(
            f"'{name}' gives the frame '{children[0] if children else ''}' in several parents: "
            f'{", ".join(parents)}'
        )
    return pose_track(name, [pose[2:] for pose in poses], ''.join(children))
