"""
Rectify images and their intrinsics with the calibration of a camera_info message.

As in sensor_msgs/CameraInfo, K, D and R describe the raw image and P the rectified image, both at
full resolution, before binning and region of interest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
from lingbot_map.errors import UserError
from lingbot_map.images.decoding import MAX_SIDE
import numpy as np

_MAX_SKEW = 1e-3  # of R @ R.T from identity
_COEFFICIENTS = {  # distortion model -> allowed numbers of coefficients
    'plumb_bob': (4, 5),
    'rational_polynomial': (8, 12, 14),
    'equidistant': (4,),
    'fisheye': (4,),  # another name of equidistant
}


class CameraInfoError(UserError):
    """A camera_info message cannot be used; the text is one line with the reason."""


@dataclass(frozen=True, eq=False)
class Camera:
    """A rectified camera and the maps that rectify its raw images."""

    size: tuple[int, int]  # width, height of raw and rectified images [px]
    K: np.ndarray  # (3, 3) float64 of the rectified image [px]
    maps: tuple[np.ndarray, np.ndarray] | None  # for cv2.remap; None: images need no rectification

    def rectify(self, image: np.ndarray, outside: Sequence[int]) -> np.ndarray:
        """Rectify a raw image (H, W[, C]); pixels outside of the raw image get `outside`."""
        if self.maps is None:
            return image
        return cv2.remap(
            image,
            *self.maps,
            cv2.INTER_LINEAR,
            borderMode=cv2.BORDER_CONSTANT,
            borderValue=outside,
        )


def camera_of(info, is_rectified: bool) -> Camera:
    """
    Return the camera of a sensor_msgs/CameraInfo of rclpy or of rosbags.

    `is_rectified`: the images are already rectified, so only P is used. Raises CameraInfoError if
    the camera is not calibrated, the distortion model is unknown, or the values are invalid.
    """
    size = _image_size(info)
    K, R, P = (np.array(m, float).reshape(3, -1) for m in (info.k, info.r, info.p))
    P, D = P[:, :3], np.array(info.d, float)
    if not all(np.isfinite(m).all() for m in (K, R, P, D)):
        raise CameraInfoError('it contains NaN or infinity')
    if K[0, 0] == 0 and (P[0, 0] == 0 or not is_rectified):
        raise CameraInfoError('the camera is not calibrated: its K is zero')
    K, P = (_of_image(m, info) for m in (K, P if P[0, 0] else K))
    if is_rectified:
        return Camera(size, _checked(P), None)
    if not D.any():
        return Camera(size, _checked(K), None)
    if not R.any():
        R = np.eye(3)
    if abs(R @ R.T - np.eye(3)).max() > _MAX_SKEW:
        raise CameraInfoError('its R is not a rotation')
    return Camera(size, _checked(P), _maps(info.distortion_model, D, _checked(K), R, P, size))


def _maps(
    model: str, D: np.ndarray, K: np.ndarray, R: np.ndarray, P: np.ndarray, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    counts = _COEFFICIENTS.get(model)
    if counts is None:
        raise CameraInfoError(
            f'its distortion model {model!r} is not supported: use {", ".join(_COEFFICIENTS)}'
        )
    if not D[counts[-1] :].any():  # some drivers pad with zeros
        D = D[: counts[-1]]
    if len(D) not in counts:
        allowed = ' or '.join(map(str, counts))
        raise CameraInfoError(f'{model} needs {allowed} coefficients, not {len(D)}')
    if model in ('equidistant', 'fisheye'):
        return cv2.fisheye.initUndistortRectifyMap(K, D, R, P, size, cv2.CV_16SC2)
    return cv2.initUndistortRectifyMap(K, D, R, P, size, cv2.CV_16SC2)


def _image_size(info) -> tuple[int, int]:
    width, height = (info.roi.width or info.width), (info.roi.height or info.height)
    width, height = width // max(1, info.binning_x), height // max(1, info.binning_y)
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
        raise CameraInfoError(
            f'its image size {width}x{height} is invalid: sides must be 1 to {MAX_SIDE} pixels'
        )
    return width, height


def _of_image(K: np.ndarray, info) -> np.ndarray:
    """Return intrinsics (3, 3) after region of interest and binning, from the full resolution."""
    K = K.copy()
    K[0, 2] -= info.roi.x_offset
    K[1, 2] -= info.roi.y_offset
    K[0] /= max(1, info.binning_x)
    K[1] /= max(1, info.binning_y)
    return K


def _checked(K: np.ndarray) -> np.ndarray:
    if not (K[0, 0] > 0 and K[1, 1] > 0) or (K[2] != (0, 0, 1)).any():
        raise CameraInfoError(
            f'its focal lengths {K[0, 0]:g} and {K[1, 1]:g} are not positive, or the last row '
            'of its matrix is not 0 0 1'
        )
    return K
