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
    Keeps what is told about frames, and says where one was in another at some time.

    A jump back of the clock forgets all that moves. Safe to use from any thread.
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
        """Forget all that moves."""
        with self._changed:
            for cache in self._caches.values():
                cache.clear()

    def set_transform(self, transform: TransformStamped, authority: str) -> None:
        """Take the place of a frame at the time of the header."""
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
        """Take the place of a frame that holds at any time."""
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
        """Tell whether a lookup would succeed, waiting for it up to `timeout`."""
        deadline_s = wall.monotonic() + timeout.nanoseconds / 1e9
        with self._changed:
            while True:
                why = self._obstacle(target_frame, source_frame, time)
                left_s = deadline_s - wall.monotonic()
                if not why or left_s <= 0:
                    return (not why, why) if return_debug_tuple else not why
                self._changed.wait(left_s)

    def _obstacle(self, target_frame: str, source_frame: str, time: Time) -> str:
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

        That has the stamp of the latest time that all frames between have, or 0 if none moves.
        TransformException: there is none, also after waiting up to `timeout`.
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
        """Return the links from the source, and from the target, up to where they meet."""
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
        """Return (frame, link) from a frame upwards, and why it ends before the root."""
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
    trouble = ''
    if child == parent:
        trouble = 'TF_SELF_TRANSFORM'
    elif not child:
        trouble = 'TF_NO_CHILD_FRAME_ID'
    elif not parent:
        trouble = 'TF_NO_FRAME_ID'
    elif np.isnan(link.t).any() or np.isnan(link.q).any():
        trouble = 'TF_NAN_INPUT'
    elif abs(link.q @ link.q - 1) > _NORM_TOLERANCE:
        trouble = 'TF_DENORMALIZED_QUATERNION'
    if not trouble:
        return link
    get_logger('tf2_buffer').error(
        f'{trouble}: Ignoring transform from authority "{authority}" with frame_id "{parent}" and '
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
    """Return the unit quaternion xyzw of a rotation: the eigenvector of Bar-Itzhack's matrix."""
    K = np.zeros((4, 4))
    K[:3, :3] = R + R.T - np.trace(R) * np.eye(3)
    K[3, :3] = K[:3, 3] = R[2, 1] - R[1, 2], R[0, 2] - R[2, 0], R[1, 0] - R[0, 1]
    K[3, 3] = np.trace(R)
    q = np.linalg.eigh(K)[1][:, -1]
    return -q if q[3] < 0 else q
