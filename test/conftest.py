"""Keeps a test run to this machine and apart from other runs, robots and busy cores."""

import os
from pathlib import Path
import socket
import sys

import pytest

sys.path.insert(0, str(Path(__file__).parent / 'rig'))


def claim_domain(first: int) -> tuple[int, socket.socket]:
    """
    Return a ROS domain that no other test run on this machine uses, and the socket that claims it.

    Looks from `first` on. Domains up to 101 keep their ports clear of those that Linux assigns.
    An abstract socket is free again as soon as its process ends, however it ends.
    """
    for offset in range(101):
        domain = 1 + (first + offset) % 101
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f'\0lingbot_map_test_domain_{domain}')
            return domain, claim
        except OSError:
            claim.close()
    raise RuntimeError('all ROS domains from 1 to 101 are used by tests')


os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'LOCALHOST'
_DOMAIN, _CLAIM = claim_domain(os.getpid())
os.environ['ROS_DOMAIN_ID'] = str(_DOMAIN)
# Read by torch and OpenCV when they are imported, and by the programs that tests start. One
# thread: two that wait for each other on busy cores cost a hundredfold.
os.environ.setdefault('OMP_NUM_THREADS', '1')


@pytest.fixture
def ros():
    """Run a test in an initialised default context of rclpy; the test may shut it down."""
    import rclpy  # reads the environment set above
    from rclpy.signals import SignalHandlerOptions

    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)  # Ctrl+C is pytest's
    yield
    rclpy.try_shutdown()


@pytest.fixture
def real_engine(monkeypatch):
    """Have node_rig run the engine that the parameters ask for, in place of the fake one."""
    from lingbot_map.streaming.loading import load_engine  # torch reads the environment set above

    monkeypatch.setattr('node_rig.Rig.make_engine', lambda self, params: load_engine(params))
