"""Stand in for tf2_ros where no ROS distribution provides it, for the calls made here."""

from tf2_ros.buffer import Buffer
from tf2_ros.exceptions import (
    ConnectivityException,
    ExtrapolationException,
    InvalidArgumentException,
    LookupException,
    TimeoutException,
    TransformException,
)
from tf2_ros.static_transform_broadcaster import StaticTransformBroadcaster
from tf2_ros.transform_broadcaster import TransformBroadcaster
from tf2_ros.transform_listener import TransformListener

__all__ = [
    'Buffer',
    'ConnectivityException',
    'ExtrapolationException',
    'InvalidArgumentException',
    'LookupException',
    'StaticTransformBroadcaster',
    'TimeoutException',
    'TransformBroadcaster',
    'TransformException',
    'TransformListener',
]
