"""One map, from its first image until the next map starts."""

from __future__ import annotations

from enum import Enum
import time

from lingbot_map.images.view import View
from lingbot_map.mapping.pose_quality import JumpWatch, measure_scene, Scene
from lingbot_map.streaming.frame import FrameResult
from lingbot_map_ros.frame import BAD_POSE, Dropped, Frame
from lingbot_map_ros.input.admission import Admission, GapWatch
from lingbot_map_ros.input.odometry import OdometryInput
from lingbot_map_ros.mapping.engine_status import Progress
from lingbot_map_ros.mapping.ledger import Counts
from lingbot_map_ros.mapping.scale import ScaleEstimator, ScaleFit
from lingbot_map_ros.output.frames import FrameTree
from lingbot_map_ros.output.placing import Placement, Placer
from lingbot_map_ros.output.publishing import PublishedMap
from lingbot_map_ros.parameters import NodeParams
import numpy as np


class State(Enum):
    """What the node is doing; the values appear in diagnostics."""

    UNCONFIGURED = 'UNCONFIGURED'
    LOADING = 'LOADING'
    WARMING_UP = 'WARMING_UP'
    READY = 'READY'
    WAITING_FOR_IMAGES = 'WAITING_FOR_IMAGES'
    WAITING_FOR_MOTION = 'WAITING_FOR_MOTION'
    INITIALIZING = 'INITIALIZING'
    WAITING_FOR_SCALE = 'WAITING_FOR_SCALE'
    TRACKING = 'TRACKING'
    PAUSED = 'PAUSED'
    ERROR = 'ERROR'
    ENDED = 'ENDED'


class MapSession(PublishedMap):
    """
    The state of one map. It is never reset: the next map is a new session.

    Written by the worker, read by any thread. Path and points have a lock (see PublishedMap).
    `admission` and `gaps` are used under the lock of Outputs.
    """

    def __init__(
        self,
        number: int,
        params: NodeParams,
        admission: Admission,
        counts: Counts,
        tree: FrameTree,
        odometry: OdometryInput | None,
    ):
        super().__init__(number, params)
        self.admission, self.gaps = admission, GapWatch()
        self.counts_before = counts  # of all images, when the map started
        self.view: View | None = None  # of its images; set with the first one
        self.held: list[Frame] = []  # in the engine, without a pose yet; used by the worker
        self.progress = Progress()
        self.trouble = ''  # why no poses are published, or ''
        self.is_initialized = False  # whether poses have been published
        self.initialized_s = float('inf')  # time.monotonic() after the first batch
        self.waits_for_motion = False
        self._params, self._tree, self._odometry = params, tree, odometry
        self._placer: Placer | None = None  # set with the first result
        self._estimator: ScaleEstimator | None = None  # None when the scale is known
        self._jumps = JumpWatch()

    @property
    def state(self) -> State:
        """Return the state of a map whose images are being processed."""
        if self.is_initialized:
            return State.TRACKING if self._estimator is None else State.WAITING_FOR_SCALE
        return State.WAITING_FOR_MOTION if self.progress.is_static else State.INITIALIZING

    @property
    def scale_status(self) -> str:
        """Return a text with the scale and its source."""
        estimator = self._estimator  # read once: the worker may clear it at any time
        if estimator is not None:
            return estimator.status
        if self._odometry is not None:
            return 'not begun' if self._placer is None else f'{self._placer.scale:.6g} (odometry)'
        scale = self._params.scale
        return f'{scale:g}' + (' (relative)' if scale == 1.0 else '')

    @property
    def scale_trouble(self) -> str:
        """Return why the scale may never be found, or ''."""
        estimator = self._estimator
        return '' if estimator is None else estimator.trouble

    def is_outdated(self) -> bool:
        """Return whether the extrinsics that this map lacks are available now."""
        return self._placer is not None and self._placer.is_outdated()

    def estimate_scale(self, frame: Frame, result: FrameResult) -> tuple[ScaleFit, float] | None:
        """
        Add the next result; once the scale is found, return it and its ratio to the old scale.

        The caller then rescales path and points about `scale_origin`.
        """
        if self._placer is None:
            self._begin_with(frame)
        if self._estimator is None:
            return None
        fit = self._estimator.add(frame.stamp_ns, result.T_world_cam)
        if fit is None:
            return None
        ratio = fit.scale / self._placer.scale
        self._placer.scale, self._estimator = fit.scale, None
        self._jumps = JumpWatch()  # lengths before are in the old unit
        return fit, ratio

    @property
    def scale_origin(self) -> np.ndarray:
        """The fixed point (3,) of a change of scale, in the map frame."""
        return self._placer.origin

    def place(self, result: FrameResult) -> tuple[Placement, Scene]:
        """
        Return the placement and the scene of a result; call after `estimate_scale`.

        :raises Dropped: the result is not finite.
        """
        try:
            placement = self._placer.place(result, self._estimator is None)
        except FloatingPointError as error:
            why = f'{error}; check the weights and the precision (dtype)'
            raise Dropped(BAD_POSE, why) from error
        return placement, measure_scene(placement.frame)

    def find_jump(self, frame: Frame, placement: Placement, scene: Scene) -> str:
        """Return a text about a jump from the previous pose to this one, or ''."""
        T_map_cam = placement.frame.camera.T_map_body
        return self._jumps.check(T_map_cam, frame.stamp_ns, scene.depth)

    def end_batch(self) -> None:
        """Record when the first batch is complete; call when all results are published."""
        if self.is_initialized:
            self.initialized_s = min(self.initialized_s, time.monotonic())

    def _begin_with(self, frame: Frame) -> None:
        camera, estimates = frame.frame_id, self._odometry is not None
        if estimates:  # before the placer, so that other threads never see 1 as the final scale
            self._estimator = ScaleEstimator(self._odometry, self._tree, self._params, camera)
        scale = 1.0 if estimates else self._params.scale
        self._placer = Placer(self._params, self._tree, camera, scale)
