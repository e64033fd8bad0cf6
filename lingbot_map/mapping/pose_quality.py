"""How far a pose can be trusted: jumps between images, and the covariance of each."""

from collections import deque
from dataclasses import dataclass
import statistics

from lingbot_map.geometry import invert
from lingbot_map.mapping.map_frame import MappedFrame
import numpy as np
import torch

_SPEEDS = 30  # of the newest poses, from which the usual speed is taken
_LEAST_SPEEDS = 5
_SPEED_FACTOR = 8.0
_DEPTH_PART = 0.5  # a shorter step than this part of the scene's depth is none to worry about
_MAX_TURN_DEG = 60.0  # few cameras see the same things after that
# A confidence c that is trained with the loss c * error - ALPHA * log(c) settles at
# c = ALPHA / error: so ALPHA / c is the error of depth to expect, relative to the scene's depth.
ALPHA = 0.2
UNKNOWN_VARIANCE = 1e6
_MIN_DEPTH = 1e-8  # spec section 12: what counts as a valid depth
_STRIDE = 4  # of the pixels that are looked at


class JumpWatch:
    """Compares each pose of one map with the pose before; the unit of length is of no matter."""

    def __init__(self):
        self._previous: tuple[np.ndarray, int] | None = None
        self._speeds: deque[float] = deque(maxlen=_SPEEDS)

    def see(self, T_map_cam: np.ndarray, stamp_ns: int, depth: float) -> str:
        """
        Return what is wrong with the step to a pose (4, 4); '' if nothing is.

        `depth` is the scene's, NaN if not known; stamps increase.
        """
        previous, self._previous = self._previous, (T_map_cam, stamp_ns)
        if previous is None:
            return ''
        T_step = invert(previous[0]) @ T_map_cam
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


@dataclass(frozen=True)
class Scene:
    """What one image looks at; both are NaN when it has no valid depth."""

    depth: float  # median over valid pixels, map units
    confidence: float  # mean over valid pixels


def look_at(frame: MappedFrame) -> Scene:
    """Return the scene of an image; one copy of two numbers leaves the device."""
    depth = frame.depth[::_STRIDE, ::_STRIDE]
    confidence = frame.confidence[::_STRIDE, ::_STRIDE]
    valid = torch.isfinite(depth) & (depth > _MIN_DEPTH) & torch.isfinite(confidence)
    nan = torch.nan
    both = torch.stack(
        (torch.where(valid, depth, nan).nanmedian(), torch.where(valid, confidence, nan).nanmean())
    )
    return Scene(*both.tolist())


def pose_covariance(scene: Scene) -> np.ndarray:
    """
    Return the covariance (6, 6) of x y z [map unit] and the rotations about them [rad].

    With the relative error e = ALPHA / confidence, the standard deviation is e times the scene's
    depth for positions and e for rotations, alike for all axes and uncorrelated. That orders
    images by how far to trust them; it is not calibrated, and leaves out drift. Without a valid
    depth nothing is known: 1e6.
    """
    with np.errstate(all='ignore'):
        error = ALPHA / np.float64(scene.confidence)
        position, rotation = (error * scene.depth) ** 2, error**2
    variances = np.repeat([position, rotation], 3)
    if not (np.isfinite(variances).all() and (variances > 0).all()):
        variances = np.full(6, UNKNOWN_VARIANCE)
    return np.diag(variances)
