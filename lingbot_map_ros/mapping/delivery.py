"""From a result of the engine to the outputs, in the thread that owns the device."""

from __future__ import annotations

from lingbot_map.mapping.map_frame import Pose
from lingbot_map.mapping.points import PointFilter
from lingbot_map.mapping.pose_quality import JumpWatch, look_at, pose_covariance
from lingbot_map.streaming.frame import FrameResult
from lingbot_map_ros.frame import BAD_POSE, Dropped, Frame
from lingbot_map_ros.mapping.ledger import Ledger, POSE_JUMP
from lingbot_map_ros.mapping.scale import ScaleEstimator
from lingbot_map_ros.output.placing import Placer
from lingbot_map_ros.output.publishing import DepthOutput, Outputs
import numpy as np

_SAY_AGAIN_S = 30.0


class Delivery:
    """Places the results of one map after the other; the tag of a result is its Frame."""

    def __init__(self, outputs: Outputs, ledger: Ledger, logger):
        self._outputs, self._ledger, self._logger = outputs, ledger, logger
        self.begin()

    def begin(self) -> None:
        """Turn to a new map: the next result is its origin."""
        self._placer: Placer | None = None
        self._estimator: ScaleEstimator | None = None  # until the scale of the map is known
        self._jumps = JumpWatch()

    @property
    def waits_for_scale(self) -> bool:
        return self._estimator is not None

    @property
    def trouble(self) -> str:
        """Say why the scale may never be known, or ''."""
        estimator = self._estimator
        return '' if estimator is None else estimator.trouble

    @property
    def scale_status(self) -> str:
        """Say what the scale is, and where it comes from."""
        estimator, placer, params = self._estimator, self._placer, self._outputs.params
        if estimator is not None:
            return estimator.status
        if params.scale_source == 'odometry':
            return 'not begun' if placer is None else f'{placer.scale:.6g} (odometry)'
        return f'{params.scale:g}' + (' (relative)' if params.scale == 1.0 else '')

    def is_outdated(self) -> bool:
        """Tell whether a new map could be placed better: the camera's mount is known by now."""
        return self._placer is not None and self._placer.is_outdated()

    def publish(self, result: FrameResult) -> Pose:
        """Publish the pose, return the camera's; raise Dropped when it must not go out."""
        frame = result.tag
        if self._placer is None:
            self._begin_with(frame)
        if self._estimator is not None:
            self._estimate_scale(frame, result)
        try:
            if not np.isfinite(result.network_intrinsics).all():
                raise FloatingPointError('the intrinsics hold NaN or infinity')
            placement = self._placer.place(result.T_world_cam, self._estimator is None)
        except FloatingPointError as error:
            why = f'{error}; check the weights and the precision (dtype)'
            raise Dropped(BAD_POSE, why) from error
        scene = look_at(result)
        covariance = pose_covariance(scene, self._placer.scale)
        self._outputs.publish_pose(frame, placement, covariance)
        jump = self._jumps.see(result.T_world_cam, frame.stamp_ns, scene.depth)
        if jump:
            self._ledger.count_event(POSE_JUMP, jump)
        return placement.camera

    def _begin_with(self, frame: Frame) -> None:
        outputs, params, camera = self._outputs, self._outputs.params, frame.frame_id
        scale = params.scale if outputs.odometry_input is None else 1.0
        self._placer = Placer(params, outputs.tree, camera, scale)
        if outputs.odometry_input is not None:
            self._estimator = ScaleEstimator(outputs.odometry_input, outputs.tree, params, camera)

    def _estimate_scale(self, frame: Frame, result: FrameResult) -> None:
        """Once the scale is certain, keep it for the rest of the map."""
        fit = self._estimator.add(frame.stamp_ns, result.T_world_cam)
        if fit is None:
            if self._estimator.trouble:
                self._logger.warning(
                    f'there is no scale yet: {self._estimator.trouble}',
                    throttle_duration_sec=_SAY_AGAIN_S,
                )
            return
        ratio = fit.scale / self._placer.scale
        self._placer.scale, self._estimator = fit.scale, None
        self._outputs.rescale(ratio, self._placer.origin)
        self._logger.info(
            f'scale is {fit}; map and path are rescaled, once: only ~/reset finds another'
        )

    def hand_over(self, result: FrameResult, pose: Pose) -> None:
        """Bring to the host what somebody wants to have, and nothing else."""
        outputs, frame = self._outputs, result.tag
        wants_points = outputs.wants_points(result.is_keyframe)
        wants_map = outputs.wants_map(result.is_keyframe)
        if wants_points or wants_map:
            params = outputs.params
            choose = PointFilter(
                params.points.min_confidence,
                params.points.max_depth,
                params.points.stride,
                params.points.keep_percentile,
                params.points.edge_threshold,
            )
            points = choose(result, pose.T_map_body, self._placer.scale)
            if wants_points:
                outputs.hand_points(frame, points)
            if wants_map:
                outputs.hand_map(frame, points)
        self._hand_depth(result)

    def _hand_depth(self, result: FrameResult) -> None:
        outputs = self._outputs
        depth = confidence = None
        if outputs.wants_depth():
            depth = (result.depth * self._placer.scale).cpu().numpy()
        if outputs.wants_confidence():
            confidence = result.confidence.cpu().numpy()
        if depth is None and confidence is None and not outputs.wants_depth_info():
            return
        size = tuple(result.depth.shape[::-1])
        output = DepthOutput(size, result.network_intrinsics, depth, confidence)
        outputs.hand_depth(result.tag, output)
