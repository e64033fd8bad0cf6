"""The executor over real DDS, with both of its threads busy while messages come."""

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import threading
import time

import lingbot_map_ros
from lingbot_map_ros.rclpy_fixes import NodeExecutor
import pytest
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.event_handler import EventHandler
from rclpy.executors import MultiThreadedExecutor
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.lifecycle import LifecycleNode
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


class SlowPool(ThreadPoolExecutor):
    """Starts a callback, and returns to the executor only when it may."""

    def __init__(self):
        super().__init__(2)
        self.submitted, self.may_return = threading.Event(), threading.Event()

    def submit(self, *args):
        future = super().submit(*args)
        self.submitted.set()
        self.may_return.wait(WAIT_S)
        return future


def test_shutdown_waits_for_a_callback_that_was_only_just_started():
    """The pool of threads has it, the executor has not noted that yet."""
    node, started, go_on, done = Node('busy'), threading.Event(), threading.Event(), []

    def work():
        started.set()
        go_on.wait(WAIT_S)
        done.append(True)

    node.create_timer(0.01, work, MutuallyExclusiveCallbackGroup())
    executor = NodeExecutor()
    executor._executor = pool = SlowPool()
    executor.add_node(node)
    spinner = threading.Thread(target=executor.spin)
    spinner.start()
    try:
        assert pool.submitted.wait(WAIT_S) and started.wait(WAIT_S)
        assert not executor.shutdown(timeout_sec=0.1)
        pool.may_return.set()
        assert not executor.shutdown(timeout_sec=0.1)
        go_on.set()
        assert executor.shutdown() and done == [True]
    finally:
        pool.may_return.set()
        go_on.set()
        spinner.join()
        node.destroy_node()


def test_events_of_a_subscription_that_is_being_destroyed_do_not_end_the_spinning(monkeypatch):
    """A deactivation destroys it in another thread, between the search and the wait."""
    add, destroyed, called = EventHandler.add_to_wait_set, threading.Event(), threading.Event()

    def add_or_fail(handler, wait_set):
        if not destroyed.is_set():
            destroyed.set()
            raise rclpy_implementation.InvalidHandle('destruction was requested')
        add(handler, wait_set)

    monkeypatch.setattr(EventHandler, 'add_to_wait_set', add_or_fail)
    node = Node('active')
    node.create_subscription(Header, 'images', lambda _: None, 10)
    node.create_timer(0.01, lambda: destroyed.is_set() and called.set())
    executor = NodeExecutor()
    executor.add_node(node)
    spinner = threading.Thread(target=executor.spin)
    spinner.start()
    try:
        assert called.wait(WAIT_S) and spinner.is_alive()
    finally:
        executor.shutdown()
        spinner.join()
        node.destroy_node()


def test_no_callback_begins_once_the_executor_is_shut_down():
    node, calls = Node('ready'), []
    node.create_timer(0.0, lambda: calls.append(None), MutuallyExclusiveCallbackGroup())
    executor = NodeExecutor()
    executor.add_node(node)
    assert executor.shutdown()
    executor.spin_once(timeout_sec=0.0)  # by a thread that had not looked at the flag yet
    node.destroy_node()
    assert calls == []


def test_private_names_of_rclpy_are_used_in_one_file():
    node = LifecycleNode('probe')
    theirs = {name for name in dir(node) if name.startswith('_') and not name.startswith('__')}
    node.destroy_node()
    root, users = Path(lingbot_map_ros.__file__).parent, {}
    for path in root.rglob('*.py'):
        tree = list(ast.walk(ast.parse(path.read_text())))
        attributes = [part for part in tree if isinstance(part, ast.Attribute)]
        own = {part.attr for part in attributes if isinstance(part.ctx, ast.Store)}
        own |= {part.name for part in tree if isinstance(part, ast.FunctionDef)}
        used = {part.attr for part in attributes} & theirs - own
        if used:
            users[path.name] = used
    assert users == {'rclpy_fixes.py': {'_parameter_overrides', '_service_change_state'}}
