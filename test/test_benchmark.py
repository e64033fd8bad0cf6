"""The benchmark of the node runs and prints every measurement."""

import subprocess
import sys


def test_it_prints_each_cost_beside_a_plain_copy():
    command = [sys.executable, '-m', 'lingbot_map_ros.benchmark', '--frames', '10']
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    rows = [line for line in ran.stdout.splitlines() if not line.startswith('[ms]')]
    names = [line[:42].strip() for line in rows]
    copy = 'plain copy of its bytes'
    assert names == [
        'image 640x480 to odometry and TF',
        copy,
        'cloud 518x392 on the publisher thread',
        copy,
        'building a cloud of 1 M points',
        copy,
        'serialising it',
    ]
    for row in rows:
        median, p95, thread = map(float, row[42:].split()[:3])
        assert 0 < median <= p95
        assert thread > 0


def test_too_few_frames_are_refused():
    command = [sys.executable, '-m', 'lingbot_map_ros.benchmark', '--frames', '3']
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2
    assert '--frames is 3' in ran.stderr
