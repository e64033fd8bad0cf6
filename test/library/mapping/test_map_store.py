"""The voxel map."""

from lingbot_map.mapping.map_store import MapStore
from lingbot_map.mapping.points import POINT_DTYPE
import numpy as np


def points(xyz, confidence=1.0, rgb=0):
    cloud = np.zeros(len(xyz), POINT_DTYPE)
    cloud['x'], cloud['y'], cloud['z'] = np.asarray(xyz, float).T
    cloud['confidence'], cloud['rgb'] = confidence, rgb
    return cloud


def brute_force(clouds, voxel_size):
    """Return {voxel: highest confidence} of all points of all clouds."""
    best = {}
    for cloud in clouds:
        for p in cloud:
            xyz = np.array([p['x'], p['y'], p['z']], np.float32)
            voxel = tuple(np.floor(xyz / voxel_size).astype(int))
            best[voxel] = max(best.get(voxel, -1.0), float(p['confidence']))
    return best


def test_the_most_confident_point_of_each_voxel_stays():
    random = np.random.default_rng(2)
    clouds = [points(random.uniform(-1, 1, (300, 3)), random.uniform(1, 9, 300)) for _ in range(5)]
    store = MapStore(0.25, 10**6)
    for cloud in clouds:
        store.insert(cloud)
    expected = brute_force(clouds, 0.25)
    assert len(store) == len(expected)
    assert brute_force([store.snapshot()], 0.25) == expected


def test_a_better_point_replaces_and_a_worse_one_does_not():
    store = MapStore(1.0, 100)
    store.insert(points([(0.5, 0.5, 0.5)], 2.0, rgb=1))
    before = store.snapshot()
    store.insert(points([(0.6, 0.5, 0.5)], 3.0, rgb=2))
    store.insert(points([(0.7, 0.5, 0.5)], 1.0, rgb=3))
    assert store.snapshot()['rgb'].tolist() == [2]
    assert before['rgb'].tolist() == [1]  # what a reader holds never changes


def test_negative_and_positive_coordinates_are_different_voxels():
    store = MapStore(1.0, 100)
    store.insert(points([(-0.1, 0, 0), (0.1, 0, 0), (0, -0.1, 0), (0, 0, -0.1)]))
    assert len(store) == 4


def test_memory_is_bounded_and_the_longest_unseen_leave():
    store = MapStore(1.0, 1000)
    for i in range(30):
        store.insert(points([(100 * i + j, 0, 0) for j in range(100)]))
        assert len(store) <= 1000
    kept = set((store.snapshot()['x'] // 100).astype(int).tolist())
    assert kept == set(range(30 - len(kept), 30))
    assert len(store) + store.evicted == 3000


def test_a_voxel_seen_again_stays():
    store = MapStore(1.0, 1000)
    home = points([(-5, 0, 0)])
    for i in range(30):
        store.insert(points([(100 * i + j, 0, 0) for j in range(100)]))
        store.insert(home)
    assert (store.snapshot()['x'] == -5).sum() == 1


def test_nothing_and_far_away_points_are_harmless():
    store = MapStore(0.01, 100)
    store.insert(points(np.empty((0, 3))))
    store.insert(points([(1e9, 0, 0)]))
    assert len(store) == 0
    store.insert(points([(1, 2, 3)]))
    store.clear()
    assert len(store.snapshot()) == 0
