"""The part of cv_bridge that this project uses, for systems without a ROS distribution."""

from cv_bridge.core import CvBridge, CvBridgeError

__all__ = ['CvBridge', 'CvBridgeError']
