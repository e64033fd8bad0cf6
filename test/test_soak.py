"""Thousands of images at full speed, many broken: all are accounted for, and memory is flat."""

from collections import Counter
import gc
import logging
import os
from pathlib import Path

from node_rig import running
import numpy as np
import pytest
import rclpy

LOGGER = logging.getLogger('soak')
IN_FLIGHT = 8
CHECKPOINTS = 20
_BROKEN = {
    'foo8': ({'encoding': 'foo8'}, 'bad_image'),
    'no data': ({'data': b''}, 'bad_image'),
    'short': ({'data': bytes(100)}, 'bad_image'),
    'step': ({'step': 7}, 'bad_image'),
    'no size': ({'size': (0, 0)}, 'bad_image'),
    'sliver': ({'size': (4000, 1), 'data': bytes(12000)}, 'bad_image'),
    'no frame': ({'frame_id': ''}, 'frame_id'),
    'other frame': ({'frame_id': 'other_cam'}, 'frame_id'),
}
_STAMPS = {'repeated': 'repeated_stamp', 'late': 'late', 'none': 'zero_stamp'}


class UnhappyDevice:
    """Fails now and then."""

    def __init__(self, every):
        self.every, self.failures = every, 0

    def __call__(self, n):
        if n % self.every == 0:
            self.failures += 1
            raise RuntimeError('the device is unhappy')


@pytest.fixture(scope='module', autouse=True)
def ros():
    rclpy.init()
    yield
    rclpy.shutdown()


def resident_mib():
    gc.collect()
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    return pages * os.sysconf('SC_PAGE_SIZE') / 2**20


def soak(rig, count, rng):
    """Send `count` images; return the counts that must come out, and memory on the way [MiB]."""
    dropped, memory_mib, good = Counter(), [], 0
    rig.send(1.0)
    for i in range(1, count):
        kind = rng.choice([*_BROKEN, *_STAMPS]) if rng.random() < 0.2 else ''
        fields, reason = _BROKEN.get(kind, ({}, _STAMPS.get(kind, '')))
        stamp_s = {'repeated': 1.0 + good / 100, 'late': 0.5 + good / 100, 'none': 0}.get(kind)
        if stamp_s is None:
            good += 1  # also stamps of broken images are in order
            stamp_s = 1.0 + good / 100
            if reason == 'frame_id':
                good -= 1  # refused before its stamp is looked at
        rig.send(stamp_s, **fields)
        dropped[reason] += bool(reason)
        if i % IN_FLIGHT == 0:
            rig.wait(lambda i=i: rig.counts().received == i + 1 and rig.counts().waiting == 0)
        if (i + 1) % (count // CHECKPOINTS) == 0:
            rig.heard.clear()
            memory_mib.append(resident_mib())
    return dropped, memory_mib


def check(count, growth_mib):
    """Soak a node with `count` images; its memory may grow by so much in the second half."""
    device = UnhappyDevice(every=count // 7)
    with running(
        ('path', 'points', 'map'),
        num_scale_frames=1,
        keyframe_interval=3,
        max_keyframes=100000,
        path__max_size=100,
        path__publish_rate=5.0,
        map__max_points=5000,
        map__publish_rate=5.0,
        engine={'before_push': device},
    ) as rig:
        dropped, memory_mib = soak(rig, count, np.random.default_rng(0))
        assert device.failures > 3
        dropped = {reason: n for reason, n in dropped.items() if n}
        dropped['worker_error'] = device.failures
        rig.wait_counts(count, count - sum(dropped.values()), **dropped)
        counts = rig.counts()
        assert len(rig.node.pipeline.outputs.map) <= 5000
        LOGGER.info('in %d = out %d + dropped %s', counts.received, counts.out, counts.dropped)
        LOGGER.info('memory [MiB]: %s', ' '.join(f'{m:.1f}' for m in memory_mib))
        half = memory_mib[CHECKPOINTS // 2 :]
        # A leak shows in every step; what glibc keeps of one busy moment shows in a single one.
        assert np.median(np.diff(half)) < 0.1, memory_mib
        assert max(half) - half[0] < growth_mib, memory_mib
        assert rig.state() == 'TRACKING'


def test_a_short_soak_is_accounted_for_to_the_last_image():
    check(1500, growth_mib=10.0)


@pytest.mark.slow
def test_a_long_soak_is_accounted_for_to_the_last_image():
    check(20000, growth_mib=64.0)
