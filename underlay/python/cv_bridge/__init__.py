"""Stand in for cv_bridge where no ROS distribution provides it, for the calls made here."""

from cv_bridge.core import CvBridge, CvBridgeError

__all__ = ['CvBridge', 'CvBridgeError']
