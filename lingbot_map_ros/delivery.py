"""From a result of the engine to the outputs, in the thread that owns the device."""

from __future__ import annotations

from lingbot_map.engine import FrameResult
from lingbot_map.map_frame import MapFrame, Pose
from lingbot_map.points import PointFilter
from lingbot_map.pose_jumps import JumpWatch
from lingbot_map.turning import turn_rotation
from lingbot_map.uncertainty import look_at, pose_covariance
from lingbot_map_ros.ledger import BAD_POSE, Dropped, Ledger, POSE_JUMP
from lingbot_map_ros.publishing import DepthOutput, Outputs
import numpy as np


class Delivery:
    """Places the results of one map after the other; the tag of a result is its Frame."""

    def __init__(self, outputs: Outputs, ledger: Ledger):
        self._outputs, self._ledger = outputs, ledger
        self.begin()

    def begin(self) -> None:
        """Turn to a new map: the next result is its origin."""
        params = self._outputs.params
        self._map_frame = MapFrame(params.scale, turn_rotation(params.image_rotation))
        self._jumps = JumpWatch()

    def publish(self, result: FrameResult) -> Pose:
        """Publish the pose at once and return it; raise Dropped when it must not go out."""
        frame = result.tag
        try:
            if not np.isfinite(result.network_intrinsics).all():
                raise FloatingPointError('the intrinsics hold NaN or infinity')
            pose = self._map_frame.place(result.T_world_cam)
        except FloatingPointError as error:
            why = f'{error}; check the weights and the precision (dtype)'
            raise Dropped(BAD_POSE, why) from error
        scene = look_at(result)
        covariance = pose_covariance(scene, self._outputs.params.scale)
        self._outputs.publish_pose(frame, pose, covariance)
        jump = self._jumps.see(result.T_world_cam, frame.stamp_ns, scene.depth)
        if jump:
            self._ledger.count_event(POSE_JUMP, jump)
        return pose

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
            points = choose(result, pose.T_map_body, params.scale)
            if wants_points:
                outputs.hand_points(frame, points)
            if wants_map:
                outputs.hand_map(frame, points)
        self._hand_depth(result)

    def _hand_depth(self, result: FrameResult) -> None:
        outputs = self._outputs
        depth = confidence = None
        if outputs.wants_depth():
            depth = (result.depth * outputs.params.scale).cpu().numpy()
        if outputs.wants_confidence():
            confidence = result.confidence.cpu().numpy()
        if depth is None and confidence is None and not outputs.wants_depth_info():
            return
        size = tuple(result.depth.shape[::-1])
        output = DepthOutput(size, result.network_intrinsics, depth, confidence)
        outputs.hand_depth(result.tag, output)
