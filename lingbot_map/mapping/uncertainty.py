"""How sure a pose is, judged by the network's confidence in the depth of the same image."""

from dataclasses import dataclass

from lingbot_map.streaming.frame import FrameResult
import numpy as np
import torch

# A confidence c that is trained with the loss c * error - ALPHA * log(c) settles at
# c = ALPHA / error: so ALPHA / c is the error of depth to expect, relative to the scene's depth.
ALPHA = 0.2
UNKNOWN_VARIANCE = 1e6
_MIN_DEPTH = 1e-8  # spec section 12: what counts as a valid depth
_STRIDE = 4  # of the pixels that are looked at


@dataclass(frozen=True)
class Scene:
    """What one image looks at; both are NaN when it has no valid depth."""

    depth: float  # median over valid pixels, network units
    confidence: float  # mean over valid pixels


def look_at(result: FrameResult) -> Scene:
    """Return the scene of an image; one copy of two numbers leaves the device."""
    depth = result.depth[::_STRIDE, ::_STRIDE]
    confidence = result.confidence[::_STRIDE, ::_STRIDE]
    valid = torch.isfinite(depth) & (depth > _MIN_DEPTH) & torch.isfinite(confidence)
    nan = torch.nan
    both = torch.stack(
        (torch.where(valid, depth, nan).nanmedian(), torch.where(valid, confidence, nan).nanmean())
    )
    return Scene(*both.tolist())


def pose_covariance(scene: Scene, scale: float) -> np.ndarray:
    """
    Return the covariance (6, 6) of x y z [map unit] and the rotations about them [rad].

    With the relative error e = ALPHA / confidence, the standard deviation is e times the scene's
    depth for positions and e for rotations, alike for all axes and uncorrelated. That orders
    images by how far to trust them; it is not calibrated, and leaves out drift. Without a valid
    depth nothing is known: 1e6.

    `scale`: map units per network unit.
    """
    with np.errstate(all='ignore'):
        error = ALPHA / np.float64(scene.confidence)
        position, rotation = (error * scene.depth * scale) ** 2, error**2
    variances = np.repeat([position, rotation], 3)
    if not (np.isfinite(variances).all() and (variances > 0).all()):
        variances = np.full(6, UNKNOWN_VARIANCE)
    return np.diag(variances)
