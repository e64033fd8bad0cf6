from dataclasses import replace
import io
import math

from lingbot_map.errors import UserError
from lingbot_map.synthetic.__main__ import main
from lingbot_map.synthetic.bag import write_sample_bag
from lingbot_map.synthetic.paths import camera_paths, slowed
from lingbot_map.synthetic.rendering import Clip, render_clips, render_rooms
from lingbot_map.synthetic.rooms import (
    build_rooms,
    FIRST_TRAINING_SEED,
    footprint_distance,
    RoomConfig,
    SAMPLE_SEED,
    TEST_CONFIG,
    TEST_SEEDS,
    VALIDATION_SEEDS,
)
import numpy as np
from PIL import Image
import pytest
import torch

SMALL = RoomConfig(width=84, height=63, num_frames=12)
SEEDS = [10_003, 20_001, 1_000_007]


@pytest.fixture(scope='module', autouse=True)
def single_thread():
    # thousands of short operations: two threads wait for each other on a busy machine
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope='module')
def clip():
    return render_clips(SEEDS, SMALL, 'cpu')


def world_points(clip, room, frame):
    """Unproject by the text of the specification: integer pixels, z-depth, camera to world."""
    K, T = (array[room, frame].double().numpy() for array in (clip.K, clip.T_world_cam))
    depth = clip.depth[room, frame].double().numpy()
    v, u = np.mgrid[: depth.shape[0], : depth.shape[1]]
    points = np.stack(((u - K[0, 2]) / K[0, 0], (v - K[1, 2]) / K[1, 1], np.ones_like(depth)), -1)
    return (points * depth[..., None]) @ T[:3, :3].T + T[:3, 3]


def project(clip, room, frame, points):
    K, T = (array[room, frame].double().numpy() for array in (clip.K, clip.T_world_cam))
    camera = (points - T[:3, 3]) @ T[:3, :3]
    image = camera @ K.T
    return image[..., :2] / image[..., 2:], camera[..., 2]


def sample(planes, uv):
    """Look planes (C, H, W) up at pixels (N, 2), bilinear."""
    height, width = planes.shape[-2:]
    grid = torch.from_numpy(uv / (width - 1, height - 1) * 2 - 1).float()[None, None]
    return (
        torch.nn.functional.grid_sample(planes.float()[None], grid, align_corners=True)[0, :, 0]
        .T.double()
        .numpy()
    )


def seen_again(clip, room, first, second):
    """Return pixels of the first frame, where they fall in the second, and their depth there."""
    height, width = clip.depth.shape[-2:]
    uv, depth = project(clip, room, second, world_points(clip, room, first).reshape(-1, 3))
    inside = (depth > 0) & (uv >= 0).all(-1) & (uv <= (width - 1, height - 1)).all(-1)
    assert inside.mean() > 0.3
    return inside, uv[inside], depth[inside]


@pytest.mark.parametrize('room', range(len(SEEDS)))
def test_depth_of_one_frame_agrees_with_another_through_the_poses(clip, room):
    _, uv, expected = seen_again(clip, room, 2, 5)
    # planes are linear in inverse depth, so bilinear look-up of it is exact inside a surface
    found = 1 / sample(1 / clip.depth[room, 5][None], uv)[:, 0]
    error = np.abs(found - expected) / expected
    assert np.median(error) < 1e-5
    assert (error < 1e-3).mean() > 0.85


@pytest.mark.parametrize('room', range(len(SEEDS)))
def test_colours_move_with_the_points(clip, room):
    inside, uv, expected = seen_again(clip, room, 2, 5)
    visible = np.abs(1 / sample(1 / clip.depth[room, 5][None], uv)[:, 0] - expected) < 1e-3
    before = clip.rgb[room, 2].flatten(1).T.double().numpy()[inside][visible]
    after = sample(clip.rgb[room, 5], uv)[visible]
    same_pixel = clip.rgb[room, 5].flatten(1).T.double().numpy()[inside][visible]
    moved, unmoved = (np.abs(before - other).mean() for other in (after, same_pixel))
    assert moved < 12
    assert moved < 0.6 * unmoved


def test_rays_end_on_a_surface_and_meet_nothing_before(clip):
    rooms = build_rooms(SEEDS, SMALL, torch.device('cpu'))
    for room in range(len(SEEDS)):
        boxes = rooms.cuboids[room].numpy()
        for frame in (0, 7):
            centre = clip.T_world_cam[room, frame, :3, 3].double().numpy()
            ends = world_points(clip, room, frame).reshape(-1, 3)
            gap = np.stack([signed_distance(ends, box) for box in boxes])
            np.testing.assert_allclose(np.abs(gap).min(0), 0, atol=1e-5)
            for share in np.linspace(0, 0.999, 40):
                way = centre + share * (ends - centre)
                assert (signed_distance(way, boxes[0]) <= 0).all()
                assert all((signed_distance(way, box) >= -1e-5).all() for box in boxes[1:])


def signed_distance(points, cuboid):
    """Return the Chebyshev distance from a cuboid's surface, negative inside."""
    cos, sin = math.cos(cuboid[6]), math.sin(cuboid[6])
    local = (points - cuboid[:3]) @ np.array(((cos, -sin, 0), (sin, cos, 0), (0, 0, 1)))
    return (np.abs(local) - cuboid[3:6]).max(-1)


def test_boxes_are_seen():
    single = replace(SMALL, num_frames=1)
    rooms = build_rooms(range(40, 60), single, torch.device('cpu'))
    clips = render_rooms(rooms, single)
    on_a_box = 0
    for room in range(20):
        ends = world_points(clips, room, 0).reshape(-1, 3)
        on_a_box += (signed_distance(ends, rooms.cuboids[room, 0].numpy()) < -1e-3).mean() / 20
    assert 0.03 < on_a_box < 0.6


def test_clips_depend_on_their_own_seed_alone(clip):
    for room, seed in enumerate(SEEDS):
        alone = render_clips([seed], SMALL, 'cpu')
        for name in ('rgb', 'depth', 'T_world_cam', 'K'):
            assert torch.equal(getattr(alone, name)[0], getattr(clip, name)[room]), name
    assert not torch.equal(clip.rgb[0], clip.rgb[1])
    assert (clip.K[0] != clip.K[1]).any()


def test_frames_of_a_clip_share_the_lens_but_not_the_noise(clip):
    assert (clip.K[:, :1] == clip.K).all()
    rooms = build_rooms([3], SMALL, torch.device('cpu'))
    rooms.T_world_cam[:, 1] = rooms.T_world_cam[:, 0]
    still = render_rooms(rooms, SMALL)
    assert torch.equal(still.depth[:, 0], still.depth[:, 1])
    flicker = still.rgb[:, 1].float() - still.rgb[:, 0].float()
    assert 0.3 < flicker.std() < 10
    assert flicker.mean().abs() < 2


def test_shapes_and_types(clip):
    assert (clip.rgb.dtype, clip.rgb.shape) == (torch.uint8, (3, 12, 3, 63, 84))
    assert (clip.depth.dtype, clip.depth.shape) == (torch.float32, (3, 12, 63, 84))
    assert (clip.T_world_cam.dtype, clip.T_world_cam.shape) == (torch.float32, (3, 12, 4, 4))
    assert (clip.K.dtype, clip.K.shape) == (torch.float32, (3, 12, 3, 3))
    assert (clip.K[..., 0, 2] == 42).all() and (clip.K[..., 1, 2] == 31.5).all()
    assert (clip.K[..., 0, 0] == clip.K[..., 1, 1]).all()
    assert render_clips([1], replace(SMALL, num_frames=1), 'cpu').depth.shape == (1, 1, 63, 84)


def test_world_is_upright_and_cameras_look_where_they_go():
    seeds = torch.arange(200)
    size = torch.tensor([[6.0, 6.0, 2.7]], dtype=torch.float64).expand(200, -1)
    T = camera_paths(seeds, size, 64, (0.07, 0.09), 32).T_world_cam
    R = T[..., :3, :3]
    eye = torch.eye(3, dtype=torch.float64).expand_as(R)
    torch.testing.assert_close(R.mT @ R, eye)
    torch.testing.assert_close(torch.linalg.det(R), torch.ones(R.shape[:2], dtype=torch.float64))
    assert (R[..., 2, 1] < -math.cos(math.radians(25))).all()  # optical y points down

    robots = T[:, :, 2, 3].mean(1) < 1.2
    assert 60 < robots.sum() < 140
    assert (R[robots][..., 2, 1] < -math.cos(math.radians(14))).all()
    assert (R[robots][..., 2, 0].abs() < math.sin(math.radians(1))).all()  # no roll
    moves = T[robots][..., :3, 3].diff(dim=1)
    ahead = (moves * R[robots][:, :-1, :, 2]).sum(-1) / moves.norm(dim=-1)
    assert (ahead > 0.9).all()  # z of the camera is forward, not backward or sideways
    assert (T[..., 2, 3] > 0.25).all() and (T[..., 2, 3] < 1.85).all()


def test_no_texture_is_empty(clip):
    blocks = clip.rgb.float().mean(2).unfold(-2, 21, 21).unfold(-2, 21, 21)
    spread = blocks.flatten(-2).std(-1)
    assert (spread > 2).float().mean() > 0.95
    assert 40 < clip.rgb.float().mean() < 210


def test_seeds_are_disjoint():
    sets = [set(TEST_SEEDS), set(VALIDATION_SEEDS), {SAMPLE_SEED}]
    assert [len(seeds) for seeds in sets] == [32, 256, 1]
    assert len(set.union(*sets)) == sum(len(seeds) for seeds in sets)
    assert max(set.union(*sets)) < FIRST_TRAINING_SEED


def test_test_set_is_the_stated_one():
    assert (TEST_SEEDS.start, TEST_SEEDS.stop, TEST_CONFIG.num_frames) == (10_000, 10_032, 64)
    rooms = build_rooms(TEST_SEEDS, TEST_CONFIG, torch.device('cpu'))
    centres, forward = rooms.T_world_cam[..., :3, 3], rooms.T_world_cam[..., :2, 2]
    steps = centres.diff(dim=1).norm(dim=-1)
    assert (steps.sum(-1) >= 4).all()
    assert (steps.mean(-1) >= 0.05 - 1e-6).all() and (steps.mean(-1) <= 0.1 + 1e-6).all()
    yaw = torch.atan2(forward[..., 1], forward[..., 0]).diff(dim=1)
    yaw = torch.atan2(yaw.sin(), yaw.cos())  # without jumps by a full circle
    assert (yaw.abs().sum(-1).rad2deg() >= 90).all()
    walls, boxes = rooms.cuboids[:, 0, 3:6], rooms.cuboids[:, 1:]
    assert ((walls[:, None, :2] - centres[..., :2].abs()) >= 0.35).all()
    to_boxes = footprint_distance(centres[:, None, :, :2], boxes).amin(-1)
    assert (to_boxes[boxes[..., 7] > 0] >= 0.35).all()


def test_rooms_of_the_test_set_stay_as_they_were():
    # published figures refer to these rooms: a change here asks for a new evaluation
    clips = render_clips([10_000, 10_031], replace(TEST_CONFIG, width=42, height=31), 'cpu')
    ends = clips.T_world_cam[:, -1, :3, 3]
    np.testing.assert_allclose(
        ends, [[-0.68701, 0.62485, 1.55195], [-1.11622, 1.79052, 1.40659]], atol=1e-4
    )
    np.testing.assert_allclose(clips.K[:, 0, 0, 0], [24.02489, 25.14111], atol=1e-4)
    np.testing.assert_allclose(clips.depth.mean((1, 2, 3)), [2.51446, 2.67889], atol=1e-3)
    np.testing.assert_allclose(
        clips.rgb.float().mean((1, 3, 4)),
        [[119.17, 122.49, 112.12], [106.35, 120.11, 113.39]],
        atol=0.3,
    )


@pytest.mark.parametrize('change', ({'width': 0}, {'mean_step': (0.2, 0.1)}))
def test_impossible_configs_are_refused(change):
    with pytest.raises(ValueError, match='at least|low'):
        replace(SMALL, **change)


def test_bag_holds_the_clip(clip, tmp_path):
    from rosbags.highlevel import AnyReader

    write_sample_bag(tmp_path / 'room', clip)
    with AnyReader([tmp_path / 'room']) as reader:
        messages = {topic: [] for topic in reader.topics}
        for connection, stamp_ns, raw in reader.messages():
            message = reader.deserialize(raw, connection.msgtype)
            messages[connection.topic].append((stamp_ns, message))
    assert {topic: len(found) for topic, found in messages.items()} == {
        '/camera/image/compressed': 12,
        '/camera/camera_info': 12,
        '/ground_truth': 12,
    }
    for topic, found in messages.items():
        stamps = [m.header.stamp.sec * 10**9 + m.header.stamp.nanosec for _, m in found]
        assert stamps == [stamp_ns for stamp_ns, _ in found], topic
        assert set(np.diff(stamps)) == {10**8}
    for frame in (0, 11):
        image = messages['/camera/image/compressed'][frame][1]
        rgb = np.asarray(Image.open(io.BytesIO(image.data.tobytes()))).astype(int)
        expected = clip.rgb[0, frame].permute(1, 2, 0).numpy().astype(int)
        assert rgb.shape == expected.shape and np.abs(rgb - expected).mean() < 15
        info = messages['/camera/camera_info'][frame][1]
        np.testing.assert_allclose(info.k.reshape(3, 3), clip.K[0, frame])
        assert (info.width, info.height) == (84, 63)
        pose = messages['/ground_truth'][frame][1].pose.pose
        T = clip.T_world_cam[0, frame].double().numpy()
        position = (pose.position.x, pose.position.y, pose.position.z)
        np.testing.assert_allclose(position, T[:3, 3])
        np.testing.assert_allclose(rotated_z(pose.orientation), T[:3, 2], atol=1e-6)


def rotated_z(q):
    """Return where a quaternion message turns the z axis."""
    return (
        2 * (q.x * q.z + q.w * q.y),
        2 * (q.y * q.z - q.w * q.x),
        1 - 2 * (q.x * q.x + q.y * q.y),
    )


def test_bag_that_cannot_be_written_is_one_line(clip, tmp_path, monkeypatch, capsys):
    with pytest.raises(UserError, match='exists'):
        write_sample_bag(tmp_path, clip)
    for path in (tmp_path, tmp_path / 'no_folder' / 'room'):
        assert main(['--bag', str(path)]) == 1
        error = capsys.readouterr().err
        assert str(tmp_path) in error and error.count('\n') == 1
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    assert main(['--bag', str(tmp_path / 'room')]) == 1
    assert 'pip install rosbags' in capsys.readouterr().err


def test_slowed_way_passes_through_the_poses_it_is_made_of():
    T = build_rooms(SEEDS, SMALL, torch.device('cpu')).T_world_cam
    fine = slowed(T, 3 * (T.shape[1] - 1) + 1)
    torch.testing.assert_close(fine[:, ::3], T)
    R = fine[..., :3, :3]
    torch.testing.assert_close(R @ R.mT, torch.eye(3, dtype=T.dtype).expand_as(R))
    steps = fine[..., :3, 3].diff(dim=1).norm(dim=-1)
    assert steps.max() < 2 * T[..., :3, 3].diff(dim=1).norm(dim=-1).max() / 3


def test_programs_write_bag_and_preview(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        'lingbot_map.synthetic.__main__.SAMPLE_CONFIG', replace(SMALL, num_frames=2)
    )
    monkeypatch.setattr('lingbot_map.synthetic.__main__.SAMPLE_FRAMES', 4)
    monkeypatch.setattr('lingbot_map.synthetic.__main__.TEST_CONFIG', replace(SMALL, num_frames=8))
    monkeypatch.setattr('lingbot_map.synthetic.__main__.TEST_SEEDS', range(10_000, 10_003))
    assert main(['--bag', str(tmp_path / 'room'), '--preview', str(tmp_path / 'test.png')]) == 0
    assert '4 frames' in capsys.readouterr().out
    assert Image.open(tmp_path / 'test.png').size == (8 * 84, 3 * 63)
    names = sorted(path.name for path in tmp_path.rglob('*') if path.is_file())
    assert names == ['metadata.yaml', 'room.mcap', 'test.png']


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA GPU')
def test_gpu_renders_what_the_cpu_renders(clip):
    gpu = Clip(
        **{name: value.cpu() for name, value in vars(render_clips(SEEDS, SMALL, 'cuda')).items()}
    )
    torch.testing.assert_close(gpu.T_world_cam, clip.T_world_cam)
    assert ((gpu.depth - clip.depth).abs() < 1e-4).float().mean() > 0.999
    assert ((gpu.rgb.int() - clip.rgb.int()).abs() <= 2).float().mean() > 0.99
