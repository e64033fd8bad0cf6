"""Keyframe decisions: fixed interval, and flow measured on scenes whose flow is known."""

from lingbot_map.geometry import encode_pose
from lingbot_map.models.keyframes import Keyframes, mean_flow
from lingbot_map.models.memory import MemoryShape, StreamLimitError, StreamMemory
import numpy as np
import pytest
import torch

HEIGHT, WIDTH, FOCAL = 28, 42, 40.0


def pose(center=(0.0, 0.0, 0.0), R=None, focal=FOCAL):
    """Return the encoding (9,) of a camera at `center`, turned by R."""
    T = torch.eye(4)
    T[:3, :3] = torch.eye(3) if R is None else torch.as_tensor(R, dtype=torch.float32)
    T[:3, 3] = torch.tensor(center)
    K = torch.tensor([[focal, 0, WIDTH / 2], [0, focal, HEIGHT / 2], [0, 0, 1]])
    return encode_pose(T, K, HEIGHT, WIDTH)


def plane(z):
    return torch.full((HEIGHT, WIDTH), z)


def outputs(center, z=2.0):
    return {'pose_enc': pose(center)[None, None], 'depth': plane(z)[None, None, ..., None]}


def test_flow_of_a_step_to_the_side_is_disparity():
    flow = mean_flow(pose((0.1, -0.2, 0.0)), plane(2.0), pose())
    assert flow.item() == pytest.approx(FOCAL * np.hypot(0.1, 0.2) / 2, rel=1e-5)


def test_flow_uses_the_pose_as_camera_to_world_and_each_cameras_own_focal_length():
    angle = 0.2
    c, s = np.cos(angle), np.sin(angle)
    R = np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])
    reference = pose((0.3, 0.1, -0.4), R.T, focal=55.0)
    current = pose((-0.2, 0.0, 0.1), R)
    expected = []
    for v in range(0, HEIGHT, 8):
        for u in range(0, WIDTH, 8):
            ray = np.array([(u - WIDTH / 2) / FOCAL, (v - HEIGHT / 2) / FOCAL, 1])
            world = R @ (3.0 * ray) + (-0.2, 0.0, 0.1)
            x, y, z = R @ (world - (0.3, 0.1, -0.4))
            seen = 55 * x / z + WIDTH / 2, 55 * y / z + HEIGHT / 2
            expected.append(np.hypot(seen[0] - u, seen[1] - v))
    assert mean_flow(current, plane(3.0), reference).item() == pytest.approx(
        np.mean(expected), rel=1e-4
    )


def test_points_behind_a_camera_do_not_count():
    depth = plane(1.0)
    depth[:, WIDTH // 2 :] = 3.0
    step_back = pose((0.1, 0.0, -2.0))  # seen from the reference, depth 1 lies behind it
    right = plane(0.0)
    right[:, WIDTH // 2 :] = 3.0
    assert mean_flow(step_back, depth, pose()) == mean_flow(step_back, right, pose()) > 0
    assert mean_flow(step_back, plane(1.0), pose()) == 0
    assert mean_flow(step_back, plane(0.0), pose()) == 0


def decisions(keyframes, steps):
    """Return what is kept of frames that lie at these x, and the flows [px]."""
    keyframes.start(pose())
    kept, flows = [], []
    for x in steps:
        frame = outputs((x, 0.0, 0.0))
        assert not (keyframes.by_flow and keyframes.keeps_early())
        kept.append(keyframes.keeps(frame))
        keyframes.advance(kept[-1], frame)
        flows.append(keyframes.flow)
    return kept, flows


@pytest.mark.parametrize('interval', [1, 2, 3])
def test_every_nth_frame_beginning_with_the_first(interval):
    keyframes = Keyframes(interval)
    for _ in range(2):  # `start` begins anew
        kept, _ = decisions(keyframes, [0.0] * 7)
        assert kept == [i % interval == 0 for i in range(7)]


def test_flow_is_measured_against_the_last_keyframe():
    # One unit to the side is 20 px; 4 px are 0.2 units.
    kept, flows = decisions(Keyframes(7, flow_threshold=4.0), [0.1, 0.2, 0.29, 0.31, 0.4, 0.6])
    assert kept == [True, False, False, True, False, True]
    assert flows == pytest.approx([2, 2, 3.8, 4.2, 1.8, 5.8], rel=1e-4)


def test_a_gap_is_bounded():
    kept, _ = decisions(Keyframes(1, 4.0, max_non_keyframe_gap=3), [0.0] * 8)
    assert kept == [True, False, False, True, False, False, True, False]


def test_without_depth_every_frame_is_kept():
    keyframes = Keyframes(2, flow_threshold=4.0)
    keyframes.start(pose())
    frame = {'pose_enc': pose()[None, None]}
    for _ in range(3):
        assert keyframes.keeps(frame)
        keyframes.advance(True, frame)


@pytest.mark.parametrize('keep_early', [True, False])
def test_a_full_memory_keeps_nothing_more_and_goes_on_with_non_keyframes(keep_early):
    shape = MemoryShape(layers=1, heads=1, head_dim=2, patches=1, specials=1, anchors=1, window=1,
                        max_keyframes=2, camera_iterations=0, camera_depth=0, camera_heads=1,
                        camera_head_dim=1)  # fmt: skip
    memory = StreamMemory(shape, torch.device('cpu'), torch.float32)
    for _ in range(2):
        memory.write(1, keep_early)
        memory.commit()
    with pytest.raises(StreamLimitError, match='2 frames kept'):
        memory.write(1, keep_early)
        memory.commit()
    memory.write(1, keep=False)
    memory.undo()
    assert memory.kept == 2
