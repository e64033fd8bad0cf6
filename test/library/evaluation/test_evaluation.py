"""A recording through the engine: what is chosen, placed, exported, and that it repeats."""

from types import SimpleNamespace

from fake_engine import DEPTH, FakeEngine, turned
from lingbot_map.evaluation.exports import ColmapModel, DepthExport
from lingbot_map.evaluation.recording import select, Selection
from lingbot_map.evaluation.run import (
    deterministic_kernels,
    run_recording,
    timing_values,
    ViewSettings,
)
from lingbot_map.images.camera import Camera
from lingbot_map.images.mask import load_mask
from lingbot_map.mapping.map_frame import rotation_matrix
from lingbot_map.mapping.points import PointFilter
from lingbot_map.recordings.open import open_source
from lingbot_map.recordings.source import SourceError
from lingbot_map.settings import StreamConfig
from lingbot_map.streaming.checkpoint import load_model
from lingbot_map.streaming.engine import StreamEngine
import numpy as np
from PIL import Image
import pytest
import torch

SECOND = 10**9


def fake(**options):
    settings = {'num_scale_frames': 2, 'keyframe_interval': 2, 'image_width': 56,
                'max_keyframes': 100}  # fmt: skip
    return FakeEngine(SimpleNamespace(**settings), **options)


def picture(seed=0, height=42, width=56):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def pictures(count, **size):
    return [((i + 1) * SECOND, picture(i, **size)) for i in range(count)]


@pytest.fixture
def walk(tmp_path):
    """Write ten pictures at 10 Hz, from 0.1 to 1.0 s."""
    (tmp_path / 'walk').mkdir()
    for i in range(10):
        Image.fromarray(picture(i)).save(tmp_path / 'walk' / f'{i}.png')
    return tmp_path / 'walk'


@pytest.mark.parametrize(
    ('selection', 'tenths'),
    [
        (Selection(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (Selection(every=4), [1, 5, 9]),
        (Selection(start_s=0.25), [4, 5, 6, 7, 8, 9, 10]),
        (Selection(start_s=0.2, duration_s=0.3), [3, 4, 5, 6]),
        (Selection(max_frames=3), [1, 2, 3]),
        (Selection(every=3, start_s=0.1, duration_s=0.7, max_frames=2), [2, 5]),
    ],
)
def test_what_is_chosen(walk, selection, tenths):
    chosen = select(open_source(walk), selection)
    stamps, images = zip(*chosen, strict=True)
    assert stamps == tuple(t * SECOND // 10 for t in tenths)
    assert len(chosen) == len(tenths)
    np.testing.assert_array_equal(images[-1], picture(tenths[-1] - 1))


def test_nothing_left_is_said(walk):
    with pytest.raises(SourceError, match='nothing is left of 10 images over 0.900 s'):
        select(open_source(walk), Selection(start_s=5))


def test_poses_are_in_the_map_of_the_first_image():
    run, timing = run_recording(fake(), pictures(7), scale=3.0)
    assert run.stamps_ns == [(i + 1) * SECOND for i in range(7)]
    np.testing.assert_allclose(run.T_map_cam[:, :3, 3], np.outer(range(7), (3, 0, 0)), atol=1e-9)
    np.testing.assert_allclose(run.T_map_cam[4, :3, 2], (1, 0, 0), atol=1e-9)  # looks along x
    assert run.is_keyframe.tolist() == [True, True, True, False, True, False, True]
    assert (run.images, run.image_size, run.windows) == (7, (56, 42), 1)
    assert len(timing.frame_ms) == 5 and timing.scale_batch_ms > 0


def test_a_scale_batch_that_is_not_full_is_run():
    run, timing = run_recording(fake(), pictures(1))
    assert len(run.stamps_ns) == 1
    assert timing_values(timing, run, torch.device('cpu'))['latency_ms'] is None


def test_a_pose_that_is_not_finite_is_left_out():
    def pose(index):
        return np.full((4, 4), np.nan) if index == 3 else turned()

    run, _ = run_recording(fake(pose=pose), pictures(6))
    assert run.images == 6 and [s // SECOND for s in run.stamps_ns] == [1, 2, 3, 5, 6]


def test_a_scale_batch_that_is_not_finite_is_said():
    model = load_model('demo', '')
    model.camera_head.pose_branch.fc2.bias.data[0] = torch.nan
    engine = StreamEngine(model, StreamConfig(num_scale_frames=2, image_width=56))
    with pytest.raises(SourceError, match='no finite poses for the 2 images'):
        run_recording(engine, pictures(3))


def test_a_change_of_size_is_named():
    with pytest.raises(SourceError, match='at 9.000 s is 28x42, previous images are 56x42'):
        run_recording(fake(), [*pictures(3), (9 * SECOND, picture(width=28))])


def test_a_map_that_cannot_go_on_is_an_error():
    engine = fake(before_push=lambda n: n == 5 and engine.reset())
    with pytest.raises(SourceError, match='cannot continue at 5.000 s'):
        run_recording(engine, pictures(8))


def test_a_full_memory_that_stops_is_an_error():
    engine = fake()
    engine._params.max_keyframes, engine.keyframe_interval = 4, 1
    with pytest.raises(SourceError, match='cannot continue at 5.000 s.*on_limit to roll_over'):
        run_recording(engine, pictures(8))


def test_a_camera_mounted_sideways():
    engine, placed = fake(), []
    run, _ = run_recording(engine, pictures(4), view_settings=ViewSettings(degrees=90),
                           consumers=[placed.append])  # fmt: skip
    np.testing.assert_array_equal(engine.pictures[0], np.rot90(picture(0), k=-1))
    np.testing.assert_array_equal(placed[0].rgb, picture(0))
    np.testing.assert_allclose(run.T_map_cam[:, :3, 3], np.outer(range(4), (1, 0, 0)), atol=1e-9)
    # the picture is turned clockwise, so the camera's x axis points down in it
    np.testing.assert_allclose(run.T_map_cam[0, :3, 0], (0, 0, -1), atol=1e-9)


def test_masked_pixels_become_no_points():
    placed = []
    settings = ViewSettings(mask=load_mask('0,0,0,14'))
    run_recording(fake(), pictures(2), view_settings=settings, consumers=[placed.append])
    points = PointFilter()(placed[0].frame)
    assert len(points) == 28 * 56


def test_a_camera_info_of_another_size_is_named():
    camera = Camera((640, 480), np.eye(3), None)
    with pytest.raises(SourceError, match='for images of 640x480, these are 56x42'):
        run_recording(fake(), pictures(2), view_settings=ViewSettings(camera=camera))


def read_colmap(folder):
    """Return cameras, images and points as COLMAP's documentation describes the text files."""

    def lines(name):
        text = (folder / 'sparse' / '0' / f'{name}.txt').read_text()
        return [line.split() for line in text.split('\n')[:-1] if not line.startswith('#')]

    cameras = {
        int(c[0]): (c[1], int(c[2]), int(c[3]), *map(float, c[4:])) for c in lines('cameras')
    }
    images = lines('images')
    assert all(line == [] for line in images[1::2])
    poses = {p[9]: (np.array(p[1:8], float), int(p[8])) for p in images[::2]}
    return cameras, poses, np.array([[float(v) for v in p] for p in lines('points3D')])


def test_colmap_model_projects_the_map_into_its_images(tmp_path):
    """Points of the first image, projected by what the files say, land on their own pixels."""
    model, placed = ColmapModel(tmp_path / 'colmap'), []
    run_recording(fake(), pictures(5, height=84, width=112), 2.0, consumers=[model, placed.append])
    model.write(PointFilter(stride=7)(placed[0].frame))
    cameras, poses, points = read_colmap(tmp_path / 'colmap')
    assert list(poses) == [f'{s}.000000000.jpg' for s in (1, 2, 3, 5)]  # keyframes
    (w, x, y, z, *t), camera = poses['1.000000000.jpg']
    R = rotation_matrix([x, y, z, w])
    seen = points[:, 1:4] @ R.T + t
    kind, width, height, fx, fy, cx, cy = cameras[camera]
    assert (kind, width, height) == ('PINHOLE', 112, 84)
    pixels = np.stack((fx * seen[:, 0] / seen[:, 2] + cx, fy * seen[:, 1] / seen[:, 2] + cy), 1)
    v, u = np.mgrid[0:42:7, 0:56:7]  # of the network, whose pixels are two of the image
    np.testing.assert_allclose(pixels, 2.0 * np.stack((u, v), -1).reshape(-1, 2), atol=1e-4)
    np.testing.assert_allclose(seen[:, 2], 2.0 * DEPTH, atol=1e-5)
    assert set(points[:, 4:7].ravel()) == {128.0}
    assert Image.open(tmp_path / 'colmap' / 'images' / '3.000000000.jpg').size == (112, 84)


@pytest.mark.parametrize('form', ['png', 'npz'])
def test_depth_of_keyframes(tmp_path, form):
    export = DepthExport(tmp_path / 'depth', form)
    run_recording(fake(), pictures(4), 1.5, consumers=[export])
    export.write()
    files = sorted(f.name for f in (tmp_path / 'depth').iterdir())
    assert files == [f'{s}.000000000.{form}' for s in (1, 2, 3)] + ['frames.json']
    if form == 'png':
        levels = np.asarray(Image.open(tmp_path / 'depth' / files[0]))
        assert levels.dtype == np.uint16 and set(levels.ravel()) == {1500 * DEPTH}
        return
    with np.load(tmp_path / 'depth' / files[2]) as arrays:
        assert set(arrays['depth'].ravel()) == {1.5 * DEPTH}
        np.testing.assert_allclose(arrays['T_map_cam'][:3, 3], (3.0, 0, 0), atol=1e-6)
        assert arrays['intrinsics'].shape == (3, 3)


def tiny_engine(device):
    from lingbot_map.streaming.checkpoint import load_model

    config = StreamConfig(num_scale_frames=4, sliding_window=4, max_keyframes=40, image_width=84)
    return StreamEngine(load_model('tiny', 'random', device), config, device)


@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.cuda)])
def test_the_same_input_gives_the_same_bytes(device):
    if device == 'cuda' and not torch.cuda.is_available():
        pytest.skip('there is no CUDA device')
    images = pictures(14, height=63, width=84)
    depths, trajectories = [], []
    with deterministic_kernels() as chosen:
        assert torch.are_deterministic_algorithms_enabled()
        used = tiny_engine(device)
        for engine in (used, used, tiny_engine(device)):  # again, and afresh
            clouds = []
            run, _ = run_recording(
                engine, images, consumers=[lambda p, c=clouds: c.append(p.frame.depth.cpu())]
            )
            depths.append(torch.stack(clouds).numpy().tobytes())
            trajectories.append(run.T_map_cam.tobytes())
    assert len(set(trajectories)) == len(set(depths)) == 1
    assert np.ptp(run.T_map_cam[:, :3, 3], axis=0).max() > 1e-3
    assert chosen['deterministic_algorithms'] and chosen['CUBLAS_WORKSPACE_CONFIG'] == ':4096:8'
    assert not torch.are_deterministic_algorithms_enabled()
