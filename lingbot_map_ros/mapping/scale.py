"""Estimate the scale [m per network unit] by comparing the camera's path with odometry."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
import time

from lingbot_map.evaluation.metrics import rotation_angles_deg
from lingbot_map_ros.input.odometry import OdometryInput
from lingbot_map_ros.output.frames import FrameTree, NoTransform
from lingbot_map_ros.parameters import NodeParams
import numpy as np

_STEP_M = 0.1  # shorter steps are dominated by noise
_MIN_PATH_M = 1.0
_MIN_STEPS = 8
_MAX_SPREAD = 0.2  # of the logarithms of the ratios, robust standard deviation
_MAX_ROTATION_DEG = 10.0  # of a step, if the camera's offset from base is unknown
_MAX_PAIRS = 150  # newest images with odometry
_MAX_WAITING = 50  # images newer than the newest odometry
_PATIENCE_S = 5.0  # without odometry for the images, before it is reported
_TO_SIGMA = 1.4826  # from the median absolute deviation to the standard deviation


@dataclass(frozen=True)
class ScaleFit:
    """A scale [m per network unit] and the data behind it."""

    scale: float
    path_m: float
    steps: int
    spread: float  # relative, between steps

    def __str__(self) -> str:
        return (
            f'{self.scale:.4g} m per network unit, from {self.path_m:.2f} m of odometry in '
            f'{self.steps} steps that differ by {100 * self.spread:.0f} %'
        )


class ScaleEstimator:
    """Compares the camera poses of one map with odometry until the steps agree on a scale."""

    def __init__(self, odometry: OdometryInput, tree: FrameTree, params: NodeParams, camera: str):
        self.status = f'waiting for odometry on {odometry.topic}'
        self.trouble = ''  # why the scale may never be found, or ''
        self._paired_s = time.monotonic()  # when an image last had odometry
        self._odometry, self._tree, self._params = odometry, tree, params
        self._camera = camera
        self._waiting: deque[tuple[int, np.ndarray]] = deque(maxlen=_MAX_WAITING)
        self._pairs: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=_MAX_PAIRS)

    def add(self, stamp_ns: int, T_world_cam: np.ndarray) -> ScaleFit | None:
        """Add the pose of the next image; return the fit once the steps agree, else None."""
        if not np.isfinite(T_world_cam).all():
            return None
        self._waiting.append((stamp_ns, T_world_cam))
        newest_ns = self._odometry.newest_ns
        is_new = False
        while self._waiting and self._waiting[0][0] <= newest_ns:
            waited_ns, T = self._waiting.popleft()
            T_odom_base = self._odometry.at(waited_ns)
            if T_odom_base is not None:
                self._pairs.append((T, T_odom_base))
                is_new = True
        if is_new:
            self._paired_s, self.trouble = time.monotonic(), ''
            return self._fit()
        if time.monotonic() - self._paired_s > _PATIENCE_S:
            self.status = self.trouble = self._without_odometry(stamp_ns, newest_ns)
        return None

    def _without_odometry(self, image_ns: int, odometry_ns: int) -> str:
        topic, apart_s = self._odometry.topic, (odometry_ns - image_ns) / 1e9
        if not odometry_ns:
            return f"no odometry on {topic}: remap 'odom' to the odometry topic of the robot"
        order = 'older' if apart_s < 0 else 'newer'
        return (
            f'{topic} has no poses at the times of the images: the newest is {abs(apart_s):.1f} s '
            f'{order} than the newest image; does it use another clock, or does it have gaps?'
        )

    def _fit(self) -> ScaleFit | None:
        T_world_cam, T_odom_base = (np.array(side) for side in zip(*self._pairs, strict=True))
        T_base_cam = self._extrinsics()
        has_extrinsics = T_base_cam is not None
        T_odom_cam = T_odom_base @ T_base_cam if has_extrinsics else T_odom_base
        ratios, path_m = step_ratios(T_world_cam, T_odom_cam, has_extrinsics)
        self.status = f'waiting for motion: {path_m:.2f} of {_MIN_PATH_M:g} m'
        if path_m < _MIN_PATH_M or len(ratios) < _MIN_STEPS:
            return None
        logs = np.log(ratios)
        spread = _TO_SIGMA * float(np.median(np.abs(logs - np.median(logs))))
        if spread > _MAX_SPREAD:
            self.status = f'images and odometry disagree: the steps differ by {100 * spread:.0f} %'
            self.trouble = self.status
            return None
        return ScaleFit(float(np.exp(np.median(logs))), path_m, len(ratios), spread)

    def _extrinsics(self) -> np.ndarray | None:
        base = self._odometry.child_frame or self._params.base_frame
        try:
            return self._tree.extrinsics(base, self._camera)
        except NoTransform:
            return None


def step_ratios(
    T_world_cam: np.ndarray, T_odom: np.ndarray, has_extrinsics: bool
) -> tuple[np.ndarray, float]:
    """
    Return the ratio of each step's length in odometry to that in the map, and the path [m].

    `T_world_cam` [network units] and `T_odom` [m] are poses (N, 4, 4) at the same times. A step
    ends once the odometry has moved 0.1 m. With `has_extrinsics`, `T_odom` has camera poses.
    Otherwise it has robot poses, and steps that rotate by 10 degrees or more are left out: camera
    and robot move differently in a rotation.
    """
    first, ratios, path_m = 0, [], 0.0
    for second in range(1, len(T_odom)):
        step_m = np.linalg.norm(T_odom[second, :3, 3] - T_odom[first, :3, 3])
        if step_m < _STEP_M:
            continue
        R_step = T_odom[first, :3, :3].T @ T_odom[second, :3, :3]
        step = np.linalg.norm(T_world_cam[second, :3, 3] - T_world_cam[first, :3, 3])
        is_straight = rotation_angles_deg(R_step[None])[0] < _MAX_ROTATION_DEG
        if step > 0 and (has_extrinsics or is_straight):
            ratios.append(step_m / step)
            path_m += step_m
        first = second
    return np.array(ratios), float(path_m)


def scale_notice(params: NodeParams) -> str:
    """Return a line for the log with the unit of positions."""
    if params.scale_source == 'odometry':
        ignored = (
            ''
            if params.scale == 1.0
            else f" (the parameter 'scale', {params.scale:g}, is not used)"
        )
        return (
            f'the scale is estimated from odometry{ignored}: move the camera by {_MIN_PATH_M:g} m '
            'or more; until then no TF is published, and all other outputs have a relative scale'
        )
    if params.scale == 1.0:
        return (
            "the scale is relative, positions are not in metres: set the parameter 'scale', or "
            "'scale_source' to 'odometry'"
        )
    return f'the scale is {params.scale:g} map units per network unit'
