"""What others say about frames on /tf and /tf_static, and what it means for ours (REP-105)."""

from __future__ import annotations

import math

from geometry_msgs.msg import Transform, TransformStamped
from lingbot_map.mapping.map_frame import rotation_matrix
from lingbot_map_ros.frame import to_ns
import numpy as np
from rclpy.time import Time
from tf2_msgs.msg import TFMessage
from tf2_ros import Buffer, TransformException, TransformListener

_JUMP_NS = 1_000_000_000  # stamps of one frame that go back by more
_SAY_AGAIN_S = 30.0
_LENGTH_TOLERANCE = 5e-3  # of quaternions, that of tf2


class NoTransform(LookupError):
    """Tell in a few words which transform is missing, and why."""


class FrameTree:
    """
    Knows where frames are, and which have a parent other than the map; usable from any thread.

    Stamps that jump back, as when a bag starts again, have all that moves forgotten. With
    `only_static` nothing moves.
    """

    def __init__(self, node, map_frame: str, only_static: bool = False):
        self.parents: dict[str, str] = {}  # child -> parent
        self._static_parents: dict[str, str] = {}
        self._map_frame = map_frame
        self._buffer = Buffer()
        self._newest_ns: dict[str, int] = {}  # by child
        self._listener = _Listener(self._buffer, node, self._clear_after_jump, self._note)
        if only_static:  # /tf may be busy
            node.destroy_subscription(self._listener.tf_sub)

    def close(self) -> None:
        self._listener.unregister()

    def forget_rivals(self) -> None:
        """Forget who moves frames that should be ours: they may have stopped."""
        self.parents = dict(self._static_parents)

    def rival_parent(self, child: str) -> str:
        """Return the parent that somebody else has given to a frame, or ''."""
        parent = self.parents.get(child, self._map_frame)
        return '' if parent == self._map_frame else parent

    def extrinsics(self, base: str, camera: str) -> np.ndarray:
        """Return T_base_camera (4, 4) of a camera that does not move on its robot."""
        if camera == base:
            raise NoTransform(f"the images come in '{base}' itself, not in an optical frame of it")
        try:
            found = self._buffer.lookup_transform(base, camera, Time())
        except TransformException as error:
            raise NoTransform(f"no transform '{base}' -> '{camera}' on /tf_static") from error
        if found.header.stamp.sec or found.header.stamp.nanosec:  # none if all of it is static
            raise NoTransform(f"the transform '{base}' -> '{camera}' is not on /tf_static only")
        return matrix(found.transform)

    def lookup(self, target: str, source: str, stamp_ns: int) -> np.ndarray:
        """Return T_target_source (4, 4) at a time."""
        try:
            found = self._buffer.lookup_transform(target, source, Time(nanoseconds=stamp_ns))
        except TransformException as error:
            raise NoTransform(str(error).strip()) from error
        return matrix(found.transform)

    def _clear_after_jump(self, message: TFMessage) -> None:
        """Make room in the buffer for older times: it would refuse them."""
        for told in message.transforms:
            if told.header.frame_id == self._map_frame:
                continue  # perhaps our own, which follow those of the others
            stamp_ns = to_ns(told.header.stamp)
            if stamp_ns < self._newest_ns.get(told.child_frame_id, 0) - _JUMP_NS:
                self._buffer.clear()
                self._newest_ns.clear()
                self.forget_rivals()
            newest_ns = self._newest_ns.get(told.child_frame_id, 0)
            self._newest_ns[told.child_frame_id] = max(newest_ns, stamp_ns)

    def _note(self, message: TFMessage, is_static: bool) -> None:
        for told in message.transforms:
            child, parent = told.child_frame_id.lstrip('/'), told.header.frame_id.lstrip('/')
            if child in self.parents and parent == self._map_frame:
                continue  # perhaps our own, and no reason to forget the parent of somebody else
            self.parents[child] = parent
            if is_static:
                self._static_parents[child] = parent


class _Listener(TransformListener):
    """Passes on what it hears, before and after it is in the buffer."""

    def __init__(self, buffer: Buffer, node, prepare, note):
        self._logger, self._prepare, self._note = node.get_logger(), prepare, note
        super().__init__(buffer, node)

    def callback(self, data: TFMessage) -> None:
        self._leave_out_nonsense(data)
        self._prepare(data)
        super().callback(data)
        self._note(data, is_static=False)

    def static_callback(self, data: TFMessage) -> None:
        self._leave_out_nonsense(data)
        super().static_callback(data)
        self._note(data, is_static=True)

    def _leave_out_nonsense(self, data: TFMessage) -> None:
        """
        Keep from the buffer what is no place.

        It would take infinity and give NaN, and complain of each of the others.
        """
        for told in [told for told in data.transforms if not _is_place(told)]:
            data.transforms.remove(told)
            pair = f"'{told.header.frame_id}' -> '{told.child_frame_id}'"
            self._logger.warning(
                f'the transform {pair} is ignored: it needs two frames, finite numbers, a '
                'quaternion of length 1 and a stamp that is not negative',
                throttle_duration_sec=_SAY_AGAIN_S,
            )


def _is_place(told: TransformStamped) -> bool:
    t, q = told.transform.translation, told.transform.rotation
    child, parent = told.child_frame_id.lstrip('/'), told.header.frame_id.lstrip('/')
    return (
        all(map(math.isfinite, (t.x, t.y, t.z)))
        and abs(math.hypot(q.x, q.y, q.z, q.w) - 1) < _LENGTH_TOLERANCE
        and told.header.stamp.sec >= 0
        and '' != child != parent != ''
    )


def matrix(transform: Transform) -> np.ndarray:
    """Return a transform as (4, 4)."""
    t, q = transform.translation, transform.rotation
    T = np.eye(4)
    T[:3, :3] = rotation_matrix(np.array([q.x, q.y, q.z, q.w]))
    T[:3, 3] = t.x, t.y, t.z
    return T
