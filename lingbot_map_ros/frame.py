"""An admitted image on its way through the node, and the reasons why one is dropped."""

from __future__ import annotations

from dataclasses import dataclass

from builtin_interfaces.msg import Time
from sensor_msgs.msg import Image
from std_msgs.msg import Header

SUPERSEDED = 'superseded'
QUEUE_FULL = 'queue_full'
REPEATED = 'repeated_stamp'
LATE = 'late'
ZERO_STAMP = 'zero_stamp'
FRAME_ID = 'frame_id'
BAD_IMAGE = 'bad_image'
STATIC = 'static'
MAP_FULL = 'map_full'
BAD_POSE = 'bad_pose'
WORKER_ERROR = 'worker_error'
RESET = 'reset'
INACTIVE = 'inactive'
DROP_REASONS = {
    SUPERSEDED: 'a newer image came before its turn (queue: latest)',
    QUEUE_FULL: 'queue_size images were waiting already (queue: lossless)',
    REPEATED: 'its stamp is that of the image before',
    LATE: 'its stamp is older than that of an image before',
    ZERO_STAMP: 'it has no stamp, and zero_stamp or the other images forbid to give it one',
    FRAME_ID: 'its frame id is empty, the map frame, or not that of the images before',
    BAD_IMAGE: 'unsupported encoding, or malformed',
    STATIC: 'it shows no motion, and the map waits for some to begin (motion_gate)',
    MAP_FULL: 'the map holds max_keyframes keyframes (on_limit: stop)',
    BAD_POSE: 'the network gave a pose that is not finite',
    WORKER_ERROR: 'an exception while it was processed',
    RESET: 'a new map was started while it waited',
    INACTIVE: 'the node was deactivated or stopped while it waited',
}


class Dropped(Exception):
    """Says why an image is not processed: one of DROP_REASONS, and a line for the log."""

    def __init__(self, reason: str, why: str = ''):
        super().__init__(why)
        self.reason = reason


@dataclass(eq=False)
class Frame:
    """An admitted image on its way through the node."""

    message: Image
    stamp: Time  # what all outputs carry
    frame_id: str
    arrival_s: float  # time.monotonic()
    session: object = None  # the MapSession it belongs to, set when the worker takes it

    @property
    def stamp_ns(self) -> int:
        return to_ns(self.stamp)

    def header(self, frame_id: str) -> Header:
        return Header(stamp=self.stamp, frame_id=frame_id)


def to_ns(stamp: Time) -> int:
    return stamp.sec * 1_000_000_000 + stamp.nanosec


def to_stamp(stamp_ns: int) -> Time:
    return Time(sec=stamp_ns // 1_000_000_000, nanosec=stamp_ns % 1_000_000_000)
