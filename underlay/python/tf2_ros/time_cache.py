"""Caches of the transforms from one frame to its parent, over time."""

from bisect import bisect_left
from dataclasses import dataclass

from geometry_msgs.msg import Transform
import numpy as np
from tf2_ros.exceptions import ExtrapolationException

_NS = 1e9


@dataclass(frozen=True)
class Link:
    """Pose of a frame in its parent: translation (3,), unit quaternion xyzw (4,)."""

    parent: str
    t: np.ndarray
    q: np.ndarray

    @classmethod
    def of(cls, parent: str, transform: Transform) -> 'Link':
        t, q = transform.translation, transform.rotation
        return cls(parent, np.array([t.x, t.y, t.z]), np.array([q.x, q.y, q.z, q.w]))

    def matrix(self) -> np.ndarray:
        """Return the transform (4, 4) from the frame to its parent."""
        x, y, z, w = self.q
        T = np.eye(4)
        T[:3, :3] = [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
        T[:3, 3] = self.t
        return T


class StaticCache:
    """A static link, valid at any time."""

    latest_ns: int | None = None

    def __init__(self, link: Link):
        self._link = link

    def at(self, _time_ns: int | None) -> Link:
        return self._link

    def clear(self) -> None:
        """Do nothing: static links are kept."""


class TimeCache:
    """Links over time, for the last `length_ns`."""

    def __init__(self, length_ns: int):
        self._length_ns = length_ns
        self.clear()

    def clear(self) -> None:
        self._stamps_ns: list[int] = []
        self._links: list[Link] = []

    @property
    def latest_ns(self) -> int:
        return self._stamps_ns[-1] if self._stamps_ns else 0

    def insert(self, stamp_ns: int, link: Link) -> bool:
        """Add a link; return False if it is too old."""
        oldest_ns = max(self.latest_ns, stamp_ns) - self._length_ns
        if stamp_ns < oldest_ns:
            return False
        i = bisect_left(self._stamps_ns, stamp_ns)
        is_known = i < len(self._stamps_ns) and self._stamps_ns[i] == stamp_ns
        self._stamps_ns[i : i + is_known], self._links[i : i + is_known] = [stamp_ns], [link]
        outdated = bisect_left(self._stamps_ns, oldest_ns)
        del self._stamps_ns[:outdated], self._links[:outdated]
        return True

    def at(self, time_ns: int | None) -> Link | None:
        """Return the interpolated link at `time_ns` (None: the latest), or None if empty."""
        if not self._stamps_ns:
            return None
        i = len(self._stamps_ns) - 1 if time_ns is None else bisect_left(self._stamps_ns, time_ns)
        if time_ns is None or (i < len(self._stamps_ns) and self._stamps_ns[i] == time_ns):
            return self._links[i]
        self._check_range(time_ns)
        before, after = self._links[i - 1], self._links[i]
        if before.parent != after.parent:
            return before
        begin_ns, end_ns = self._stamps_ns[i - 1], self._stamps_ns[i]
        return _between(before, after, (time_ns - begin_ns) / (end_ns - begin_ns))

    def _check_range(self, time_ns: int) -> None:
        first_ns, last_ns, asked = self._stamps_ns[0], self._stamps_ns[-1], time_ns / _NS
        if first_ns == last_ns:
            raise ExtrapolationException(
                f'Lookup would require extrapolation at time {asked:.6f}, but only time '
                f'{first_ns / _NS:.6f} is in the buffer'
            )
        if time_ns > last_ns:
            raise ExtrapolationException(
                'Lookup would require extrapolation into the future.  Requested time '
                f'{asked:.6f} but the latest data is at time {last_ns / _NS:.6f}'
            )
        if time_ns < first_ns:
            raise ExtrapolationException(
                'Lookup would require extrapolation into the past.  Requested time '
                f'{asked:.6f} but the earliest data is at time {first_ns / _NS:.6f}'
            )


def _between(before: Link, after: Link, ratio: float) -> Link:
    """Interpolate at `ratio` (0 to 1): linear translation, spherical rotation."""
    cosine = before.q @ after.q
    q_after = -after.q if cosine < 0 else after.q
    angle = np.arccos(min(abs(cosine), 1.0))
    if angle < 1e-6:
        q = (1 - ratio) * before.q + ratio * q_after
    else:
        q = np.sin((1 - ratio) * angle) * before.q + np.sin(ratio * angle) * q_after
    t = (1 - ratio) * before.t + ratio * after.t
    return Link(before.parent, t, q / np.linalg.norm(q))
