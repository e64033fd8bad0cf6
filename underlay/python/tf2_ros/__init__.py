"""The part of tf2_ros that this project uses, for systems without a ROS distribution."""

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
