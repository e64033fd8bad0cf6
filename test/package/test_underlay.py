"""
Checks the ROS modules that PyPI lacks, as this project calls them.

Holds for the stand-ins of underlay/ and for the modules of a distribution alike.
"""

import json
from pathlib import Path
import time

from ament_index_python.packages import get_package_share_directory
import cv2
from cv_bridge import CvBridge, CvBridgeError
from geometry_msgs.msg import TransformStamped
import numpy as np
import pytest
import rclpy
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.qos import DurabilityPolicy, QoSProfile
from sensor_msgs.msg import CompressedImage, Image, PointCloud2, PointField
from sensor_msgs_py import point_cloud2
from std_msgs.msg import Header
from tf2_msgs.msg import TFMessage
from tf2_ros import StaticTransformBroadcaster, TransformBroadcaster

JAZZY_TF_MESSAGE = 'RIHS01_e369d0f05a23ae52508854b66f6aa0437f3449d652e8cbf22d5abe85d020f087'


class Link:
    """A node with what tests need to hear their own messages over DDS."""

    def __init__(self):
        self._context = Context()
        rclpy.init(context=self._context)
        self.node = rclpy.create_node('underlay_test', context=self._context)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self.node)

    def listen(self, message_type, topic, qos):
        received = []
        self.node.create_subscription(message_type, topic, received.append, qos)
        return received

    def spin_until(self, done, limit_s=10.0):
        end = time.monotonic() + limit_s
        while not done() and time.monotonic() < end:
            self._executor.spin_once(timeout_sec=0.05)
        assert done(), f'not within {limit_s} s'

    def close(self):
        self._executor.shutdown()
        self.node.destroy_node()
        rclpy.shutdown(context=self._context)


@pytest.fixture
def link():
    link = Link()
    yield link
    link.close()


def send(link, message, topic):
    """Return `message` as it arrives over a reliable topic."""
    qos = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    received = link.listen(type(message), topic, qos)
    publisher = link.node.create_publisher(type(message), topic, qos)
    publisher.publish(message)
    link.spin_until(lambda: received)
    return received[0]


def stamped(child, x):
    transform = TransformStamped(child_frame_id=child)
    transform.header.frame_id = 'map'
    transform.transform.translation.x = x
    return transform


def named_x(message):
    return [(t.child_frame_id, t.transform.translation.x) for t in message.transforms]


def pixels(dtype, channels):
    shape = (5, 7, channels) if channels > 1 else (5, 7)
    return np.random.default_rng(3).integers(0, 200, shape).astype(dtype)


def test_tf_message_has_the_type_hash_of_jazzy():
    path = Path(get_package_share_directory('tf2_msgs'), 'msg', 'TFMessage.json')
    entries = json.loads(path.read_text())['type_hashes']
    assert {'type_name': 'tf2_msgs/msg/TFMessage', 'hash_string': JAZZY_TF_MESSAGE} in entries


@pytest.mark.parametrize(
    ('encoding', 'dtype', 'channels'),
    [
        ('mono8', 'uint8', 1),
        ('rgb8', 'uint8', 3),
        ('bgra8', 'uint8', 4),
        ('mono16', 'uint16', 1),
        ('32FC1', 'float32', 1),
    ],
)
def test_image_survives_the_wire(link, encoding, dtype, channels):
    sent = pixels(dtype, channels)
    header = Header(frame_id='camera')
    message = CvBridge().cv2_to_imgmsg(sent, encoding, header)
    arrived = send(link, message, 'image')
    assert (arrived.encoding, arrived.width, arrived.height) == (encoding, 7, 5)
    assert arrived.step == 7 * channels * np.dtype(dtype).itemsize
    assert arrived.header.frame_id == 'camera'
    received = CvBridge().imgmsg_to_cv2(arrived)
    assert received.dtype == sent.dtype
    np.testing.assert_array_equal(received, sent)


def test_image_changes_channel_order():
    rgb = pixels('uint8', 3)
    message = CvBridge().cv2_to_imgmsg(rgb, 'rgb8')
    np.testing.assert_array_equal(CvBridge().imgmsg_to_cv2(message, 'bgr8'), rgb[..., ::-1])


def test_image_scales_16_bits_to_8():
    message = CvBridge().cv2_to_imgmsg(np.array([[0, 257, 65535]], np.uint16), 'mono16')
    assert CvBridge().imgmsg_to_cv2(message, 'bgr8')[0].tolist() == [[0] * 3, [1] * 3, [255] * 3]


def test_image_drops_row_padding():
    message = Image(encoding='mono8', height=2, width=3, step=4)
    message.data.frombytes(bytes([1, 2, 3, 99, 4, 5, 6, 99]))
    assert CvBridge().imgmsg_to_cv2(message).tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(('source', 'target'), [('rgb9', 'passthrough'), ('32FC1', 'rgb8')])
def test_image_without_conversion_is_refused(source, target):
    message = Image(encoding=source, height=1, width=1, step=4)
    message.data.frombytes(bytes(4))
    with pytest.raises(CvBridgeError):
        CvBridge().imgmsg_to_cv2(message, target)


def test_image_of_another_type_than_its_encoding_is_refused():
    with pytest.raises(CvBridgeError, match='incompatible type 32FC1'):
        CvBridge().cv2_to_imgmsg(pixels('float32', 1), 'rgb8')


def test_compressed_image_decodes():
    rgb = pixels('uint8', 3)
    message = CompressedImage(format='png')
    message.data.frombytes(cv2.imencode('.png', rgb[..., ::-1])[1].tobytes())
    np.testing.assert_array_equal(CvBridge().compressed_imgmsg_to_cv2(message, 'rgb8'), rgb)


def test_cloud_survives_the_wire(link):
    dtype = np.dtype([('x', '<f4'), ('y', '<f4'), ('z', '<f4'), ('rgb', '<u4')])
    points = np.array([(1, 2, 3, 0xFF8040), (np.nan, 5, 6, 7)], dtype)
    types = [PointField.FLOAT32] * 3 + [PointField.UINT32]
    fields = [
        PointField(name=name, offset=4 * i, datatype=types[i], count=1)
        for i, name in enumerate(dtype.names)
    ]
    cloud = send(link, point_cloud2.create_cloud(Header(frame_id='map'), fields, points), 'cloud')
    assert (cloud.width, cloud.height, cloud.point_step, cloud.row_step) == (2, 1, 16, 32)
    received = point_cloud2.read_points(cloud)
    assert received.dtype == dtype
    assert received.tobytes() == points.tobytes()
    kept = point_cloud2.read_points(cloud, ['z', 'rgb'], skip_nans=False, uvs=[1])
    assert kept.tolist() == [(6.0, 7)]
    finite = point_cloud2.read_points(cloud, ['x', 'y', 'z'], skip_nans=True)
    assert finite.tolist() == [(1.0, 2.0, 3.0)]


def test_cloud_of_another_type_than_its_fields_is_refused():
    fields = [PointField(name='x', offset=0, datatype=PointField.FLOAT32, count=1)]
    with pytest.raises(AssertionError):
        point_cloud2.create_cloud(Header(), fields, np.zeros(3, [('x', '<f8')]))


@pytest.mark.parametrize('points', [[(1, 2, 3), (4, 5, 6)], np.arange(1, 7).reshape(2, 3)])
def test_cloud_of_coordinates(points):
    cloud = point_cloud2.create_cloud_xyz32(Header(), points)
    assert isinstance(cloud, PointCloud2)
    assert cloud.point_step == 12
    assert point_cloud2.read_points(cloud).tolist() == [(1.0, 2.0, 3.0), (4.0, 5.0, 6.0)]


def test_transforms_go_out_on_tf(link):
    received = link.listen(TFMessage, '/tf', 10)
    broadcaster = TransformBroadcaster(link.node)
    link.spin_until(lambda: broadcaster.pub_tf.get_subscription_count())
    broadcaster.sendTransform(stamped('camera', 1.5))
    broadcaster.sendTransform([stamped('camera', 2.5), stamped('lidar', 3.5)])
    link.spin_until(lambda: len(received) == 2)
    assert [named_x(message) for message in received] == [
        [('camera', 1.5)],
        [('camera', 2.5), ('lidar', 3.5)],
    ]


def test_static_transforms_reach_a_late_listener(link):
    broadcaster = StaticTransformBroadcaster(link.node)
    broadcaster.sendTransform(stamped('camera', 1.0))
    broadcaster.sendTransform(stamped('lidar', 2.0))
    late = link.listen(
        TFMessage, '/tf_static', QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    )
    link.spin_until(lambda: late)
    assert {t.child_frame_id for t in late[-1].transforms} == {'camera', 'lidar'}
