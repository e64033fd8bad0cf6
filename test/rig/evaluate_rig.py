"""Small recordings with known true poses, and evaluations of them by an engine of known poses."""

import functools
import io
import json

from bag_writer import header, JAZZY, odometry, raw_image, write_bag
from fake_engine import FakeEngine, turned
from lingbot_map.evaluation import cli as evaluate
from lingbot_map.evaluation import engine as evaluate_engine
from lingbot_map.evaluation import outputs
import numpy as np
from PIL import Image
import yaml

SECOND = 10**9
FIRST_S = 50
FILES = {
    'error.png', 'frames.png', 'map.ply', 'map.png', 'metrics.json', 'report.html', 'run.yaml',
    'timing.json', 'trajectory.kitti', 'trajectory.png', 'trajectory.tum',
}  # fmt: skip
RANDOM = ['--model', 'tiny', '--checkpoint', 'random']


def curved(index):
    """Return a camera that runs along a winding path, seen from a world turned at will."""
    T = np.eye(4)
    T[:3, 3] = np.sin(0.3 * index), 0.2 * np.cos(index), 1 - np.cos(0.3 * index)
    return turned() @ T


def curved_in_room(index, scale=3.0):
    """Return positions of `curved` in metres, in a room with other axes and another origin."""
    x, y, z = (np.linalg.inv(curved(0)) @ curved(index))[:3, 3]
    return scale * np.array([-x, -y, z]) + (7, 8, 9)


def images(count, topic='/cam', size=(56, 42)):
    """Return messages of a topic, one a second."""
    width, height = size
    pixels = [np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8)
              for i in range(count)]  # fmt: skip
    stamps = [(FIRST_S + i) * SECOND for i in range(count)]
    return [(topic, s, raw_image(s, p)) for s, p in zip(stamps, pixels, strict=True)]


def truth(count, topic='/ground_truth', offset_s=0, position=curved_in_room):
    stamps = [(FIRST_S + i + offset_s) * SECOND for i in range(count)]
    return [(topic, s, odometry(s, position(i))) for i, s in enumerate(stamps)]


def camera_info(topic='/camera_info', size=(56, 42), distortion=(0.0,) * 5, focal=50.0):
    width, height = size
    K = np.array([focal, 0, width / 2, 0, focal, height / 2, 0, 0, 1.0])
    stamp = FIRST_S * SECOND
    info = JAZZY.types['sensor_msgs/msg/CameraInfo'](
        header=header(stamp), height=height, width=width, distortion_model='plumb_bob',
        d=np.array(distortion), k=K, r=np.eye(3).ravel(),
        p=np.insert(K, (3, 6, 9), 0.0), binning_x=0, binning_y=0,
        roi=JAZZY.types['sensor_msgs/msg/RegionOfInterest'](0, 0, 0, 0, False),
    )  # fmt: skip
    return topic, stamp, info


def truth_bag(path, count=9, **options):
    return write_bag(path, images(count) + truth(count, **options), 'mcap')


def blank_png(*_, **__):
    """Return a small picture, in place of one that takes a second to draw."""
    blank = io.BytesIO()
    Image.new('RGB', (8, 8)).save(blank, 'PNG')
    return blank.getvalue()


def draw_nothing(monkeypatch):
    """Replace every picture of an evaluation by a blank one."""
    for name in ('render_map', 'draw_trajectories', 'draw_errors', 'draw_strip'):
        monkeypatch.setattr(outputs, name, blank_png)


def use_fake(monkeypatch, engines, draws=False, **options):
    """Let evaluations use a FakeEngine, which is appended to `engines`, and blank pictures."""
    if not draws:
        draw_nothing(monkeypatch)

    def make(params):
        engines.append(functools.partial(FakeEngine, **options)(params))
        return engines[-1]

    monkeypatch.setattr(evaluate_engine, 'load_engine', make)


def run(out, *arguments):
    """Return the exit code of an evaluation with random weights into the folder `out`."""
    return evaluate.main([*map(str, arguments), *RANDOM, '--out', str(out)])


def metrics(folder):
    return json.loads((folder / 'metrics.json').read_text())


def record(folder):
    return yaml.safe_load((folder / 'run.yaml').read_text())
