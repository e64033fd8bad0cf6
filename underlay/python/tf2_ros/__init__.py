"""Stand in for tf2_ros where no ROS distribution provides it, for the calls made here."""

from tf2_ros.static_transform_broadcaster import StaticTransformBroadcaster
from tf2_ros.transform_broadcaster import TransformBroadcaster

__all__ = ['StaticTransformBroadcaster', 'TransformBroadcaster']
