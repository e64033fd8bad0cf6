"""Keeps a test run to this machine and apart from other runs, robots and busy cores."""

import os
from pathlib import Path
import sys

import pytest

sys.path.insert(0, str(Path(__file__).parent / 'rig'))

os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'LOCALHOST'
# Domains up to 101 keep their ports clear of those that Linux hands out.
os.environ['ROS_DOMAIN_ID'] = str(1 + os.getpid() % 101)
# Read by torch and OpenCV when they are imported, and by the programs that tests start. One
# thread: two that wait for each other on busy cores cost a hundredfold.
os.environ.setdefault('OMP_NUM_THREADS', '1')


@pytest.fixture
def real_engine(monkeypatch):
    """Have node_rig run the engine that the parameters ask for, in place of the fake one."""
    from lingbot_map.streaming.loading import load_engine  # torch reads the environment set above

    monkeypatch.setattr('node_rig.Rig.make_engine', lambda self, params: load_engine(params))
