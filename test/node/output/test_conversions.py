"""Messages and arrays."""

from collections import Counter
import sys
import tracemalloc

from fake_engine import straight
from lingbot_map.mapping.map_frame import MapFrame
from lingbot_map.mapping.points import POINT_DTYPE
from lingbot_map_ros.frame import to_ns, to_stamp
from lingbot_map_ros.output import conversions
import numpy as np
import pytest
from rclpy.serialization import deserialize_message, serialize_message
from sensor_msgs.msg import Image, PointCloud2, PointField
from sensor_msgs_py import point_cloud2
from std_msgs.msg import Header

COVARIANCE = np.arange(36.0).reshape(6, 6)
HEADER = Header(stamp=to_stamp(1_700_000_000_123_456_789), frame_id='map')


def test_stamps_survive_both_ways():
    for stamp_ns in (1, 999_999_999, 1_000_000_000, 1_700_000_000_123_456_789):
        assert to_ns(to_stamp(stamp_ns)) == stamp_ns


@pytest.fixture
def pose():
    frame = MapFrame(1.0)
    frame.pose(straight(0))
    return frame.pose(straight(3))


def test_odometry_and_transform_and_pose_say_the_same(pose):
    odometry = conversions.odometry(HEADER, 'cam', pose, COVARIANCE)
    np.testing.assert_array_equal(odometry.pose.covariance, np.arange(36))
    transform = conversions.transform(HEADER, 'cam', pose)
    stamped = conversions.pose_stamped(HEADER, pose)
    for message in (odometry, transform, stamped):
        assert message.header == HEADER
    assert (odometry.child_frame_id, transform.child_frame_id) == ('cam', 'cam')
    assert odometry.pose.pose == stamped.pose
    moved, turned = transform.transform.translation, transform.transform.rotation
    assert (moved.x, moved.y, moved.z) == pytest.approx((3, 0, 0), abs=1e-9)
    assert (turned.x, turned.y, turned.z, turned.w) == pytest.approx((-0.5, 0.5, -0.5, 0.5))
    assert turned == odometry.pose.pose.orientation


def test_the_twist_is_marked_as_unknown(pose):
    twist = conversions.odometry(HEADER, 'cam', pose, COVARIANCE).twist
    np.testing.assert_array_equal(
        np.reshape(twist.covariance, (6, 6)), np.diag([conversions.UNKNOWN_VARIANCE] * 6)
    )
    assert twist.twist.linear.x == 0.0


def points(count):
    cloud = np.zeros(count, POINT_DTYPE)
    cloud['x'], cloud['y'] = np.arange(count), -1.5
    cloud['rgb'], cloud['confidence'] = 0x00102030, 2.5
    return cloud


@pytest.mark.parametrize('count', [0, 1, 1000])
def test_a_cloud_keeps_its_points_through_serialisation(count):
    sent = conversions.cloud(HEADER, points(count))
    received = deserialize_message(serialize_message(sent), PointCloud2)
    assert received.header == HEADER
    assert (received.height, received.width, received.row_step) == (1, count, 20 * count)
    if count:
        read = point_cloud2.read_points(received, ['x', 'confidence'])
        np.testing.assert_array_equal(read['x'], np.arange(count))
        np.testing.assert_array_equal(read['confidence'], 2.5)


def test_cloud_colours_are_what_pcl_and_rviz_expect():
    message = conversions.cloud(HEADER, points(2))
    fields = {field.name: field for field in message.fields}
    assert list(fields) == ['x', 'y', 'z', 'rgb', 'confidence']
    assert (fields['rgb'].datatype, fields['rgb'].offset) == (PointField.FLOAT32, 12)
    assert bytes(message.data[12:16]) == bytes([0x30, 0x20, 0x10, 0x00])  # blue green red


def test_depth_image_holds_the_floats():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    message = deserialize_message(
        serialize_message(conversions.float_image(HEADER, values)), Image
    )
    assert (message.encoding, message.width, message.height) == ('32FC1', 3, 2)
    assert (message.step, message.header) == (12, HEADER)
    np.testing.assert_array_equal(np.frombuffer(message.data, '<f4').reshape(2, 3), values)


def test_camera_info_projects_like_its_matrix():
    K = np.array([[50.0, 0, 28], [0, 51, 21], [0, 0, 1]])
    message = conversions.camera_info(HEADER, K, (56, 42))
    assert (message.width, message.height) == (56, 42)
    np.testing.assert_array_equal(np.reshape(message.k, (3, 3)), K)
    np.testing.assert_array_equal(np.reshape(message.p, (3, 4))[:, :3], K)
    np.testing.assert_array_equal(np.reshape(message.r, (3, 3)), np.eye(3))
    assert list(message.d) == [0.0] * 5


def test_a_cloud_of_a_million_points_is_built_by_one_copy_without_a_call_per_byte():
    calls, cloud = Counter(), points(1_000_000)
    sys.setprofile(lambda frame, event, arg: calls.update(('any',)))
    try:
        message = conversions.cloud(HEADER, cloud)
    finally:
        sys.setprofile(None)
    assert calls['any'] < 1000
    assert message.data.tobytes() == cloud.tobytes()
    tracemalloc.start()
    try:
        conversions.cloud(HEADER, cloud)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert cloud.nbytes <= peak < 1.5 * cloud.nbytes
