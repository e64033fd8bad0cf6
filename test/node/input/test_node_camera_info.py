"""camera_info over DDS: with any QoS, before the node, late, and on its way."""

from contextlib import contextmanager

from calibration import H, info, K, NEXT_MAP, P, picture, raw_pixels, rectified, W
from fake_engine import Gate
from image_messages import encode
from node_rig import running, WAIT_S
import numpy as np
import pytest
import rclpy
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CameraInfo

pytestmark = pytest.mark.usefixtures('ros')
LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
BEST_EFFORT = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)


@contextmanager
def camera(topics=(), **params):
    """Yield a rig and a reliable publisher of camera_info that the node receives."""
    with running(topics, num_scale_frames=1, **params) as rig:
        yield rig, rig.publisher(CameraInfo, '/camera_info')


def receive(rig, message, publisher):
    """Publish a camera_info and wait until the node has it."""
    before = newest(rig)
    publisher.publish(message)
    rig.wait(lambda: newest(rig) is not before, 'camera_info')


def replace(rig, publisher, qos):
    """Destroy a publisher and return one with another QoS."""
    rig.probe.destroy_publisher(publisher)
    rig.wait(lambda: rig.node.count_publishers('/camera_info') == 0)
    return rig.publisher(CameraInfo, '/camera_info', qos)


def newest(rig):
    return rig.node.pipeline.images._infos._newest


def intrinsics(rig, index=0):
    return np.reshape(rig.wait_for('depth_info', index + 1)[index].k, (3, 3))


def process(rig, number, expected, new_map=True):
    """Send image `number`, in a new map or not, and compare what the network sees."""
    if new_map:
        assert rig.call('reset').success
    rig.publish(float(number), picture())
    rig.wait_counts(number, number)
    np.testing.assert_array_equal(rig.engine.pictures[-1], expected)
    return intrinsics(rig, number - 1)


def test_camera_info_of_any_qos_is_used_from_the_next_map_on(capfd):
    values = {'use_camera_info': True, 'camera_info_timeout': 0.1}
    with camera(('depth_info',), **values) as (rig, reliable):
        assert process(rig, 1, raw_pixels(), new_map=False)[0, 0] == W  # of the fake engine
        for _ in range(3):
            receive(rig, info(), reliable)
        assert process(rig, 2, raw_pixels(), new_map=False)[0, 0] == W
        assert rig.diagnostic('camera_info') == 'received, used from the next map on'
        for number in (3, 4):
            found = process(rig, number, rectified(), new_map=number == 3)
            np.testing.assert_allclose(found, P[:, :3], atol=1e-9)
        assert rig.diagnostic('camera_info') == 'used, plumb_bob'

        best_effort = replace(rig, reliable, BEST_EFFORT)
        receive(rig, info(d=(), k=K * [[0.5], [0.5], [1]]), best_effort)
        assert process(rig, 5, rectified(), new_map=False)[0, 0] == pytest.approx(P[0, 0])
        assert process(rig, 6, raw_pixels())[0, 0] == pytest.approx(K[0, 0] / 2)

        latched = replace(rig, best_effort, LATCHED)
        receive(rig, info(), latched)
        assert process(rig, 7, rectified())[0, 0] == pytest.approx(P[0, 0])

        receive(rig, info(d=(), size=(2 * W, 2 * H)), latched)
        assert process(rig, 8, raw_pixels())[0, 0] == W
        unused = 'not used: it is for images of 112x84, but these are 56x42'
        assert rig.diagnostic('camera_info') == unused
        number = rig.node.pipeline.session.number
        large = np.zeros((2 * H, 2 * W, 3), np.uint8)
        rig.publish(9.0, encode('rgb8', large))
        rig.wait_counts(9, 9)
        np.testing.assert_array_equal(rig.engine.pictures[-1], large)
        assert rig.diagnostic('camera_info') == 'used'
        assert rig.node.pipeline.session.number == number + 1
    err = capfd.readouterr().err
    assert err.count('images are rectified (plumb_bob)') == 2
    assert err.count('nothing was received on /camera_info') == 1
    assert NEXT_MAP in err
    assert 'incompatible QoS' not in err


def test_a_latched_camera_info_from_before_the_node_shapes_the_points():
    probe = rclpy.create_node('calibration')
    publisher = probe.create_publisher(CameraInfo, '/camera_info', LATCHED)
    publisher.publish(info())
    values = {'num_scale_frames': 1, 'use_camera_info': True, 'points__stride': 1}
    try:
        with running(('depth_info', 'points'), **values) as rig:
            rig.wait(lambda: newest(rig) is not None, 'camera_info')
            process(rig, 1, rectified(), new_map=False)
            receive(rig, info(d=()), publisher)
            process(rig, 2, raw_pixels())  # no distortion
            cloud = np.frombuffer(rig.wait_for('points', 2)[1].data, '<f4').reshape(H, W, 5)
            depth = 2.0  # a wall ahead: x forward, y left, z up
            left_top, right_bottom = cloud[0, 0, :3], cloud[-1, -1, :3]
            assert left_top == pytest.approx((depth, 27 / 50 * depth, 22 / 51 * depth))
            assert right_bottom == pytest.approx((depth, -28 / 50 * depth, -19 / 51 * depth))
    finally:
        probe.destroy_node()


def test_the_first_image_waits_for_a_camera_info_that_is_on_its_way(capfd):
    with camera(('depth_info',), camera_info_timeout=60.0) as (rig, publisher):
        rig.publish(1.0, picture())
        rig.wait(lambda: rig.counts().received == 1)
        rig.wait(lambda: rig.node.pipeline.images._infos._deadline_s is not None, 'waiting')
        assert rig.engine.pushed == 0
        publisher.publish(info())
        rig.wait_counts(1, 1)
        np.testing.assert_array_equal(rig.engine.pictures[0], rectified())
        assert intrinsics(rig)[0, 0] == W  # use_camera_info is not set
        for number in range(2, 6):
            for _ in range(number):  # at another rate than the images
                receive(rig, info(), publisher)
            process(rig, number, rectified(), new_map=False)
        assert rig.node.pipeline.session.number == 0
    assert NEXT_MAP not in capfd.readouterr().err


def test_only_a_publisher_of_camera_info_lets_a_map_wait_also_after_a_reset(capfd):
    gate = Gate(at=2)
    with running(
        num_scale_frames=1, camera_info_timeout=60.0, engine={'before_push': gate}
    ) as rig:
        rig.publish(1.0, picture())
        rig.wait_counts(1, 1)  # no publisher of camera_info, so no wait
        assert rig.diagnostic('camera_info') == 'not received on /camera_info'
        assert 'camera_info' not in capfd.readouterr().err
        rig.publish(2.0, picture())
        assert gate.reached.wait(WAIT_S)
        late = rig.publisher(CameraInfo, '/camera_info')
        rig.wait(lambda: rig.node.count_publishers('/camera_info'))
        assert rig.call('reset').success
        rig.publish(3.0, picture())
        rig.wait(lambda: rig.counts().received == 3)
        gate.open()
        rig.wait(lambda: rig.counts().dropped == {'reset': 1})
        rig.wait(lambda: rig.node.pipeline.images._infos._deadline_s is not None, 'waiting')
        assert rig.engine.pushed == 2
        receive(rig, info(), late)
        rig.wait_counts(3, 2, reset=1)
        np.testing.assert_array_equal(rig.engine.pictures[-1], rectified())
