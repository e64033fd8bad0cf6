"""Thousands of images at full speed, many broken: all are accounted for, and memory is flat."""

from collections import Counter, defaultdict, deque
import ctypes
from functools import partial
import gc
import logging
import os
from pathlib import Path
import sys

from node_rig import running
import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures('ros')
LOGGER = logging.getLogger('soak')
IN_FLIGHT = 8
CHECKPOINTS = 20
BYTES_PER_POSE = 104  # of the trajectory, which keeps every pose of a map: it is to be saved whole
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


class MallInfo(ctypes.Structure):
    """What `mallinfo2` of glibc 2.33 tells, in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ('arena', 'ordblks', 'smblks', 'hblks', 'hblkhd', 'usmblks', 'fsmblks')
        + ('uordblks', 'fordblks', 'keepcost')
    ]


def memory(trajectory):
    """
    Return what is resident and what of the heap is held [MiB], and how many Python objects.

    The first is what a robot pays, also for memory that glibc keeps of one busy moment. A leak
    that fits into such memory shows in the others, which leave out the trajectory.
    """
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo
    info = mallinfo2()
    resident = int(Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')
    held = info.uordblks + info.hblkhd - BYTES_PER_POSE * len(trajectory)
    return resident / 2**20, held / 2**20, sys.getallocatedblocks()


def soak(rig, count, rng):
    """Send `count` images; return the counts that must come out, and `memory` on the way."""
    dropped, noted, good = Counter(), [], 0
    # Of each topic the newest message only: the slower the machine, the more paths and maps come.
    rig.heard = defaultdict(partial(deque, maxlen=1))
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
            noted.append(memory(rig.node.pipeline.session.trajectory))
    return dropped, np.array(noted)


def check(count, resident_mib, held_mib, objects):
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
        dropped, noted = soak(rig, count, np.random.default_rng(0))
        assert device.failures > 3
        dropped = {reason: n for reason, n in dropped.items() if n}
        dropped['worker_error'] = device.failures
        rig.wait_counts(count, count - sum(dropped.values()), **dropped)
        counts = rig.counts()
        assert rig.call('flush').success  # the publisher thread may be within an update of the map
        assert len(rig.node.pipeline.session.points) <= 5000
        LOGGER.info('in %d = out %d + dropped %s', counts.received, counts.out, counts.dropped)
        for name, values in zip(('resident', 'held', 'objects'), noted.T, strict=True):
            LOGGER.info('%s: %s', name, ' '.join(f'{value:.2f}' for value in values))
        half = noted[CHECKPOINTS // 2 :]
        assert (half.max(axis=0) - half[0] < (resident_mib, held_mib, objects)).all(), noted
        # A leak shows in every step; what glibc keeps of one busy moment shows in a single one.
        assert np.median(np.diff(half[:, 0])) < 0.1, noted
        check_trajectory(rig.node.pipeline.session.trajectory)
        assert rig.state() == 'TRACKING'


def check_trajectory(trajectory):
    """Check that a pose takes its bytes, and an array an eighth more than it holds at most."""
    held = sys.getsizeof(trajectory._stamps_ns) + sys.getsizeof(trajectory._rows)
    assert len(trajectory) > 0
    assert held < 9 / 8 * BYTES_PER_POSE * len(trajectory) + 1000


def test_a_short_soak_is_accounted_for_to_the_last_image():
    check(1500, resident_mib=16.0, held_mib=1.0, objects=20000)


@pytest.mark.slow
def test_a_long_soak_is_accounted_for_to_the_last_image():
    check(20000, resident_mib=16.0, held_mib=0.5, objects=20000)
