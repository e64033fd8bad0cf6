"""Poses that no camera can have moved to since the image before."""

from collections import deque
import statistics

from lingbot_map.geometry import invert
import numpy as np

_SPEEDS = 30  # of the newest poses, from which the usual speed is taken
_LEAST_SPEEDS = 5
_SPEED_FACTOR = 8.0
_DEPTH_PART = 0.5  # a shorter step than this part of the scene's depth is none to worry about
_MAX_TURN_DEG = 60.0  # few cameras see the same things after that


class JumpWatch:
    """Compares each pose of one map with the pose before; the unit of length is of no matter."""

    def __init__(self):
        self._previous: tuple[np.ndarray, int] | None = None
        self._speeds: deque[float] = deque(maxlen=_SPEEDS)

    def see(self, T_world_cam: np.ndarray, stamp_ns: int, depth: float) -> str:
        """
        Return what is wrong with the step to a pose (4, 4); '' if nothing is.

        `depth` is the scene's, NaN if not known; stamps increase.
        """
        previous, self._previous = self._previous, (T_world_cam, stamp_ns)
        if previous is None:
            return ''
        T_step = invert(previous[0]) @ T_world_cam
        step, seconds = float(np.linalg.norm(T_step[:3, 3])), (stamp_ns - previous[1]) / 1e9
        turn_deg = np.degrees(np.arccos(np.clip((np.trace(T_step[:3, :3]) - 1) / 2, -1, 1)))
        is_too_fast = self._is_too_fast(step / seconds)
        if turn_deg > _MAX_TURN_DEG:
            return f'the pose turned by {turn_deg:.0f} degrees from one image to the next'
        if is_too_fast and step > _DEPTH_PART * depth:
            return (
                f'the pose jumped by {step / depth:.2g} times the depth of the scene from one '
                'image to the next, far more than before'
            )
        return ''

    def _is_too_fast(self, speed: float) -> bool:
        known = len(self._speeds) >= _LEAST_SPEEDS
        usual = statistics.median(self._speeds) if known else float('inf')
        self._speeds.append(speed)
        return speed > _SPEED_FACTOR * usual
