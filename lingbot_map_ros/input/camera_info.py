"""Receive camera_info, and hand it to the worker for one map at a time."""

from __future__ import annotations

from collections.abc import Callable
import threading
import time

from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CameraInfo

TOPIC = 'camera_info'
_WARN_PERIOD_S = 30.0  # for a camera whose calibration changes all the time


class CameraInfoStore:
    """
    Keeps the newest camera_info; each map uses the one present when it starts. Thread-safe.

    camera_info may come once, late, never, or at any rate. If `is_expected()`, the first image
    waits for it, at most `timeout_s`.
    """

    def __init__(self, topic: str, is_expected: Callable[[], bool], timeout_s: float, logger):
        self.topic = topic
        self._is_expected, self._timeout_s, self._logger = is_expected, timeout_s, logger
        self._changed = threading.Condition()
        self._newest: CameraInfo | None = None
        self._newest_calibration: tuple | None = None
        self._in_use: tuple | None = ()  # calibration of the current map; () before the first map
        self._deadline_s: float | None = None

    def receive(self, message: CameraInfo) -> None:
        """Store a message; warn if its calibration differs from that of the current map."""
        new_calibration = calibration(message)
        with self._changed:
            is_new = new_calibration != self._newest_calibration
            self._newest, self._newest_calibration = message, new_calibration
            self._changed.notify()
        if is_new and self.has_changed:
            self._logger.warning(
                'camera_info has changed, or came after the first image: the next map will use '
                'it; call ~/reset to start one',
                throttle_duration_sec=_WARN_PERIOD_S,
            )

    @property
    def has_changed(self) -> bool:
        """Whether the next map will use another calibration than the current one."""
        return self._in_use not in ((), self._newest_calibration)

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for camera_info; return whether the first image can be used."""
        with self._changed:
            if self._newest is not None or not self._is_expected():
                return True
            if self._deadline_s is None:
                self._deadline_s = time.monotonic() + self._timeout_s
            left_s = self._deadline_s - time.monotonic()
            self._changed.wait_for(lambda: self._newest is not None, min(left_s, timeout_s))
            return self._newest is not None or time.monotonic() >= self._deadline_s

    def for_new_map(self) -> CameraInfo | None:
        """Return the newest message, for the map that starts now; None if none has come."""
        with self._changed:
            self._in_use = self._newest_calibration
            return self._newest


class CameraInfoSubscription:
    """
    Subscribes to camera_info of publishers with any QoS.

    The kept message of a transient-local publisher is only sent to a transient-local subscription.
    That second subscription is created when there is such a publisher, since volatile publishers
    would warn of incompatible QoS.
    """

    def __init__(self, node, store: CameraInfoStore):
        self._node, self._store = node, store
        self._group = MutuallyExclusiveCallbackGroup()
        self._subscriptions = []
        self._lock = threading.Lock()
        self._closed = False
        best_effort = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)
        self._subscribe(best_effort, matched=self._on_matched)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._subscriptions:
                self._node.destroy_subscription(self._subscriptions.pop())

    def _subscribe(self, profile: QoSProfile, **events) -> None:
        self._subscriptions.append(
            self._node.create_subscription(
                CameraInfo,
                TOPIC,
                self._store.receive,
                profile,
                callback_group=self._group,
                event_callbacks=SubscriptionEventCallbacks(use_default_callbacks=False, **events),
            )
        )

    def _on_matched(self, _event) -> None:
        publishers = self._node.get_publishers_info_by_topic(self._store.topic)
        transient_local = DurabilityPolicy.TRANSIENT_LOCAL
        with self._lock:
            is_missing = len(self._subscriptions) == 1 and not self._closed
            if is_missing and any(p.qos_profile.durability == transient_local for p in publishers):
                self._subscribe(QoSProfile(depth=1, durability=transient_local))


def calibration(message: CameraInfo | None) -> tuple | None:
    """Return a comparable value of the whole calibration, without the header."""
    if message is None:
        return None
    roi = message.roi
    return (
        (message.width, message.height, message.binning_x, message.binning_y),
        (roi.x_offset, roi.y_offset, roi.width, roi.height),
        message.distortion_model,
        *(tuple(numbers) for numbers in (message.d, message.k, message.r, message.p)),
    )
