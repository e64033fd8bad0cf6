import threading
import time as wall

from geometry_msgs.msg import TransformStamped
import numpy as np
from rclpy.clock import Clock, JumpThreshold, TimeJump
from rclpy.duration import Duration
from rclpy.logging import get_logger
from rclpy.node import Node
from rclpy.time import Time
from tf2_ros.exceptions import (
    ConnectivityException,
    ExtrapolationException,
    InvalidArgumentException,
    LookupException,
    TransformException,
)
from tf2_ros.time_cache import Link, StaticCache, TimeCache

_CACHE_TIME = Duration(seconds=10)
_NORM_TOLERANCE = 1e-3


class Buffer:
    """
    Stores transforms over time and looks them up between any two frames. Thread-safe.

    If the clock jumps back, all transforms but the static ones are cleared.
    """

    def __init__(self, cache_time: Duration | None = None, node: Node | None = None) -> None:
        self._length_ns = (cache_time or _CACHE_TIME).nanoseconds
        self._caches: dict[str, StaticCache | TimeCache] = {}
        self._frames: set[str] = set()
        self._changed = threading.Condition()
        self.clock = Clock() if node is None else node.get_clock()
        threshold = JumpThreshold(
            min_forward=None, min_backward=Duration(seconds=-1), on_clock_change=True
        )
        self.jump_handle = self.clock.create_jump_callback(
            threshold, post_callback=self.time_jump_callback
        )

    def time_jump_callback(self, time_jump: TimeJump) -> None:
        get_logger('tf2_buffer').warning('Detected jump back in time. Clearing tf buffer.')
        self.clear()

    def clear(self) -> None:
        """Clear all transforms but the static ones."""
        with self._changed:
            for cache in self._caches.values():
                cache.clear()

    def set_transform(self, transform: TransformStamped, authority: str) -> None:
        """Add the pose of a frame at the stamp of the header."""
        child, link = transform.child_frame_id.lstrip('/'), _checked(transform, authority)
        if link is None:
            return
        stamp_ns = Time.from_msg(transform.header.stamp).nanoseconds
        with self._changed:
            cache = self._caches.get(child)
            if not isinstance(cache, TimeCache):
                cache = self._caches[child] = TimeCache(self._length_ns)
            if not cache.insert(stamp_ns, link):
                get_logger('tf2_buffer').warning(
                    f'TF_OLD_DATA ignoring data from the past for frame {child} at time '
                    f'{stamp_ns / 1e9:.6f} according to authority {authority}'
                )
            self._note(child, link)

    def set_transform_static(self, transform: TransformStamped, authority: str) -> None:
        """Set the pose of a frame that is valid at any time."""
        child, link = transform.child_frame_id.lstrip('/'), _checked(transform, authority)
        if link is not None:
            with self._changed:
                self._caches[child] = StaticCache(link)
                self._note(child, link)

    def _note(self, child: str, link: Link) -> None:
        self._frames |= {child, link.parent}
        self._changed.notify_all()

    def can_transform(
        self,
        target_frame: str,
        source_frame: str,
        time: Time,
        timeout: Duration = Duration(),  # noqa: B008 - as in tf2_ros, and it never changes
        return_debug_tuple: bool = False,
    ) -> bool | tuple[bool, str]:
        """Return whether a lookup would succeed; wait for it up to `timeout`."""
        deadline_s = wall.monotonic() + timeout.nanoseconds / 1e9
        with self._changed:
            while True:
                error = self._lookup_error(target_frame, source_frame, time)
                left_s = deadline_s - wall.monotonic()
                if not error or left_s <= 0:
                    return (not error, error) if return_debug_tuple else not error
                self._changed.wait(left_s)

    def _lookup_error(self, target_frame: str, source_frame: str, time: Time) -> str:
        try:
            self._find(target_frame, source_frame, time.nanoseconds)
        except TransformException as error:
            return str(error)
        return ''

    def lookup_transform(
        self,
        target_frame: str,
        source_frame: str,
        time: Time,
        timeout: Duration = Duration(),  # noqa: B008 - as in tf2_ros, and it never changes
    ) -> TransformStamped:
        """
        Return the transform from `source_frame` to `target_frame`; time 0 is the latest.

        Its stamp is the latest time available for all frames in between, or 0 if all are static.
        Raises TransformException if there is none after waiting up to `timeout`.
        """
        self.can_transform(target_frame, source_frame, time, timeout)
        with self._changed:
            time_ns, T = self._find(target_frame, source_frame, time.nanoseconds)
        return _message(target_frame, source_frame, time_ns, T)

    def _find(self, target: str, source: str, time_ns: int) -> tuple[int, np.ndarray]:
        self._check_frame('target_frame', target)
        self._check_frame('source_frame', source)
        if time_ns == 0:
            up, down = self._paths(target, source, None)
            moving = [self._caches[frame].latest_ns for frame, _ in (*up, *down)]
            time_ns = min((ns for ns in moving if ns is not None), default=0)
        up, down = self._paths(target, source, time_ns)
        T_top_source, T_top_target = np.eye(4), np.eye(4)
        for _, link in up:
            T_top_source = link.matrix() @ T_top_source
        for _, link in down:
            T_top_target = link.matrix() @ T_top_target
        return time_ns, np.linalg.inv(T_top_target) @ T_top_source

    def _check_frame(self, argument: str, frame: str) -> None:
        where = f'passed to lookupTransform argument {argument}'
        if not frame or frame.startswith('/'):
            raise InvalidArgumentException(
                f'Invalid argument "{frame}" {where} - in tf2 frame_ids cannot be empty or start '
                "with a '/'"
            )
        if frame not in self._frames:
            raise LookupException(f'"{frame}" {where} does not exist.')

    def _paths(self, target: str, source: str, time_ns: int | None) -> tuple[list, list]:
        """Return the links from source and from target up to their common ancestor."""
        up, up_error = self._walk(source, time_ns)
        down, down_error = self._walk(target, time_ns)
        above_source = [source, *(link.parent for _, link in up)]
        above_target = [target, *(link.parent for _, link in down)]
        for count, frame in enumerate(above_target):
            if frame in above_source:
                return up[: above_source.index(frame)], down[:count]
        for error in (up_error, down_error):
            if error is not None:
                raise ExtrapolationException(
                    f'{error}, when looking up transform from frame [{source}] to frame [{target}]'
                )
        raise ConnectivityException(
            f"Could not find a connection between '{target}' and '{source}' because they are not "
            'part of the same tree. Tf has two or more unconnected trees.'
        )

    def _walk(self, frame: str, time_ns: int | None) -> tuple[list, TransformException | None]:
        """Return (frame, link) from a frame to its root, and the error if it ends before."""
        links = []
        while frame in self._caches and len(links) <= len(self._caches):
            try:
                link = self._caches[frame].at(time_ns)
            except ExtrapolationException as error:
                return links, error
            if link is None:
                break
            links.append((frame, link))
            frame = link.parent
        return links, None


def _checked(transform: TransformStamped, authority: str) -> Link | None:
    child, parent = transform.child_frame_id.lstrip('/'), transform.header.frame_id.lstrip('/')
    link = Link.of(parent, transform.transform)
    problem = ''
    if child == parent:
        problem = 'TF_SELF_TRANSFORM'
    elif not child:
        problem = 'TF_NO_CHILD_FRAME_ID'
    elif not parent:
        problem = 'TF_NO_FRAME_ID'
    elif np.isnan(link.t).any() or np.isnan(link.q).any():
        problem = 'TF_NAN_INPUT'
    elif abs(link.q @ link.q - 1) > _NORM_TOLERANCE:
        problem = 'TF_DENORMALIZED_QUATERNION'
    if not problem:
        return link
    get_logger('tf2_buffer').error(
        f'{problem}: Ignoring transform from authority "{authority}" with frame_id "{parent}" and '
        f'child_frame_id "{child}"'
    )
    return None


def _message(target: str, source: str, time_ns: int, T: np.ndarray) -> TransformStamped:
    message = TransformStamped(child_frame_id=source)
    message.header.frame_id, message.header.stamp = target, Time(nanoseconds=time_ns).to_msg()
    t, q = message.transform.translation, message.transform.rotation
    t.x, t.y, t.z = T[:3, 3].tolist()
    q.x, q.y, q.z, q.w = _quaternion(T[:3, :3]).tolist()
    return message


def _quaternion(R: np.ndarray) -> np.ndarray:
    """Return the unit quaternion xyzw of a rotation, with the method of Bar-Itzhack."""
    K = np.zeros((4, 4))
    K[:3, :3] = R + R.T - np.trace(R) * np.eye(3)
    K[3, :3] = K[:3, 3] = R[2, 1] - R[1, 2], R[0, 2] - R[2, 0], R[1, 0] - R[0, 1]
    K[3, 3] = np.trace(R)
    q = np.linalg.eigh(K)[1][:, -1]
    return -q if q[3] < 0 else q
