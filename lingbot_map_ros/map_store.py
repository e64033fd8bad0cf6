"""The map: one point per voxel, bounded in number."""

from __future__ import annotations

from lingbot_map.points import POINT_DTYPE
import numpy as np

_BITS = 21  # per axis in a 64-bit voxel key
_LIMIT = 1 << (_BITS - 1)
_KEPT_WHEN_FULL = 0.9  # so that a full map does not sort its ages for every cloud


class MapStore:
    """
    Keeps the most confident point of each voxel.

    `voxel_size` is the edge in map units. Beyond `max_points` the voxels that were seen longest
    ago leave. Not safe to use from several threads at once.
    """

    def __init__(self, voxel_size: float, max_points: int):
        self._voxel_size = voxel_size
        self._max_points = max_points
        self.clear()

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def points(self) -> np.ndarray:
        """All points (N,) POINT_DTYPE; an insertion replaces the array and never changes it."""
        return self._points

    def clear(self) -> None:
        self._keys = np.empty(0, np.int64)  # sorted
        self._points = np.empty(0, POINT_DTYPE)
        self._seen = np.empty(0, np.int32)  # the insertion that saw the voxel last
        self._insertions = 0
        self.evicted = 0

    def insert(self, points: np.ndarray) -> None:
        """Add points (N,) POINT_DTYPE; those too far out to have a voxel are left out."""
        self._insertions += 1
        keys, points = self._best_per_voxel(points)
        if not len(keys):
            return
        places = np.searchsorted(self._keys, keys)
        known = places < len(self._keys)
        known[known] = self._keys[places[known]] == keys[known]
        self._update(places[known], points[known])
        self._add(places[~known], keys[~known], points[~known])
        if len(self) > self._max_points:
            self._evict()

    def _best_per_voxel(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return sorted distinct voxel keys and the most confident point of each."""
        xyz = np.stack([points['x'], points['y'], points['z']], axis=1)
        cells = np.floor(xyz / self._voxel_size)
        inside = (np.abs(cells) < _LIMIT).all(axis=1)
        cells, points = cells[inside].astype(np.int64) + _LIMIT, points[inside]
        keys = (cells[:, 0] << 2 * _BITS) | (cells[:, 1] << _BITS) | cells[:, 2]
        order = np.lexsort((-points['confidence'], keys))
        keys = keys[order]
        first = np.ones(len(keys), bool)
        first[1:] = keys[1:] != keys[:-1]
        return keys[first], points[order[first]]

    def _update(self, places: np.ndarray, points: np.ndarray) -> None:
        self._seen[places] = self._insertions
        better = points['confidence'] >= self._points['confidence'][places]
        # Not in place: a reader may hold the array.
        self._points = self._points.copy()
        self._points[places[better]] = points[better]

    def _add(self, places: np.ndarray, keys: np.ndarray, points: np.ndarray) -> None:
        self._keys = np.insert(self._keys, places, keys)
        self._points = np.insert(self._points, places, points)
        self._seen = np.insert(self._seen, places, self._insertions)

    def _evict(self) -> None:
        count = int(self._max_points * _KEPT_WHEN_FULL)
        newest = np.argpartition(self._seen, len(self) - count)[len(self) - count :]
        kept = np.sort(newest)
        self.evicted += len(self) - count
        self._keys, self._points = self._keys[kept], self._points[kept]
        self._seen = self._seen[kept]
