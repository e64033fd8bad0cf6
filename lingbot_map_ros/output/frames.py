"""Receive the transforms of other nodes on /tf and /tf_static, and detect conflicts (REP-105)."""

from __future__ import annotations

import math
import time

from geometry_msgs.msg import Transform, TransformStamped
from lingbot_map.mapping.map_frame import rotation_matrix
from lingbot_map_ros.frame import to_ns
import numpy as np
from rclpy.time import Time
from tf2_msgs.msg import TFMessage
from tf2_ros import Buffer, TransformException, TransformListener

_JUMP_NS = 1_000_000_000  # stamps of a frame that go back by more are a time jump
_WARN_PERIOD_S = 30.0
_LENGTH_TOLERANCE = 5e-3  # of quaternions, as in tf2


class NoTransform(LookupError):
    """A transform is missing; the text says which one and why."""


class FrameTree:
    """
    Looks up transforms, and knows frames whose parent is not the map. Thread-safe.

    When stamps jump back, as when a bag restarts, all but the static transforms are cleared. With
    `only_static`, /tf is not subscribed.
    """

    def __init__(self, node, map_frame: str, only_static: bool = False):
        self.parents: dict[str, str] = {}  # child -> parent
        self._received_s: dict[str, float] = {}  # when a parent was received; static ones last
        self._map_frame = map_frame
        self._buffer = Buffer()
        self._newest_ns: dict[str, int] = {}  # by child
        self._listener = _Listener(self._buffer, node, self._clear_after_jump, self._note)
        if only_static:  # /tf may be busy
            node.destroy_subscription(self._listener.tf_sub)

    def close(self) -> None:
        self._listener.unregister()

    def rival_parent(self, child: str, since_s: float) -> str:
        """Return the parent that another node has published for a frame since then, or ''."""
        parent = self.parents.get(child, self._map_frame)
        if parent == self._map_frame or self._received_s.get(child, -math.inf) < since_s:
            return ''
        return parent

    def extrinsics(self, base: str, camera: str) -> np.ndarray:
        """Return the static camera extrinsics T_base_camera (4, 4); raise NoTransform."""
        if camera == base:
            raise NoTransform(f"the images have the frame '{base}' itself, not an optical frame")
        try:
            found = self._buffer.lookup_transform(base, camera, Time())
        except TransformException as error:
            raise NoTransform(f"no transform '{base}' -> '{camera}' on /tf_static") from error
        if found.header.stamp.sec or found.header.stamp.nanosec:  # 0 if all links are static
            raise NoTransform(
                f"the transform '{base}' -> '{camera}' is not completely on /tf_static"
            )
        return matrix(found.transform)

    def lookup(self, target: str, source: str, stamp_ns: int) -> np.ndarray:
        """Return T_target_source (4, 4) at a time; raise NoTransform."""
        try:
            found = self._buffer.lookup_transform(target, source, Time(nanoseconds=stamp_ns))
        except TransformException as error:
            raise NoTransform(str(error).strip()) from error
        return matrix(found.transform)

    def _clear_after_jump(self, message: TFMessage) -> None:
        """Clear the buffer if stamps jump back, since it would reject the older stamps."""
        for transform in message.transforms:
            if transform.header.frame_id == self._map_frame:
                continue  # may be our own, whose stamps follow those of others
            stamp_ns = to_ns(transform.header.stamp)
            if stamp_ns < self._newest_ns.get(transform.child_frame_id, 0) - _JUMP_NS:
                self._buffer.clear()
                self._newest_ns.clear()
                self._received_s = {c: s for c, s in self._received_s.items() if s == math.inf}
            newest_ns = self._newest_ns.get(transform.child_frame_id, 0)
            self._newest_ns[transform.child_frame_id] = max(newest_ns, stamp_ns)

    def _note(self, message: TFMessage, is_static: bool) -> None:
        for transform in message.transforms:
            child = transform.child_frame_id.lstrip('/')
            parent = transform.header.frame_id.lstrip('/')
            if child in self.parents and parent == self._map_frame:
                continue  # may be our own; keep the parent set by another node
            self.parents[child] = parent
            if self._received_s.get(child) != math.inf:
                self._received_s[child] = math.inf if is_static else time.monotonic()


class _Listener(TransformListener):
    """Removes invalid transforms, and calls `prepare` and `note` before and after buffering."""

    def __init__(self, buffer: Buffer, node, prepare, note):
        self._logger, self._prepare, self._note = node.get_logger(), prepare, note
        super().__init__(buffer, node)

    def callback(self, data: TFMessage) -> None:
        self._remove_invalid(data)
        self._prepare(data)
        super().callback(data)
        self._note(data, is_static=False)

    def static_callback(self, data: TFMessage) -> None:
        self._remove_invalid(data)
        super().static_callback(data)
        self._note(data, is_static=True)

    def _remove_invalid(self, data: TFMessage) -> None:
        """
        Remove invalid transforms from a message.

        The buffer would accept infinity and then return NaN; for the others it would log errors.
        """
        for transform in [transform for transform in data.transforms if not _is_valid(transform)]:
            data.transforms.remove(transform)
            pair = f"'{transform.header.frame_id}' -> '{transform.child_frame_id}'"
            self._logger.warning(
                f'the transform {pair} is ignored: it needs two frames, finite numbers, a '
                'quaternion of length 1 and a stamp that is not negative',
                throttle_duration_sec=_WARN_PERIOD_S,
            )


def _is_valid(transform: TransformStamped) -> bool:
    t, q = transform.transform.translation, transform.transform.rotation
    child, parent = transform.child_frame_id.lstrip('/'), transform.header.frame_id.lstrip('/')
    return (
        all(map(math.isfinite, (t.x, t.y, t.z)))
        and abs(math.hypot(q.x, q.y, q.z, q.w) - 1) < _LENGTH_TOLERANCE
        and transform.header.stamp.sec >= 0
        and '' != child != parent != ''
    )


def matrix(transform: Transform) -> np.ndarray:
    """Return a transform as (4, 4)."""
    t, q = transform.translation, transform.rotation
    T = np.eye(4)
    T[:3, :3] = rotation_matrix(np.array([q.x, q.y, q.z, q.w]))
    T[:3, 3] = t.x, t.y, t.z
    return T
