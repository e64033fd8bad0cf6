"""A robot that stands, with the tiny network over DDS: what it waits for, and what it keeps."""

from moving_view import noisy, panorama, view
from node_rig import running
import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures('ros', 'real_engine')
PICTURE = panorama()
TINY = {'model': 'tiny', 'checkpoint': 'random', 'device': 'cpu', 'num_scale_frames': 3}
TOLD = 'the images show no motion'


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    # However slow the machine, the state is not that no images come.
    monkeypatch.setattr('lingbot_map_ros.mapping.pipeline._SILENCE_S', 600.0)


class Camera:
    """Sends noisy images of a camera that is at these places, 5 px from one to the next."""

    def __init__(self, rig):
        self.rig, self.sent, self._rng = rig, 0, np.random.default_rng(0)

    def send(self, *steps):
        for step in steps:
            rgb = noisy(view(PICTURE, 5 * step), 3.0, self._rng)
            self.sent += 1
            height, width = rgb.shape[:2]
            self.rig.send(float(self.sent), size=(width, height), data=rgb.tobytes())


def test_a_map_begins_when_the_robot_moves_and_nothing_is_kept_while_it_stands(capfd):
    with running(('pose',), **TINY) as rig:
        camera = Camera(rig)
        camera.send(0)
        rig.wait(lambda: rig.state() == 'INITIALIZING 1/3')
        camera.send(*[0] * 9)
        rig.wait(lambda: rig.counts().dropped == {'static': 9}, 'static images')
        rig.wait_for('processed', 10)
        assert rig.state() == 'WAITING_FOR_MOTION'
        assert rig.diagnostic('state') == 'WAITING_FOR_MOTION'
        assert rig.diagnostic('dropped.static') == '9'
        assert not rig.heard['pose']
        camera.send(1)
        rig.wait(lambda: rig.state() == 'INITIALIZING 2/3')
        camera.send(2)
        rig.wait_counts(12, 3, static=9)
        assert rig.state() == 'TRACKING'
        camera.send(3, *[3] * 6)  # and the robot stands again
        rig.wait_counts(19, 10, static=9)
        assert rig.state() == 'TRACKING'
        rig.wait_for('pose', 10)
        assert rig.stamps('pose') == [1, *range(11, 20)]
        assert rig.diagnostic('gated_frames') == '6'
        assert rig.diagnostic('keyframes') == '4'
    assert capfd.readouterr().err.count(TOLD) == 1


def test_each_map_waits_for_motion_and_says_so(capfd):
    with running(**TINY) as rig:
        camera = Camera(rig)
        camera.send(0, 0, 0)
        rig.wait(lambda: rig.counts().dropped == {'static': 2})
        assert rig.state() == 'WAITING_FOR_MOTION'
        assert rig.call('reset').success
        rig.wait_counts(3, 0, static=2, reset=1)
        camera.send(0)  # of the new map the first, which counts
        rig.wait(lambda: rig.state() == 'INITIALIZING 1/3')
        camera.send(0)
        rig.wait(lambda: rig.state() == 'WAITING_FOR_MOTION')
        assert rig.call('flush').success  # who says that no more will come need not move
        rig.wait_counts(5, 1, static=3, reset=1)
        assert rig.state() == 'TRACKING'
    assert capfd.readouterr().err.count(TOLD) == 2


def test_without_the_gate_a_map_begins_at_once():
    with running(motion_gate=False, **TINY) as rig:
        Camera(rig).send(0, 0, 0, 0)
        rig.wait_counts(4, 4)
        assert rig.state() == 'TRACKING'
        assert rig.diagnostic('keyframes') == '4'
