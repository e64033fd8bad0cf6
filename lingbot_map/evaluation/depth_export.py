"""The depth of every keyframe as a file: 16-bit PNG for other tools, npz with all there is."""

import json
from pathlib import Path

from lingbot_map.evaluation.colmap import stamp_name
from lingbot_map.evaluation.run import PlacedFrame
from lingbot_map.mapping.export import replacing, write_bytes, write_depth_png
import numpy as np

FORMS = ('off', 'png', 'npz')
STEPS_PER_UNIT = 1000.0  # grey levels of a PNG for one map unit


class DepthExport:
    """Writes each keyframe's z-depth at the resolution of the network, in map units."""

    def __init__(self, folder: Path, form: str, scale: float):
        self._folder, self._form, self._scale = folder, form, scale
        self._frames: dict[str, object] = {}
        folder.mkdir(parents=True)

    def __call__(self, placed: PlacedFrame) -> None:
        """Write the frame's depth if it is a keyframe."""
        if not placed.result.is_keyframe:
            return
        result = placed.result
        depth = result.depth.cpu().numpy() * np.float32(self._scale)
        name = f'{stamp_name(placed.stamp_ns)}.{self._form}'
        if self._form == 'png':
            write_depth_png(self._folder / name, depth, STEPS_PER_UNIT)
        else:
            with replacing(self._folder / name) as file:
                np.savez_compressed(
                    file,
                    depth=depth,
                    confidence=result.confidence.cpu().numpy(),
                    intrinsics=result.network_intrinsics,
                    T_map_cam=placed.T_map_cam,
                )
        self._frames[name] = {
            'intrinsics': result.network_intrinsics.tolist(),
            'T_map_cam': placed.T_map_cam.tolist(),
        }

    def write(self) -> None:
        """Write frames.json: what the grey levels mean, and where each picture was taken."""
        content = {
            'unit': 'map units along the optical axis, 0 = none',
            'steps_per_unit': STEPS_PER_UNIT if self._form == 'png' else 1.0,
            'frames': self._frames,
        }
        write_bytes(self._folder / 'frames.json', (json.dumps(content, indent=1) + '\n').encode())
