"""Quality of poses: jumps between consecutive images, and a covariance for each pose."""

from collections import deque
from dataclasses import dataclass
import statistics

from lingbot_map.geometry import invert
from lingbot_map.mapping.map_frame import MappedFrame
import numpy as np
import torch

# JumpWatch
_SPEEDS = 30  # newest speeds, whose median is the usual speed
_LEAST_SPEEDS = 5
_SPEED_FACTOR = 8.0  # times the usual speed
_MIN_STEP = 0.5  # of the scene's depth; shorter steps are never a jump
_MAX_ROTATION_DEG = 60.0  # beyond it, few cameras still see the same scene
# Covariance
# Training minimizes c * error - ALPHA * log(c) over the confidence c, so c approaches
# ALPHA / error, and ALPHA / c estimates the depth error relative to the scene's depth.
ALPHA = 0.2
UNKNOWN_VARIANCE = 1e6
_MIN_DEPTH = 1e-8  # of a valid depth, spec section 12
_STRIDE = 4  # between the pixels used


class JumpWatch:
    """Compares each pose of a map with the previous one; works in any unit of length."""

    def __init__(self):
        self._previous: tuple[np.ndarray, int] | None = None
        self._speeds: deque[float] = deque(maxlen=_SPEEDS)

    def check(self, T_map_cam: np.ndarray, stamp_ns: int, depth: float) -> str:
        """
        Return a text about a jump to the pose (4, 4), or '' if there is none.

        `depth` is that of the scene, NaN if unknown. Stamps must increase.
        """
        previous, self._previous = self._previous, (T_map_cam, stamp_ns)
        if previous is None:
            return ''
        T_step = invert(previous[0]) @ T_map_cam
        step, seconds = float(np.linalg.norm(T_step[:3, 3])), (stamp_ns - previous[1]) / 1e9
        rotation_deg = np.degrees(np.arccos(np.clip((np.trace(T_step[:3, :3]) - 1) / 2, -1, 1)))
        is_too_fast = self._is_too_fast(step / seconds)
        if rotation_deg > _MAX_ROTATION_DEG:
            return f'the pose rotated by {rotation_deg:.0f} degrees from one image to the next'
        if is_too_fast and step > _MIN_STEP * depth:
            return (
                f'the pose jumped by {step / depth:.2g} times the scene depth from one image to '
                'the next, far more than before'
            )
        return ''

    def _is_too_fast(self, speed: float) -> bool:
        known = len(self._speeds) >= _LEAST_SPEEDS
        usual = statistics.median(self._speeds) if known else float('inf')
        self._speeds.append(speed)
        return speed > _SPEED_FACTOR * usual


@dataclass(frozen=True)
class Scene:
    """Depth and confidence of one image; both are NaN if no depth is valid."""

    depth: float  # median over valid pixels, map units
    confidence: float  # mean over valid pixels


def measure_scene(frame: MappedFrame) -> Scene:
    """Return depth and confidence of an image; copies two numbers from the device, once."""
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
    depth for positions and e for rotations, equal for all axes and uncorrelated. It ranks images
    by reliability; it is not calibrated and does not include drift. Without a valid depth all
    variances are 1e6.
    """
    with np.errstate(all='ignore'):
        error = ALPHA / np.float64(scene.confidence)
        position, rotation = (error * scene.depth) ** 2, error**2
    variances = np.repeat([position, rotation], 3)
    if not (np.isfinite(variances).all() and (variances > 0).all()):
        variances = np.full(6, UNKNOWN_VARIANCE)
    return np.diag(variances)
