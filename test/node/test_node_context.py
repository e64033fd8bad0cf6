"""A process that shuts ROS down around the node, which spins in a thread: a script, a notebook."""

import threading

from fake_engine import FakeEngine, Gate
from lingbot_map_ros.mapping.map_session import State
from lingbot_map_ros.node import LingbotMapNode
from lingbot_map_ros.rclpy_fixes import NodeExecutor
from node_rig import image
import pytest
import rclpy
from rclpy.parameter import Parameter

pytestmark = pytest.mark.usefixtures('ros')
WAIT_S = 20.0
_PARAMETERS = {'queue': 'lossless', 'queue_size': 200, 'num_scale_frames': 2}


def spin(make_engine):
    """Return a node that loads its engine and the thread that spins it."""
    overrides = [Parameter(name, value=value) for name, value in _PARAMETERS.items()]
    node = LingbotMapNode(make_engine, parameter_overrides=overrides)
    executor = NodeExecutor()
    executor.add_node(node)
    spinner = threading.Thread(target=executor.spin)
    spinner.start()
    return node, spinner


def close(node, spinner):
    node.leaving.set()
    assert node.close(WAIT_S)
    spinner.join(WAIT_S)
    assert not spinner.is_alive()
    node.destroy_node()


@pytest.mark.parametrize('busy', [True, False])
def test_the_worker_ends_and_counts_what_it_leaves(busy, capfd):
    gate = Gate(at=3 if busy else 0)
    node, spinner = spin(lambda params: FakeEngine(params, before_push=gate))
    while node.pipeline is None or node.pipeline.state() is not State.WAITING_FOR_IMAGES:
        assert not node.leaving.wait(0.02)
    pipeline = node.pipeline
    if busy:
        for i in range(1, 11):
            pipeline.on_image(image(float(i)))
        assert gate.reached.wait(WAIT_S)
    rclpy.shutdown()
    gate.open()
    pipeline.worker._thread.join(WAIT_S)
    assert not pipeline.worker._thread.is_alive()
    with pytest.raises(RuntimeError, match='stopping'):
        pipeline.flush().result(WAIT_S)
    pipeline.on_image(image(11.0))
    close(node, spinner)
    counts = pipeline.ledger.counts()
    received, out = (11, 2) if busy else (1, 0)
    assert (counts.received, counts.out) == (received, out)
    assert counts.dropped == {'inactive': received - out}
    told = capfd.readouterr().err
    assert told.count('ROS was shut down') == 1
    assert 'ERROR' not in told and 'Traceback' not in told


def test_a_node_that_loads_meanwhile_fails_to_configure(capfd):
    loading, go_on = threading.Event(), threading.Event()

    def load(params):
        loading.set()
        assert go_on.wait(WAIT_S)
        return FakeEngine(params)

    node, spinner = spin(load)
    assert loading.wait(WAIT_S)
    rclpy.shutdown()
    go_on.set()
    close(node, spinner)
    assert 'Traceback' not in capfd.readouterr().err
