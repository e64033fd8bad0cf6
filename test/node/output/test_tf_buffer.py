"""Checks tf2_ros.Buffer and TransformListener: a distribution's, or the stand-ins of underlay/."""

import threading
import time

from geometry_msgs.msg import TransformStamped
import numpy as np
import pytest
import rclpy
from rclpy.duration import Duration
from rclpy.executors import SingleThreadedExecutor
from rclpy.time import Time
from tf2_ros import (
    Buffer,
    ConnectivityException,
    ExtrapolationException,
    InvalidArgumentException,
    LookupException,
    StaticTransformBroadcaster,
    TransformBroadcaster,
    TransformException,
    TransformListener,
)

AUTHORITY = 'test'


def stamped(parent, child, time_s=0.0, xyz=(0.0, 0.0, 0.0), yaw=0.0):
    message = TransformStamped(child_frame_id=child)
    message.header.frame_id, message.header.stamp = parent, Time(seconds=time_s).to_msg()
    t, q = message.transform.translation, message.transform.rotation
    t.x, t.y, t.z = xyz
    q.z, q.w = np.sin(yaw / 2), np.cos(yaw / 2)
    return message


@pytest.fixture
def buffer():
    """Return a robot that moves from odom (0, 0) to (2, 0) and turns left from 1 s to 3 s."""
    buffer = Buffer()
    buffer.set_transform_static(stamped('base', 'mast', xyz=(0.0, 0.0, 1.0)), AUTHORITY)
    buffer.set_transform_static(stamped('mast', 'camera', xyz=(1.0, 0.0, 0.0)), AUTHORITY)
    buffer.set_transform(stamped('odom', 'base', 1.0), AUTHORITY)
    buffer.set_transform(stamped('odom', 'base', 3.0, (2.0, 0.0, 0.0), np.pi / 2), AUTHORITY)
    return buffer


def place(buffer, target, source, time_s):
    """Return x, y, z, yaw of a lookup."""
    transform = buffer.lookup_transform(target, source, Time(seconds=time_s)).transform
    t, q = transform.translation, transform.rotation
    return t.x, t.y, t.z, 2 * np.arctan2(q.z, q.w)


def test_a_chain_is_interpolated(buffer):
    half = np.sqrt(0.5)
    assert place(buffer, 'odom', 'camera', 2.0) == pytest.approx((1 + half, half, 1, np.pi / 4))
    assert place(buffer, 'odom', 'base', 1.5) == pytest.approx((0.5, 0, 0, np.pi / 8))
    assert place(buffer, 'odom', 'camera', 3.0) == pytest.approx((2, 1, 1, np.pi / 2))


def test_the_way_back_is_the_inverse(buffer):
    assert place(buffer, 'camera', 'odom', 3.0) == pytest.approx((-1, 2, -1, -np.pi / 2))
    assert place(buffer, 'camera', 'base', 0.0) == pytest.approx((-1, 0, -1, 0))


def test_the_latest_has_a_stamp_and_what_never_moves_has_none(buffer):
    found = buffer.lookup_transform('odom', 'camera', Time())
    assert (found.header.stamp.sec, found.header.stamp.nanosec) == (3, 0)
    assert (found.header.frame_id, found.child_frame_id) == ('odom', 'camera')
    found = buffer.lookup_transform('base', 'camera', Time())
    assert (found.header.stamp.sec, found.header.stamp.nanosec) == (0, 0)
    assert (found.transform.translation.x, found.transform.translation.z) == (1, 1)


def test_the_latest_of_a_chain_is_the_latest_that_all_have(buffer):
    buffer.set_transform(stamped('map', 'odom', 1.0), AUTHORITY)
    buffer.set_transform(stamped('map', 'odom', 2.0, (1.0, 0.0, 0.0)), AUTHORITY)
    assert buffer.lookup_transform('map', 'base', Time()).header.stamp.sec == 2
    assert place(buffer, 'map', 'base', 0.0)[0] == pytest.approx(2)


@pytest.mark.parametrize(
    ('target', 'source', 'time_s', 'kind', 'words'),
    [
        ('odom', 'base', 3.5, ExtrapolationException, 'into the future'),
        ('odom', 'base', 0.5, ExtrapolationException, 'into the past'),
        ('odom', 'lidar', 2.0, LookupException, '"lidar".*does not exist'),
        ('elsewhere', 'base', 0.0, ConnectivityException, 'not part of the same tree'),
        ('/odom', 'base', 2.0, InvalidArgumentException, '/odom'),
        ('odom', '', 2.0, InvalidArgumentException, 'empty'),
    ],
)
def test_there_is_a_reason_when_there_is_no_transform(buffer, target, source, time_s, kind, words):
    buffer.set_transform(stamped('elsewhere', 'other', 2.0), AUTHORITY)
    with pytest.raises(kind, match=words) as caught:
        buffer.lookup_transform(target, source, Time(seconds=time_s))
    assert isinstance(caught.value, TransformException)
    assert not buffer.can_transform(target, source, Time(seconds=time_s))


def test_one_moment_alone_is_known_for_that_moment_only():
    buffer = Buffer()
    buffer.set_transform(stamped('odom', 'base', 1.0, (5.0, 0.0, 0.0)), AUTHORITY)
    assert place(buffer, 'odom', 'base', 1.0)[0] == 5
    with pytest.raises(ExtrapolationException):
        buffer.lookup_transform('odom', 'base', Time(seconds=1.5))


def test_clearing_forgets_what_moves_and_lets_time_begin_again(buffer):
    buffer.set_transform(stamped('odom', 'base', 100.0), AUTHORITY)
    buffer.clear()
    assert not buffer.can_transform('odom', 'base', Time())
    assert place(buffer, 'base', 'camera', 0.0) == pytest.approx((1, 0, 1, 0))
    buffer.set_transform(stamped('odom', 'base', 1.0, (7.0, 0.0, 0.0)), AUTHORITY)
    assert place(buffer, 'odom', 'base', 1.0)[0] == 7


def test_only_the_last_seconds_are_kept():
    buffer = Buffer(cache_time=Duration(seconds=5))
    for time_s in range(1, 21):
        buffer.set_transform(stamped('odom', 'base', float(time_s)), AUTHORITY)
    assert buffer.can_transform('odom', 'base', Time(seconds=15.5))
    assert not buffer.can_transform('odom', 'base', Time(seconds=14.5))
    buffer.set_transform(stamped('odom', 'base', 2.0), AUTHORITY)  # too old: ignored
    assert not buffer.can_transform('odom', 'base', Time(seconds=2))


def test_transforms_that_are_none_are_ignored():
    buffer = Buffer()
    bad = [stamped('odom', 'base', 1.0) for _ in range(4)]
    bad[0].transform.translation.x = np.nan
    bad[1].transform.rotation.w = 0.5
    bad[2].header.frame_id = ''
    bad[3].child_frame_id = 'odom'
    for transform in bad:
        buffer.set_transform(transform, AUTHORITY)
        buffer.set_transform_static(transform, AUTHORITY)
    assert not buffer.can_transform('odom', 'base', Time(seconds=1))


def test_waiting_ends_when_the_transform_comes():
    buffer = Buffer()
    late = threading.Timer(
        0.1, lambda: buffer.set_transform(stamped('odom', 'base', 1.0), AUTHORITY)
    )
    late.start()
    assert buffer.can_transform('odom', 'base', Time(seconds=1), timeout=Duration(seconds=20))
    late.join()
    can, why = buffer.can_transform('odom', 'base', Time(seconds=2), return_debug_tuple=True)
    assert not can and 'extrapolation' in why


def test_a_listener_hears_both_topics_also_late():
    context = rclpy.Context()
    rclpy.init(context=context)
    node = rclpy.create_node('tf_buffer_test', context=context)
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(node)
    StaticTransformBroadcaster(node).sendTransform(stamped('base', 'camera', xyz=(1.0, 0.0, 0.0)))
    buffer = Buffer()
    listener = TransformListener(buffer, node)
    moving = TransformBroadcaster(node)
    end_s = time.monotonic() + 20
    try:
        while not buffer.can_transform('odom', 'camera', Time(seconds=5)):
            assert time.monotonic() < end_s
            moving.sendTransform(stamped('odom', 'base', 5.0, (2.0, 0.0, 0.0)))
            executor.spin_once(timeout_sec=0.05)
        assert place(buffer, 'odom', 'camera', 5.0)[0] == pytest.approx(3)
        listener.unregister()
        assert node.count_subscribers('/tf') == 0
    finally:
        executor.shutdown()
        node.destroy_node()
        rclpy.shutdown(context=context)
