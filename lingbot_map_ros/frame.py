"""An admitted image, and the reasons for dropping one."""

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
    SUPERSEDED: 'a newer image replaced it before it was processed (queue: latest)',
    QUEUE_FULL: 'queue_size images were already waiting (queue: lossless)',
    REPEATED: 'it has the same stamp as the previous image',
    LATE: 'its stamp is older than that of an earlier image',
    ZERO_STAMP: 'it has no stamp, and zero_stamp or earlier images rule out the arrival time',
    FRAME_ID: 'its frame id is empty, is the map frame, or differs from that of earlier images',
    BAD_IMAGE: 'unsupported encoding, or malformed',
    STATIC: 'it shows no motion, and the map only starts once the camera moves (motion_gate)',
    MAP_FULL: 'the map holds max_keyframes keyframes (on_limit: stop)',
    BAD_POSE: 'the network returned a pose that is not finite',
    WORKER_ERROR: 'an exception occurred while it was processed',
    RESET: 'a new map was started while it waited',
    INACTIVE: 'the node was deactivated or stopped before it was processed',
}


class Dropped(Exception):
    """An image is not processed: `reason` is one of DROP_REASONS, the message a line to log."""

    def __init__(self, reason: str, why: str = ''):
        super().__init__(why)
        self.reason = reason


@dataclass(eq=False)
class Frame:
    """An admitted image with its stamp, frame id and map."""

    message: Image
    stamp: Time  # of all outputs
    frame_id: str
    arrival_s: float  # time.monotonic()
    session: object = None  # its MapSession; set when the worker takes it

    @property
    def stamp_ns(self) -> int:
        return to_ns(self.stamp)

    def header(self, frame_id: str) -> Header:
        return Header(stamp=self.stamp, frame_id=frame_id)


def to_ns(stamp: Time) -> int:
    return stamp.sec * 1_000_000_000 + stamp.nanosec


def to_stamp(stamp_ns: int) -> Time:
    return Time(sec=stamp_ns // 1_000_000_000, nanosec=stamp_ns % 1_000_000_000)
