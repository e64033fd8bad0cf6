"""One evaluation as a Rerun recording: cameras, images, depth, cloud and both paths over time."""

from pathlib import Path

from lingbot_map.evaluation.metrics import Similarity
from lingbot_map.evaluation.run import PlacedFrame
from lingbot_map.evaluation.scoring import Matched
from lingbot_map.mapping.points import PointFilter
from lingbot_map.recordings.source import SourceError
import numpy as np

_TIMELINE = 'time'
_OURS, _TRUTH = (255, 127, 14), (120, 130, 150)


class RerunLog:
    """
    Writes frames as they come, aside, and takes the place of `path` when it is finished.

    Raises SourceError if the package rerun-sdk is not installed or the file cannot be written.
    """

    def __init__(self, path: Path, scale: float, choose: PointFilter):
        self._rr = require_rerun()
        self._path, self._scale, self._choose = path, scale, choose
        self._aside = path.with_name(f'.{path.name}.part')
        if not path.absolute().parent.is_dir():
            raise SourceError(f"rerun: '{path.absolute().parent}' is not a folder")
        self._log = self._rr.RecordingStream('lingbot_map')
        self._log.save(str(self._aside))
        self._log.log('map', self._rr.ViewCoordinates.FLU, static=True)

    def __call__(self, placed: PlacedFrame) -> None:
        """Log a frame: where the camera is, what it sees, and a keyframe's points."""
        rr, result = self._rr, placed.result
        self._set_time(placed.stamp_ns)
        height, width = result.depth.shape
        depth = result.depth.cpu().numpy() * self._scale
        T = placed.T_map_cam
        self._log.log('map/camera', rr.Transform3D(translation=T[:3, 3], mat3x3=T[:3, :3]))
        pinhole = rr.Pinhole(
            image_from_camera=result.network_intrinsics,
            resolution=(width, height),
            camera_xyz=rr.ViewCoordinates.RDF,
        )
        self._log.log('map/camera/image', pinhole)
        self._log.log('map/camera/image/rgb', rr.Image(result.rgb.cpu().numpy()).compress())
        self._log.log('map/camera/image/depth', rr.DepthImage(depth, meter=1.0))
        self._log.log('map/estimate/now', rr.Points3D([T[:3, 3]], colors=[_OURS], radii=-4.0))
        if result.is_keyframe:
            points = self._choose(result, T, self._scale)
            name = f'map/cloud/{placed.stamp_ns}'
            self._log.log(name, rr.Points3D(_xyz(points), colors=_colours(points)))

    def finish(
        self, T_map_cam: np.ndarray, matched: Matched | None, to_truth: Similarity | None
    ) -> None:
        """Log both paths as a whole, the truth aligned to the map, and move the file in place."""
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
        self._aside.replace(self._path)

    def close(self) -> None:
        """Leave nothing behind of a recording that was not finished."""
        self._log.disconnect()
        self._aside.unlink(missing_ok=True)

    def _set_time(self, stamp_ns: int) -> None:
        self._log.set_time(_TIMELINE, timestamp=np.datetime64(stamp_ns, 'ns'))


def require_rerun():
    """Return the package; raise SourceError if it is not installed."""
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
