"""Results of the network placed in the map by hand."""

from lingbot_map.mapping.map_frame import MappedFrame, Pose, unit_quaternion
import numpy as np


def mapped(result, T_map_cam=None, scale: float = 1.0) -> MappedFrame:
    """Return `result` at the pose `T_map_cam` (4, 4) [map units], the origin by default."""
    T_map_cam = np.eye(4) if T_map_cam is None else np.asarray(T_map_cam)
    return MappedFrame(
        result.tag,
        result.is_keyframe,
        Pose(T_map_cam, unit_quaternion(T_map_cam[:3, :3])),
        result.intrinsics,
        result.network_intrinsics,
        result.depth * scale,
        result.confidence,
        result.rgb,
    )
