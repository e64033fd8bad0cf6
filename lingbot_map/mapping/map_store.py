"""The map's point cloud: one point per voxel, with a limit on their number."""

from lingbot_map.mapping.points import POINT_DTYPE
import numpy as np

_BITS = 21  # per axis in a 64-bit voxel key
_MAX_CELL = 1 << (_BITS - 1)
_KEPT_WHEN_FULL = 0.9  # below 1, so that a full map does not evict on every insertion
_FIRST_CAPACITY = 4096


class MapStore:
    """
    Keeps the most confident point of each voxel.

    `voxel_size` is the edge length in map units. Above `max_points`, the least recently seen
    voxels are evicted. Points are stored in insertion order with an index sorted by voxel, so an
    insertion is cheap even in a large map. Not thread-safe.
    """

    def __init__(self, voxel_size: float, max_points: int):
        self._voxel_size = voxel_size
        self._max_points = max_points
        self.clear()

    def __len__(self) -> int:
        return len(self._keys)

    def snapshot(self) -> np.ndarray:
        """Return a copy of all points (N,) POINT_DTYPE."""
        return self._points[: len(self)].copy()

    def clear(self) -> None:
        self._keys = np.empty(0, np.int64)  # sorted
        self._rows = np.empty(0, np.int32)  # row of the point of each key
        self._points = np.empty(_FIRST_CAPACITY, POINT_DTYPE)
        self._seen = np.empty(_FIRST_CAPACITY, np.int32)  # number of the last insertion per row
        self._insertions = 0
        self.evicted = 0

    def rescale(self, ratio: float, origin: np.ndarray) -> None:
        """Scale the map by `ratio` about the point `origin` (3,); all voxels count as seen now."""
        points = self.snapshot()
        for axis, center in zip('xyz', origin, strict=True):
            points[axis] = center + ratio * (points[axis] - center)
        evicted = self.evicted
        self.clear()
        self.evicted = evicted
        self.insert(points)

    def insert(self, points: np.ndarray) -> None:
        """Add points (N,) POINT_DTYPE, except those too far away for a voxel key."""
        self._insertions += 1
        keys, points = self._best_per_voxel(points)
        if not len(keys):
            return
        positions = np.searchsorted(self._keys, keys)
        known = positions < len(self)
        known[known] = self._keys[positions[known]] == keys[known]
        self._update(self._rows[positions[known]], points[known])
        self._add(positions[~known], keys[~known], points[~known])
        if len(self) > self._max_points:
            self._evict()

    def _best_per_voxel(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return sorted unique voxel keys and the most confident point of each."""
        xyz = np.stack([points['x'], points['y'], points['z']], axis=1)
        cells = np.floor(xyz / self._voxel_size)
        inside = (np.abs(cells) < _MAX_CELL).all(axis=1)
        cells, points = cells[inside].astype(np.int64) + _MAX_CELL, points[inside]
        keys = (cells[:, 0] << 2 * _BITS) | (cells[:, 1] << _BITS) | cells[:, 2]
        order = np.lexsort((-points['confidence'], keys))
        keys = keys[order]
        first = np.ones(len(keys), bool)
        first[1:] = keys[1:] != keys[:-1]
        return keys[first], points[order[first]]

    def _update(self, rows: np.ndarray, points: np.ndarray) -> None:
        self._seen[rows] = self._insertions
        better = points['confidence'] >= self._points['confidence'][rows]
        self._points[rows[better]] = points[better]

    def _add(self, positions: np.ndarray, keys: np.ndarray, points: np.ndarray) -> None:
        begin, end = len(self), len(self) + len(keys)
        if end > len(self._points):
            capacity = max(end, 2 * len(self._points))
            self._points = np.resize(self._points, capacity)
            self._seen = np.resize(self._seen, capacity)
        self._points[begin:end], self._seen[begin:end] = points, self._insertions
        self._keys = np.insert(self._keys, positions, keys)
        self._rows = np.insert(self._rows, positions, np.arange(begin, end, dtype=np.int32))

    def _evict(self) -> None:
        size, count = len(self), int(self._max_points * _KEPT_WHEN_FULL)
        kept = np.sort(np.argpartition(self._seen[:size], size - count)[size - count :])
        self._points[:count], self._seen[:count] = self._points[kept], self._seen[kept]
        moved_to = np.full(size, -1, np.int32)
        moved_to[kept] = np.arange(count)
        rows = moved_to[self._rows]
        self._keys, self._rows = self._keys[rows >= 0], rows[rows >= 0]
        self.evicted += size - count
