"""What camera_info says, from the thread that hears it to the worker, one map at a time."""

from __future__ import annotations

from collections.abc import Callable
import threading
import time

from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CameraInfo

TOPIC = 'camera_info'


class CameraInfoStore:
    """
    Keeps the newest camera_info; a map uses the one that is there when it begins.

    It may come once, late, never, or at any rate. `is_expected()` tells whether the first image
    shall wait for it, `timeout_s` at most.
    """

    def __init__(self, topic: str, is_expected: Callable[[], bool], timeout_s: float, logger):
        self.topic = topic
        self._is_expected, self._timeout_s, self._logger = is_expected, timeout_s, logger
        self._changed = threading.Condition()
        self._newest: CameraInfo | None = None
        self._newest_calibration: tuple | None = None
        self._in_use: tuple | None = ()  # the present map's calibration; () before the first
        self._deadline_s: float | None = None

    def hear(self, message: CameraInfo) -> None:
        heard = calibration(message)
        with self._changed:
            is_new = heard != self._newest_calibration
            self._newest, self._newest_calibration = message, heard
            self._changed.notify()
        if is_new and self.has_news:
            self._logger.warning(
                'camera_info has changed, or came after the first image: it is used from the next '
                'map on, call ~/reset to begin one'
            )

    @property
    def has_news(self) -> bool:
        """Tell whether the next map will use another camera_info than the present one."""
        return self._in_use not in ((), self._newest_calibration)

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; tell whether the first image need not wait any longer."""
        with self._changed:
            if self._newest is not None or not self._is_expected():
                return True
            if self._deadline_s is None:
                self._deadline_s = time.monotonic() + self._timeout_s
            left_s = self._deadline_s - time.monotonic()
            self._changed.wait_for(lambda: self._newest is not None, min(left_s, timeout_s))
            return self._newest is not None or time.monotonic() >= self._deadline_s

    def begin(self) -> CameraInfo | None:
        """Return what the map that begins now shall use."""
        with self._changed:
            self._in_use = self._newest_calibration
            return self._newest


def subscribe(node, store: CameraInfoStore) -> list:
    """Have the store hear publishers of every durability and reliability."""
    group = MutuallyExclusiveCallbackGroup()
    profiles = (
        QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT),
        QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL),  # sent once, and kept
    )
    return [
        node.create_subscription(
            CameraInfo,
            TOPIC,
            store.hear,
            profile,
            callback_group=group,
            # No warnings: it is as it should be that a publisher suits only one of the two.
            event_callbacks=SubscriptionEventCallbacks(use_default_callbacks=False),
        )
        for profile in profiles
    ]


def calibration(message: CameraInfo | None) -> tuple | None:
    """Return what identifies a calibration: all but the header."""
    if message is None:
        return None
    roi = message.roi
    return (
        (message.width, message.height, message.binning_x, message.binning_y),
        (roi.x_offset, roi.y_offset, roi.width, roi.height),
        message.distortion_model,
        *(tuple(numbers) for numbers in (message.d, message.k, message.r, message.p)),
    )
