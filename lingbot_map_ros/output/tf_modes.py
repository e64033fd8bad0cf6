"""The transform on /tf in each tf_mode: one parent per frame (REP-105), increasing stamps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
import time

from lingbot_map.geometry import invert
from lingbot_map.mapping.map_frame import ContinuousPoses, Pose
from lingbot_map_ros.frame import Frame, to_stamp
from lingbot_map_ros.output.conversions import transform
from lingbot_map_ros.output.frames import FrameTree, NoTransform
from lingbot_map_ros.output.placing import Placement
from lingbot_map_ros.parameters import NodeParams
import numpy as np
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from std_msgs.msg import Header
from tf2_ros import TransformBroadcaster

_NS = 1e9
_LOG_PERIOD_S = 30.0
_PATIENCE_S = 1.0  # without odom -> base at the time of an image
_STANDSTILL_S = 3.0  # without progress of simulated time while images arrive
_MAX_WAITING = 30  # images without odom -> base yet


class MapTransform:
    """
    Broadcasts the pose of a frame in the map.

    A frame with two parents breaks the TF tree (REP-105). So nothing is sent for a frame to which
    another node gives a parent other than the map.
    """

    def __init__(self, node, tree: FrameTree, params: NodeParams):
        self._troubles: dict[str, str] = {}  # by kind
        self._logged_s: dict[str, float] = {}
        self._node, self._tree, self._params = node, tree, params
        self._broadcaster = TransformBroadcaster(node)
        self._late_ns = int(params.time_jump_threshold * _NS)
        self._newest_ns: int | None = None

    @property
    def trouble(self) -> str:
        """Why the transform is missing or outdated, or ''."""
        return '; '.join(list(self._troubles.values()))

    def send(self, frame: Frame, placement: Placement) -> None:
        """Use the placement of the next image; the caller holds the lock of Outputs."""
        if placement.missing_extrinsics:
            self._report_trouble('extrinsics', _without_extrinsics(placement.missing_extrinsics))
            return
        self._clear_trouble('extrinsics')
        if placement.is_scaled:  # a transform in another scale cannot be corrected later
            self._add(frame, placement)

    def _add(self, frame: Frame, placement: Placement) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._node.destroy_publisher(self._broadcaster.pub_tf)

    def _send(self, stamp_ns: int, child: str, pose: Pose, since_s: float) -> None:
        """Send a transform, unless its frame has another parent or its stamp is not newer."""
        parent = self._tree.rival_parent(child, since_s)
        if parent:
            self._report_trouble(
                'rival',
                f"no TF is published: '{child}' has the parent '{parent}' and cannot also have "
                f"'{self._params.map_frame}' as parent; set the parameter 'tf_mode' to "
                f'{self._remedy()}, or stop the other publisher and call ~/reset',
            )
            return
        self._clear_trouble('rival')
        if self._is_next(stamp_ns):
            header = Header(stamp=to_stamp(stamp_ns), frame_id=self._params.map_frame)
            self._broadcaster.sendTransform(transform(header, child, pose))

    def _remedy(self) -> str:
        others = {'map_to_camera': "'map_to_base' or 'off'", 'map_to_base': "'map_to_odom'"}
        return others.get(self._params.tf_mode, "'off'")

    def _is_next(self, stamp_ns: int) -> bool:
        """Return whether a stamp is newer than all before, or from after a jump back in time."""
        newest_ns = self._newest_ns
        if newest_ns is not None and newest_ns - self._late_ns <= stamp_ns <= newest_ns:
            return False
        self._newest_ns = stamp_ns
        return True

    def _report_trouble(self, kind: str, trouble: str) -> None:
        """Set the trouble of a kind for diagnostics; log it, at most every 30 s."""
        self._troubles[kind] = trouble
        now_s = time.monotonic()
        if now_s - self._logged_s.get(kind, -float('inf')) > _LOG_PERIOD_S:
            self._logged_s[kind] = now_s
            self._node.get_logger().error(trouble)

    def _clear_trouble(self, kind: str) -> None:
        self._troubles.pop(kind, None)


class ImageTransform(MapTransform):
    """Sends map -> camera or map -> base with the stamp of each image."""

    def _add(self, frame: Frame, placement: Placement) -> None:
        since_s = frame.session.started_s
        self._send(frame.stamp_ns, placement.body_frame, placement.body, since_s)


class Correction:
    """The pose map -> odom in one map, from images for which odom -> base is known."""

    def __init__(self, of_map):
        self.of_map = of_map  # PublishedMap
        self.pose: Pose | None = None
        self.found_ns = 0  # when `pose` was found, by the node's clock
        self.since_s = time.monotonic()  # since when no image could be used
        self.waiting: deque[tuple[int, np.ndarray]] = deque(maxlen=_MAX_WAITING)
        self._track = ContinuousPoses()

    def add(self, stamp_ns: int, T_map_base: np.ndarray) -> None:
        if not self.waiting:
            self.since_s = time.monotonic()
        self.waiting.append((stamp_ns, T_map_base))

    def correct(self, lookup: Callable[[int], np.ndarray], now_ns: int) -> str:
        """
        Update the pose with the newest image for which `lookup` returns odom -> base.

        Return why no image could be used; '' if one was or none waits.
        """
        reason = ''
        for stamp_ns, T_map_base in reversed(self.waiting):
            try:
                T_odom_base = lookup(stamp_ns)
            except NoTransform as error:
                reason = reason or str(error)
                continue
            self.pose = self._track.pose(T_map_base @ invert(T_odom_base))
            while self.waiting and self.waiting[0][0] <= stamp_ns:
                self.waiting.popleft()
            self.since_s, self.found_ns = time.monotonic(), now_ns
            return ''
        return reason


class OdomTransform(MapTransform):
    """
    Sends map -> odom, so that with odom -> base of the robot's odometry it gives map -> base.

    The newest transform is sent repeatedly at `tf_rate`, with a stamp `transform_tolerance` in the
    future, so that lookups at the current time succeed. `outputs` provides the lock, `active`, the
    current map and the current parameters.
    """

    def __init__(self, node, tree: FrameTree, params: NodeParams, outputs):
        super().__init__(node, tree, params)
        self._outputs = outputs
        self._correction = Correction(None)
        self._clock_ns, self._clock_since_s = -1, 0.0  # last time, and since when it is unchanged
        self._checked_s = 0.0
        # The node's clock: if simulated time is faster, transforms are needed more often.
        self._timer = node.create_timer(
            1 / params.tf_rate, self._tick, MutuallyExclusiveCallbackGroup()
        )

    def _add(self, frame: Frame, placement: Placement) -> None:
        if self._correction.of_map is not frame.session:
            self._correction = Correction(frame.session)
        self._correction.add(frame.stamp_ns, placement.body.T_map_body)
        self._check_clock()

    def _check_clock(self) -> None:
        """Report simulated time that stands still: the timer that sends TF waits for it."""
        clock_ns, now_s = self._node.get_clock().now().nanoseconds, time.monotonic()
        paused = now_s - self._checked_s > _STANDSTILL_S  # images may resume before /clock
        self._checked_s = now_s
        if clock_ns != self._clock_ns or paused:
            self._clock_ns, self._clock_since_s = clock_ns, now_s
            self._clear_trouble('clock')
        elif now_s - self._clock_since_s > _STANDSTILL_S:
            self._report_trouble(
                'clock',
                f'no TF is published: use_sim_time is set and /clock stands still at '
                f'{clock_ns / _NS:.3f} s although images arrive; publish /clock (ros2 bag play '
                '--clock), or set use_sim_time to false',
            )

    def close(self) -> None:
        self._node.destroy_timer(self._timer)
        super().close()

    def _tick(self) -> None:
        self._timer.timer_period_ns = int(_NS / self._outputs.params.tf_rate)
        with self._outputs.lock:
            if self._outputs.active and self._correction.of_map is self._outputs.current:
                self._correct()
                self._rebroadcast()

    def _correct(self) -> None:
        correction, params = self._correction, self._params
        if not correction.waiting:
            return
        reason = correction.correct(
            lambda stamp_ns: self._tree.lookup(params.odom_frame, params.base_frame, stamp_ns),
            self._node.get_clock().now().nanoseconds,
        )
        if not reason:
            self._clear_trouble('odom')
        elif time.monotonic() - correction.since_s > _PATIENCE_S:
            self._report_trouble('odom', self._without_odometry(reason))

    def _without_odometry(self, reason: str) -> str:
        params = self._params
        pair = f"'{params.odom_frame}' -> '{params.base_frame}'"
        effect = f"'{params.map_frame}' -> '{params.odom_frame}' is not updated"
        if self._correction.pose is None:
            effect = 'no TF is published, only odometry and pose'
        return (
            f'no transform {pair} at the times of the images: {effect}; make the robot publish '
            f"it, or set the parameter 'tf_mode' to 'map_to_base' ({reason})"
        )

    def _rebroadcast(self) -> None:
        now_ns, correction = self._node.get_clock().now().nanoseconds, self._correction
        if correction.pose is None or now_ns <= 0:
            return
        if now_ns < correction.found_ns - self._late_ns:
            # Time has jumped back: the pose belongs to the earlier time.
            self._correction = Correction(correction.of_map)
            return
        stamp_ns = now_ns + int(self._params.transform_tolerance * _NS)
        since_s = correction.of_map.started_s
        self._send(stamp_ns, self._params.odom_frame, correction.pose, since_s)


def create_transform(node, tree: FrameTree, params: NodeParams, outputs) -> MapTransform | None:
    """Return the sender of the transform for the parameter tf_mode; None if it is off."""
    if params.tf_mode == 'off':
        return None
    if params.tf_mode == 'map_to_odom':
        return OdomTransform(node, tree, params, outputs)
    return ImageTransform(node, tree, params)


def _without_extrinsics(reason: str) -> str:
    return (
        f'no TF is published, odometry and pose are those of the camera: {reason}; publish the '
        'camera extrinsics with robot_state_publisher or static_transform_publisher, which starts '
        "a new map, or set the parameter 'tf_mode' to 'map_to_camera'"
    )
