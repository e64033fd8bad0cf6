"""Transform messages of a robot with a camera that looks ahead."""

from geometry_msgs.msg import Quaternion, TransformStamped, Vector3
from node_rig import to_time
import numpy as np

OPTICAL = (-0.5, 0.5, -0.5, 0.5)  # x right, y down, z forward in x forward, y left, z up


def stamped(parent, child, time_s=0.0, xyz=(0.0, 0.0, 0.0), xyzw=(0.0, 0.0, 0.0, 1.0)):
    transform = TransformStamped(child_frame_id=child)
    transform.header.frame_id, transform.header.stamp = parent, to_time(time_s)
    x, y, z, w = xyzw
    transform.transform.rotation = Quaternion(x=x, y=y, z=z, w=w)
    x, y, z = xyz
    transform.transform.translation = Vector3(x=x, y=y, z=z)
    return transform


def product(p, q):
    """Return the quaternion xyzw of the rotation q, then p."""
    (a, b), (v, w) = (np.array(p[:3]), p[3]), (np.array(q[:3]), q[3])
    return (*(b * v + w * a + np.cross(a, v)).tolist(), float(b * w - a @ v))
