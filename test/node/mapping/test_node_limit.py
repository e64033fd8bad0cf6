"""What becomes of map, path and log when the memory of the engine is full, over DDS."""

import logging
import threading

from fake_engine import Gate
from lingbot_map.settings import StreamConfig
from lingbot_map.streaming.checkpoint import load_model
from lingbot_map.streaming.engine import StreamEngine
from lingbot_map_ros.mapping.worker import library_log
from node_rig import running
import numpy as np
import pytest
import torch

over_dds = pytest.mark.usefixtures('ros')
LIBRARY = logging.getLogger('lingbot_map.streaming.engine')


class Log:
    """Collects what is logged, with its severity."""

    def __init__(self):
        self.lines = []

    def warning(self, line, **_):
        self.lines.append(('warning', line))

    def error(self, line, **_):
        self.lines.append(('error', line))


@pytest.fixture
def tiny(real_engine):
    """Return parameters for the tiny network with random weights."""
    return {'model': 'tiny', 'checkpoint': 'random', 'device': 'cpu', 'image_width': 56}


def send_noise(rig, count, first=1):
    random = np.random.default_rng(first)
    for i in range(first, first + count):
        rig.send(float(i), data=random.integers(0, 256, 42 * 56 * 3, dtype=np.uint8).tobytes())


@over_dds
def test_the_tiny_network_rolls_over_in_one_map(tiny):
    with running(('path',), max_keyframes=16, num_scale_frames=8, path__publish_rate=50.0,
                 **tiny) as rig:  # fmt: skip
        send_noise(rig, 41)
        rig.wait_counts(41, 41)
        rig.wait_for('odometry', 41)
        assert rig.stamps('odometry') == list(range(1, 42))
        xyz = [m.pose.pose.position for m in rig.heard['odometry']]
        assert all(np.isfinite([p.x, p.y, p.z]).all() for p in xyz)
        rig.diagnostic('window')
        told = {v.key: v.value for v in rig.heard['diagnostics'][-1].status[0].values}
        expected = {'window': '4', 'frames': '41', 'keyframes': '41', 'held_keyframes': '9',
                    'cache_fill': '56%', 'worker_errors': '0', 'map_number': '0'}  # fmt: skip
        assert {key: told[key] for key in expected} == expected
        assert float(told['last_residual']) > 0 and float(told['last_scale_step']) > 0
        rig.wait(lambda: rig.heard['path'] and len(rig.heard['path'][-1].poses) == 41)
        assert rig.state() in ('TRACKING', 'WAITING_FOR_IMAGES')  # said 2 s after the last image
        assert rig.call('reset').success
        assert rig.set_parameter('keyframe_interval', 4).successful
        send_noise(rig, 18, first=42)
        rig.wait_counts(59, 59)
        assert rig.diagnostic('window') == '0'
        kept = kept_by_the_library(18, num_scale_frames=8, keyframe_interval=4)
        assert 8 < kept < 18
        assert rig.diagnostic('keyframes') == str(kept)


@over_dds
def test_the_tiny_network_starts_a_new_map_at_the_limit(tiny, capfd):
    with running(('path',), max_keyframes=8, num_scale_frames=4, on_limit='reset',
                 path__publish_rate=50.0, **tiny) as rig:  # fmt: skip
        send_noise(rig, 8)
        rig.wait_counts(8, 8)
        rig.wait(lambda: rig.heard['path'] and len(rig.heard['path'][-1].poses) == 8)
        send_noise(rig, 1, first=9)
        rig.wait(lambda: len(rig.heard['path'][-1].poses) == 0)
        assert rig.state() == 'INITIALIZING 1/4'
        send_noise(rig, 3, first=10)
        rig.wait_counts(12, 12)
        rig.wait(lambda: len(rig.heard['path'][-1].poses) == 4)
        assert rig.diagnostic('map_number') == '1'
    told = capfd.readouterr().err
    assert told.count('image size changed') == 0
    assert told.count('starting a new sequence') == 1  # by the library, through the node
    assert told.count('starting a new map, path and map are cleared (on_limit: reset)') == 1


def kept_by_the_library(count, **settings):
    """Return how many frames of `send_noise` an engine with these settings keeps."""
    model, random = load_model('tiny', 'random', torch.device('cpu')), np.random.default_rng(1)
    engine = StreamEngine(model, StreamConfig(image_width=56, **settings))
    for _ in range(count):
        engine.push(random.integers(0, 256, 42 * 56 * 3, dtype=np.uint8).reshape(42, 56, 3))
    return engine.keyframes


@over_dds
def test_the_keyframe_policy_is_that_of_the_library(tiny):
    settings = {'num_scale_frames': 2, 'keyframe_policy': 'flow', 'flow_threshold': 1000.0,
                'max_non_keyframe_gap': 7}  # fmt: skip
    kept = kept_by_the_library(10, **settings)
    assert 2 < kept < 10
    with running(**settings, **tiny) as rig:
        send_noise(rig, 10)
        rig.wait_counts(10, 10)
        assert rig.diagnostic('keyframes') == str(kept)


@over_dds
def test_results_belong_to_their_sequence_also_if_a_reset_comes_while_it_begins():
    gate = Gate(at=7)
    with running(('path', 'map'), num_scale_frames=1, max_keyframes=3, on_limit='reset',
                 path__publish_rate=50.0, engine={'before_push': gate}) as rig:  # fmt: skip
        rig.send(1.0, 2.0, 3.0, 4.0, 5.0)
        rig.wait_counts(5, 5)
        positions = [m.pose.pose.position.x for m in rig.wait_for('odometry', 5)]
        assert positions == pytest.approx([0, 1, 2, 0, 1], abs=1e-9)
        rig.wait(lambda: rig.heard['path'] and len(rig.heard['path'][-1].poses) == 2)
        assert (rig.state(), rig.diagnostic('map_number')) == ('TRACKING', '1')
        assert rig.engine.resets == 2  # by the warm-up and at the limit
        rig.send(6.0, 7.0)
        assert gate.reached.wait(20)  # image 7 begins a sequence
        assert rig.call('reset').success
        gate.open()
        rig.wait_counts(7, 6, reset=1)
        rig.send(8.0)
        rig.wait_counts(8, 7, reset=1)
        rig.wait_for('odometry', 7)
        assert rig.stamps('odometry') == [1, 2, 3, 4, 5, 6, 8]


def test_the_library_warns_through_the_node_once():
    log, other = Log(), Log()
    with library_log(log):
        LIBRARY.info('hidden')
        for number in range(3):
            LIBRARY.warning('the windows %d do not agree', number)
        LIBRARY.error('cannot roll over')
        thread = threading.Thread(target=listen_elsewhere, args=(other,))
        thread.start()
        thread.join()
    LIBRARY.warning('nobody listens')
    assert log.lines == [
        ('warning', 'the windows 0 do not agree'),
        ('error', 'cannot roll over'),
    ]
    assert other.lines == [('warning', 'of another node')]


def listen_elsewhere(log):
    with library_log(log):
        LIBRARY.warning('of another node')
