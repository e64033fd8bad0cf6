"""camera_info over DDS: once, late, never, at another rate, and of no use."""

from contextlib import contextmanager

from fake_engine import Gate
from image_messages import encode
from lingbot_map.images.camera import camera_of
from lingbot_map.images.view import View
from node_rig import running, WAIT_S
import numpy as np
import pytest
import rclpy
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CameraInfo

pytestmark = pytest.mark.usefixtures('ros')
W, H = 56, 42
K = np.array([[50.0, 0, 27.0], [0, 51.0, 22.0], [0, 0, 1]])
P = np.array([[44.0, 0, 28.5, 0], [0, 45.0, 20.5, 0], [0, 0, 1, 0]])
LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
BEST_EFFORT = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
NEXT_MAP = 'the next map will use it'


def info(d=(-0.3, 0.1, 0.0, 0.0, 0.0), k=K, size=(W, H)):
    message = CameraInfo(width=size[0], height=size[1], distortion_model='plumb_bob', d=list(d))
    message.header.frame_id = 'cam'
    message.k, message.r, message.p = k.ravel(), np.eye(3).ravel(), P.ravel()
    return message


def picture():
    return encode('rgb8', raw_pixels())


def raw_pixels():
    return np.random.default_rng(0).integers(0, 256, (H, W, 3), np.uint8)


def rectified():
    return View((W, H), camera_of(info(), False)).prepare(raw_pixels())


@contextmanager
def camera(topics=(), qos=10, **params):
    """Yield a rig and a publisher of camera_info that the node hears."""
    with running(topics, num_scale_frames=1, **params) as rig:
        yield rig, rig.publisher(CameraInfo, '/camera_info', qos)


def hear(rig, message, publisher):
    """Publish a camera_info and wait until the node has it."""
    before = heard(rig)
    publisher.publish(message)
    rig.wait(lambda: heard(rig) is not before, 'camera_info')


def heard(rig):
    return rig.node.pipeline.images._infos._newest


def intrinsics(rig, index=0):
    return np.reshape(rig.wait_for('depth_info', index + 1)[index].k, (3, 3))


@pytest.mark.parametrize('qos', [10, LATCHED, BEST_EFFORT], ids=['reliable', 'latched', 'best'])
def test_one_camera_info_before_the_images_rectifies_them_all(qos, capfd):
    with camera(('depth_info',), qos, use_camera_info=True) as (rig, publisher):
        hear(rig, info(), publisher)
        for i in range(3):
            rig.publish(1.0 + i, picture())
        rig.wait_counts(3, 3)
        for seen in rig.engine.pictures:
            np.testing.assert_array_equal(seen, rectified())
        np.testing.assert_allclose(intrinsics(rig), P[:, :3], atol=1e-9)
        assert rig.diagnostic('camera_info') == 'used, plumb_bob'
    err = capfd.readouterr().err
    assert err.count('images are rectified (plumb_bob)') == 1
    assert 'incompatible QoS' not in err


def test_a_latched_camera_info_from_before_the_node_is_heard():
    probe = rclpy.create_node('calibration')
    publisher = probe.create_publisher(CameraInfo, '/camera_info', LATCHED)
    publisher.publish(info())
    try:
        with running(num_scale_frames=1) as rig:
            rig.wait(lambda: heard(rig) is not None, 'camera_info')
            rig.publish(1.0, picture())
            rig.wait_counts(1, 1)
            np.testing.assert_array_equal(rig.engine.pictures[0], rectified())
    finally:
        probe.destroy_node()


def test_the_first_image_waits_for_a_camera_info_that_is_on_its_way():
    with camera(camera_info_timeout=60.0) as (rig, publisher):
        rig.publish(1.0, picture())
        rig.wait(lambda: rig.counts().received == 1)
        rig.wait(lambda: rig.node.pipeline.images._infos._deadline_s is not None, 'waiting')
        assert rig.engine.pushed == 0
        publisher.publish(info())
        rig.wait_counts(1, 1)
        np.testing.assert_array_equal(rig.engine.pictures[0], rectified())


def test_a_camera_info_of_another_camera_is_named_once(capfd):
    with camera() as (rig, publisher):
        for number, frame_id in enumerate(('right', '/cam', '')):
            message = info()
            message.header.frame_id = frame_id
            hear(rig, message, publisher)
            assert rig.call('reset').success
            for i in range(3):
                rig.publish(1.0 + i, picture())
            rig.wait_counts(3 * number + 3, 3 * number + 3)
    err = capfd.readouterr().err
    assert err.count('camera_info has the frame') == 1
    assert "camera_info has the frame 'right' and the images have 'cam'" in err


def test_without_use_camera_info_the_network_says_the_intrinsics():
    with camera(('depth_info',)) as (rig, publisher):
        hear(rig, info(), publisher)
        rig.publish(1.0, picture())
        rig.wait_counts(1, 1)
        np.testing.assert_array_equal(rig.engine.pictures[0], rectified())
        assert intrinsics(rig)[0, 0] == W  # of the fake engine


def test_known_intrinsics_shape_the_points():
    with camera(('points',), use_camera_info=True, points__stride=1) as (rig, publisher):
        hear(rig, info(d=()), publisher)
        rig.publish(1.0, picture())
        rig.wait_counts(1, 1)
        np.testing.assert_array_equal(rig.engine.pictures[0], raw_pixels())  # no distortion
        cloud = np.frombuffer(rig.wait_for('points', 1)[0].data, '<f4').reshape(H, W, 5)
        depth = 2.0  # a wall ahead: x forward, y left, z up
        left_top, right_bottom = cloud[0, 0, :3], cloud[-1, -1, :3]
        assert left_top == pytest.approx((depth, 27 / 50 * depth, 22 / 51 * depth))
        assert right_bottom == pytest.approx((depth, -28 / 50 * depth, -19 / 51 * depth))


def test_the_first_image_after_a_reset_waits_for_camera_info_as_well():
    gate = Gate(at=2)
    with running(
        num_scale_frames=1, camera_info_timeout=60.0, engine={'before_push': gate}
    ) as rig:
        rig.publish(1.0, picture())
        rig.wait_counts(1, 1)  # no publisher of camera_info, so no wait
        rig.publish(2.0, picture())
        assert gate.reached.wait(WAIT_S)
        late = rig.publisher(CameraInfo, '/camera_info')
        rig.wait(lambda: rig.node.count_publishers('/camera_info'))
        assert rig.call('reset').success
        rig.publish(3.0, picture())
        rig.wait(lambda: rig.counts().received == 3)
        gate.open()
        rig.wait(lambda: rig.counts().dropped == {'reset': 1})
        hear(rig, info(), late)
        rig.wait_counts(3, 2, reset=1)
        np.testing.assert_array_equal(rig.engine.pictures[-1], rectified())


def test_a_late_camera_info_is_used_from_the_next_map_on(capfd):
    with camera(('depth_info',), use_camera_info=True, camera_info_timeout=0.0) as (rig, late):
        rig.publish(1.0, picture())
        rig.wait_counts(1, 1)
        for _ in range(3):
            hear(rig, info(), late)
        rig.publish(2.0, picture())
        rig.wait_counts(2, 2)
        for seen in rig.engine.pictures:
            np.testing.assert_array_equal(seen, raw_pixels())
        assert rig.diagnostic('camera_info') == 'received, used from the next map on'
        rig.wait_for('depth_info', 2)
        assert rig.call('reset').success
        rig.publish(3.0, picture())
        rig.wait_counts(3, 3)
        np.testing.assert_array_equal(rig.engine.pictures[2], rectified())
        assert [intrinsics(rig, i)[0, 0] for i in range(3)] == [W, W, pytest.approx(P[0, 0])]
    err = capfd.readouterr().err
    assert err.count(NEXT_MAP) == 1
    assert err.count('nothing was received on /camera_info') == 1


def test_no_camera_info_ever_is_no_obstacle(capfd):
    with running(num_scale_frames=1) as rig:
        for i in range(3):
            rig.publish(1.0 + i, picture())
        rig.wait_counts(3, 3)
        assert rig.diagnostic('camera_info') == 'not received on /camera_info'
        rig.call('reset')
        rig.publish(4.0, picture())
        rig.wait_counts(4, 4)
    assert 'camera_info' not in capfd.readouterr().err


def test_a_silent_publisher_of_camera_info_delays_only_the_first_image():
    with camera(camera_info_timeout=0.1) as (rig, _):
        for i in range(3):
            rig.publish(1.0 + i, picture())
        rig.wait_counts(3, 3)
        for seen in rig.engine.pictures:
            np.testing.assert_array_equal(seen, raw_pixels())


def test_camera_info_at_another_rate_changes_nothing(capfd):
    with camera() as (rig, publisher):
        hear(rig, info(), publisher)
        for i in range(5):
            for _ in range(i):
                hear(rig, info(), publisher)
            rig.publish(1.0 + i, picture())
        rig.wait_counts(5, 5)
        for seen in rig.engine.pictures:
            np.testing.assert_array_equal(seen, rectified())
        assert rig.node.pipeline.session.number == 0
    assert NEXT_MAP not in capfd.readouterr().err


def test_camera_info_is_compared_with_the_frame_of_the_parameter(capfd):
    with camera(use_camera_info=True, camera_frame='cam') as (rig, publisher):
        hear(rig, info(), publisher)
        rig.send(1.0, frame_id='')
        rig.wait_counts(1, 1)
    assert 'camera_info has the frame' not in capfd.readouterr().err


def test_a_calibration_that_changes_all_the_time_does_not_fill_the_log(capfd):
    with camera(use_camera_info=True) as (rig, publisher):
        hear(rig, info(), publisher)
        rig.publish(1.0, picture())
        rig.wait_counts(1, 1)
        for i in range(20):  # as a lens does that focuses
            hear(rig, info(k=np.diag((1.0 + i, 1.0, 0.0)) + K), publisher)
    assert 1 <= capfd.readouterr().err.count(NEXT_MAP) < 5


def test_a_new_calibration_is_used_from_the_next_map_on(capfd):
    with camera(('depth_info',), use_camera_info=True) as (rig, publisher):
        hear(rig, info(d=()), publisher)
        rig.publish(1.0, picture())
        rig.wait_counts(1, 1)
        wider = K * [[0.5], [0.5], [1]]
        hear(rig, info(d=(), k=wider), publisher)
        rig.publish(2.0, picture())
        rig.wait_counts(2, 2)
        rig.wait_for('depth_info', 2)
        rig.call('reset')
        rig.publish(3.0, picture())
        rig.wait_counts(3, 3)
        assert [intrinsics(rig, i)[0, 0] for i in range(3)] == pytest.approx([50, 50, 25])
    assert capfd.readouterr().err.count(NEXT_MAP) == 1


USELESS = (
    (info(size=(2 * W, 2 * H)), 'it is for images of 112x84, but these are 56x42'),
    (info(k=np.zeros((3, 3))), 'the camera is not calibrated: its K is zero'),
    (CameraInfo(), 'its image size 0x0 is invalid: sides must be 1 to 16384 pixels'),
    (info(d=(np.nan,)), 'it contains NaN or infinity'),
)


def test_a_camera_info_of_no_use_is_named_and_images_go_on(capfd):
    with camera(use_camera_info=True) as (rig, publisher):
        for number, (message, reason) in enumerate(USELESS):
            hear(rig, message, publisher)
            assert rig.call('reset').success
            for i in range(2):
                rig.publish(1.0 + i, picture())
            rig.wait_counts(2 * number + 2, 2 * number + 2)
            np.testing.assert_array_equal(rig.engine.pictures[-1], raw_pixels())
            assert rig.diagnostic('camera_info') == f'not used: {reason}'
    err = capfd.readouterr().err
    assert all(err.count(f'camera_info is not used: {reason}') == 1 for _, reason in USELESS)


def test_rectified_images_are_not_undistorted_again():
    params = {'use_camera_info': True, 'image_rectified': True}
    with camera(('depth_info',), **params) as (rig, publisher):
        hear(rig, info(), publisher)
        rig.publish(1.0, picture())
        rig.wait_counts(1, 1)
        np.testing.assert_array_equal(rig.engine.pictures[0], raw_pixels())
        np.testing.assert_allclose(intrinsics(rig), P[:, :3], atol=1e-9)


def test_another_image_size_begins_a_map_with_the_camera_info_for_it():
    with camera() as (rig, publisher):
        hear(rig, info(), publisher)
        rig.publish(1.0, picture())
        rig.wait_counts(1, 1)
        hear(rig, info(d=(), size=(2 * W, 2 * H)), publisher)
        large = np.zeros((2 * H, 2 * W, 3), np.uint8)
        rig.publish(2.0, encode('rgb8', large))
        rig.wait_counts(2, 2)
        np.testing.assert_array_equal(rig.engine.pictures[1], large)
        assert rig.diagnostic('camera_info') == 'used'
        assert rig.node.pipeline.session.number == 1
