"""The executor over real DDS, with both of its threads busy while messages come."""

import threading
import time

from lingbot_map_ros.rclpy_fixes import NodeExecutor
import pytest
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.executors import MultiThreadedExecutor
from rclpy.node import Node
from std_msgs.msg import Header

pytestmark = pytest.mark.usefixtures('ros')
WAIT_S = 60.0
MANY = 100


def rounds_while_a_message_waits(base, patience_s):
    """Return how often an executor looks for work while both threads are busy, or MANY."""
    rounds, heard, busy, go_on = [], threading.Event(), threading.Semaphore(0), threading.Event()

    class Counted(base):
        def get_nodes(self):
            rounds.append(None)
            return super().get_nodes()

    def block(_):
        busy.release()
        go_on.wait(WAIT_S)

    node, sender = Node('receiver'), Node('sender')
    groups = [MutuallyExclusiveCallbackGroup() for _ in range(3)]
    for topic, callback, group in zip(
        ('block_1', 'block_2', 'late'), (block, block, lambda _: heard.set()), groups, strict=True
    ):
        node.create_subscription(Header, topic, callback, 10, callback_group=group)
    publishers = [sender.create_publisher(Header, t, 10) for t in ('block_1', 'block_2', 'late')]
    executor = Counted() if base is NodeExecutor else Counted(2)
    executor.add_node(node)
    spinner = threading.Thread(target=executor.spin)
    spinner.start()
    try:
        while any(p.get_subscription_count() == 0 for p in publishers):
            go_on.wait(0.02)
        for publisher in publishers[:2]:
            publisher.publish(Header())
            assert busy.acquire(timeout=WAIT_S)
        before = len(rounds)
        publishers[2].publish(Header())
        end_s = time.monotonic() + patience_s
        while len(rounds) - before < MANY and time.monotonic() < end_s:
            assert not heard.wait(0.02)
        waited = len(rounds) - before
        go_on.set()
        assert heard.wait(WAIT_S)
        return waited
    finally:
        go_on.set()
        executor.shutdown()
        spinner.join()
        node.destroy_node()
        sender.destroy_node()


def test_nothing_spins_while_a_message_waits_for_a_thread():
    assert rounds_while_a_message_waits(NodeExecutor, patience_s=1.0) < 20


def test_the_executor_of_rclpy_spins():
    """Once this fails, NodeExecutor can go."""
    assert rounds_while_a_message_waits(MultiThreadedExecutor, patience_s=WAIT_S) >= MANY
