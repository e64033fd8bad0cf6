"""Export an evaluation for other tools: COLMAP text model, keyframe depth, Rerun recording."""

import json
from pathlib import Path

from lingbot_map.evaluation.metrics import Alignment
from lingbot_map.evaluation.run import PlacedFrame
from lingbot_map.evaluation.scoring import Matched
from lingbot_map.geometry import invert
from lingbot_map.mapping.export import replacing, write_bytes, write_depth_png
from lingbot_map.mapping.map_frame import unit_quaternion
from lingbot_map.mapping.points import PointFilter
from lingbot_map.recordings.source import SourceError
import numpy as np
from PIL import Image

_JPEG_QUALITY = 95
_MAX_POINTS = 200_000  # of points3D.txt, which readers load at once; more are subsampled
FORMS = ('off', 'png', 'npz')
STEPS_PER_UNIT = 1000.0  # grey levels of a depth PNG per map unit
_TIMELINE = 'time'
_OURS, _TRUTH = (255, 127, 14), (120, 130, 150)


class ColmapModel:
    """
    Writes the images of keyframes as they come, and the COLMAP text model at the end.

    Layout: images/*.jpg and sparse/0/{cameras,images,points3D}.txt. Each keyframe has its own
    PINHOLE camera, since the network predicts the field of view of each image. The world is the
    map frame (z up, map units); points have no tracks.
    """

    def __init__(self, folder: Path):
        self._images = folder / 'images'
        self._sparse = folder / 'sparse' / '0'
        self._images.mkdir(parents=True)
        self._sparse.mkdir(parents=True)
        self._cameras: list[str] = []
        self._poses: list[str] = []

    def __call__(self, placed: PlacedFrame) -> None:
        """Write the image of a keyframe."""
        if not placed.frame.is_keyframe:
            return
        number = len(self._cameras) + 1
        name = f'{stamp_name(placed.stamp_ns)}.jpg'
        with replacing(self._images / name) as file:
            Image.fromarray(placed.rgb).save(file, 'JPEG', quality=_JPEG_QUALITY)
        height, width = placed.rgb.shape[:2]
        K = placed.frame.intrinsics
        self._cameras.append(
            f'{number} PINHOLE {width} {height} {_numbers((K[0, 0], K[1, 1], K[0, 2], K[1, 2]))}'
        )
        T_cam_map = invert(placed.T_map_cam)
        x, y, z, w = unit_quaternion(T_cam_map[:3, :3])
        pose = _numbers((w, x, y, z, *T_cam_map[:3, 3]))
        self._poses += [f'{number} {pose} {number} {name}', '']  # the second line: no 2D points

    def write(self, points: np.ndarray) -> None:
        """Write the text model with the map's points (N,) POINT_DTYPE."""
        chosen = points[:: max(1, -(-len(points) // _MAX_POINTS))]
        rows = [
            f'{number} {_numbers((p["x"], p["y"], p["z"]))} '
            f'{p["rgb"] >> 16 & 255} {p["rgb"] >> 8 & 255} {p["rgb"] & 255} 0'
            for number, p in enumerate(chosen, start=1)
        ]
        for name, comment, lines in (
            ('cameras', 'CAMERA_ID MODEL WIDTH HEIGHT fx fy cx cy', self._cameras),
            (
                'images',
                'IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME, then 2D points',
                self._poses,
            ),
            ('points3D', 'POINT3D_ID X Y Z R G B ERROR TRACK[]', rows),
        ):
            text = '\n'.join((f'# {comment}', *lines)) + '\n'
            write_bytes(self._sparse / f'{name}.txt', text.encode())


def stamp_name(stamp_ns: int) -> str:
    """Return a file name for a stamp [ns]: seconds with nine decimals."""
    return f'{stamp_ns // 10**9}.{stamp_ns % 10**9:09d}'


def _numbers(values) -> str:
    return ' '.join(f'{value:.9g}' for value in values)


class DepthExport:
    """Writes the z-depth of keyframes at network resolution, in map units, as PNG or NPZ."""

    def __init__(self, folder: Path, form: str):
        self._folder, self._form = folder, form
        self._frames: dict[str, object] = {}
        folder.mkdir(parents=True)

    def __call__(self, placed: PlacedFrame) -> None:
        """Write the depth of a keyframe."""
        if not placed.frame.is_keyframe:
            return
        frame = placed.frame
        depth = frame.depth.cpu().numpy()
        name = f'{stamp_name(placed.stamp_ns)}.{self._form}'
        if self._form == 'png':
            write_depth_png(self._folder / name, depth, STEPS_PER_UNIT)
        else:
            with replacing(self._folder / name) as file:
                np.savez_compressed(
                    file,
                    depth=depth,
                    confidence=frame.confidence.cpu().numpy(),
                    intrinsics=frame.network_intrinsics,
                    T_map_cam=placed.T_map_cam,
                )
        self._frames[name] = {
            'intrinsics': frame.network_intrinsics.tolist(),
            'T_map_cam': placed.T_map_cam.tolist(),
        }

    def write(self) -> None:
        """Write frames.json: the depth unit, and the intrinsics and pose of each keyframe."""
        content = {
            'unit': 'map units along the optical axis, 0 = none',
            'steps_per_unit': STEPS_PER_UNIT if self._form == 'png' else 1.0,
            'frames': self._frames,
        }
        write_bytes(self._folder / 'frames.json', (json.dumps(content, indent=1) + '\n').encode())


class RerunLog:
    """
    Logs frames to a temporary Rerun file, which is renamed to `path` when it is finished.

    Raises SourceError if rerun-sdk is not installed or the folder does not exist.
    """

    def __init__(self, path: Path, choose: PointFilter):
        self._rr = require_rerun()
        self._path, self._choose = path, choose
        self._temporary = path.with_name(f'.{path.name}.part')
        if not path.absolute().parent.is_dir():
            raise SourceError(f"rerun: '{path.absolute().parent}' is not a folder")
        self._log = self._rr.RecordingStream('lingbot_map')
        self._log.save(str(self._temporary))
        self._log.log('map', self._rr.ViewCoordinates.FLU, static=True)

    def __call__(self, placed: PlacedFrame) -> None:
        """Log the pose, image and depth of a frame, and the points of a keyframe."""
        rr, frame = self._rr, placed.frame
        self._set_time(placed.stamp_ns)
        height, width = frame.depth.shape
        depth = frame.depth.cpu().numpy()
        T = placed.T_map_cam
        self._log.log('map/camera', rr.Transform3D(translation=T[:3, 3], mat3x3=T[:3, :3]))
        pinhole = rr.Pinhole(
            image_from_camera=frame.network_intrinsics,
            resolution=(width, height),
            camera_xyz=rr.ViewCoordinates.RDF,
        )
        self._log.log('map/camera/image', pinhole)
        self._log.log('map/camera/image/rgb', rr.Image(frame.rgb.cpu().numpy()).compress())
        self._log.log('map/camera/image/depth', rr.DepthImage(depth, meter=1.0))
        self._log.log('map/estimate/now', rr.Points3D([T[:3, 3]], colors=[_OURS], radii=-4.0))
        if frame.is_keyframe:
            points = self._choose(frame)
            name = f'map/cloud/{placed.stamp_ns}'
            self._log.log(name, rr.Points3D(_xyz(points), colors=_colours(points)))

    def finish(
        self, T_map_cam: np.ndarray, matched: Matched | None, to_truth: Alignment | None
    ) -> None:
        """Log the whole path and the aligned ground truth, then rename the file."""
        rr = self._rr
        self._log.log('map/estimate', rr.LineStrips3D([T_map_cam[:, :3, 3]], colors=[_OURS]),
                      static=True)  # fmt: skip
        if to_truth is not None:
            truth = to_truth.inverse()(matched.T_true[:, :3, 3])
            lines = rr.LineStrips3D([truth], colors=[_TRUTH])
            self._log.log('map/ground_truth', lines, static=True)
            for stamp_ns, position in zip(matched.stamps_ns, truth, strict=True):
                self._set_time(int(stamp_ns))
                now = rr.Points3D([position], colors=[_TRUTH], radii=-4.0)
                self._log.log('map/ground_truth/now', now)
        self._log.flush()
        self._log.disconnect()
        self._temporary.replace(self._path)

    def close(self) -> None:
        """Remove the temporary file, if the recording was not finished."""
        self._log.disconnect()
        self._temporary.unlink(missing_ok=True)

    def _set_time(self, stamp_ns: int) -> None:
        self._log.set_time(_TIMELINE, timestamp=np.datetime64(stamp_ns, 'ns'))


def require_rerun():
    """Import and return rerun; raise SourceError if it is not installed."""
    try:
        import rerun
    except ImportError as error:
        raise SourceError(
            f"a Rerun recording needs the package rerun-sdk (pip install 'rerun-sdk'): {error}"
        ) from None
    return rerun


def _xyz(points: np.ndarray) -> np.ndarray:
    return np.stack([points[axis] for axis in 'xyz'], axis=1)


def _colours(points: np.ndarray) -> np.ndarray:
    rgb = points['rgb']
    return np.stack([rgb >> 16 & 255, rgb >> 8 & 255, rgb & 255], axis=1).astype(np.uint8)
