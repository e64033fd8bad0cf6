"""The subscription of images and the texts about silence, on a plain node of rclpy."""

from contextlib import contextmanager
import time

from lingbot_map_ros.input.image_topic import ImageTopic, silence_text, stopped_clock_text
from lingbot_map_ros.parameters import NodeParams
import pytest
import rclpy
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image

pytestmark = pytest.mark.usefixtures('ros')
WAIT_S = 60.0
BEST_EFFORT = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)


@pytest.fixture
def camera():
    """Yield a node that publishes images."""
    node = rclpy.create_node('weak_camera', namespace='/front')
    yield node
    node.destroy_node()


@contextmanager
def subscribed(cli_args=(), overrides=(), **values):
    """Yield a node, not being spun, and the ImageTopic that it subscribes to."""
    overrides = [Parameter(name, value=value) for name, value in dict(overrides).items()]
    node = rclpy.create_node('lingbot_map', cli_args=list(cli_args), parameter_overrides=overrides)
    params = NodeParams.from_values(values)
    try:
        yield node, ImageTopic(node, params, lambda _: None, node.default_callback_group)
    finally:
        node.destroy_node()


def wait(is_true):
    end_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def text_with(node, topic, *topics):
    """Return the text about silence once the node knows a publisher of each of the topics."""
    wait(lambda: all(node.count_publishers(name) for name in topics))
    return silence_text(node, topic)


def test_only_a_compressed_topic_exists(camera):
    camera.create_publisher(CompressedImage, '/cam/image_raw/compressed', 1)
    with subscribed() as (node, topic):
        text = text_with(node, topic, '/cam/image_raw/compressed')
    assert '/image (sensor_msgs/msg/Image, 0 publishers)' in text
    assert '/cam/image_raw/compressed (image_transport: compressed)' in text
    assert '\n' not in text


def test_the_topic_has_another_name(camera):
    camera.create_publisher(Image, '/cam/image_raw', 1)
    with subscribed() as (node, topic):
        node.create_publisher(Image, '~/depth', 1)
        text = text_with(node, topic, '/cam/image_raw', '/lingbot_map/depth')
    assert 'but on /cam/image_raw (image_transport: raw): remap' in text
    assert '/lingbot_map/depth' not in text  # an image topic too, but of the node itself


def test_nobody_publishes_images():
    with subscribed() as (node, topic):
        text = text_with(node, topic)
    assert 'camera driver' in text
    assert 'ROS_DOMAIN_ID' in text


def test_the_publisher_is_silent(camera):
    camera.create_publisher(Image, '/image', 1)
    with subscribed() as (node, topic):
        text = text_with(node, topic, '/image')
    assert '1 publisher)' in text
    assert 'nothing is published' in text


def test_compressed_transport_names_its_own_topic(camera):
    camera.create_publisher(Image, '/image', 1)
    with subscribed(image_transport='compressed') as (node, topic):
        text = text_with(node, topic, '/image')
    assert '/image/compressed (sensor_msgs/msg/CompressedImage, 0 publishers)' in text
    assert 'but on /image (image_transport: raw)' in text


def test_a_clock_that_stands_still_is_named_with_its_time():
    with subscribed() as (_, topic):
        assert 'nothing was received on /clock' in stopped_clock_text(topic, 0)
        assert '/clock stands still at 100.0' in stopped_clock_text(topic, 100 * 10**9)


@pytest.mark.parametrize(
    ('remapping', 'name'),
    [
        ('unused:=/unused', '/image/compressed'),
        ('image:=/cam/image_raw', '/cam/image_raw/compressed'),
        ('image/compressed:=/bag/jpegs', '/bag/jpegs'),
    ],
)
def test_the_compressed_topic_follows_remappings(remapping, name):
    with subscribed(['--ros-args', '-r', remapping], image_transport='compressed') as (
        node,
        topic,
    ):
        assert topic.name == name
        assert [
            name
            for name, types in node.get_topic_names_and_types()
            if 'sensor_msgs/msg/CompressedImage' in types
        ] == [name]


@pytest.mark.parametrize(
    ('policy', 'value'), [('reliability', 'reliable'), ('durability', 'transient_local')]
)
def test_a_publisher_that_does_not_fit_is_named_with_the_remedy(camera, policy, value, capfd):
    publisher = camera.create_publisher(Image, '/image', BEST_EFFORT)
    override = f'qos_overrides./image.subscription.{policy}'
    with subscribed(overrides={override: value}) as (_, topic):
        wait(lambda: topic.check_publishers() or topic.incompatible)
        ((name, reason),) = topic.incompatible.items()
        assert name == '/front/weak_camera'
        assert f"set the parameter '{override}'" in reason
        topic.check_publishers()
        camera.destroy_publisher(publisher)
        wait(lambda: topic.check_publishers() or not topic.incompatible)
        assert topic.matched == 0
    log = capfd.readouterr().err
    assert log.count('images of /front/weak_camera on /image are not received') == 1


def test_every_policy_fits_the_default_subscription(camera):
    for durability in (DurabilityPolicy.VOLATILE, DurabilityPolicy.TRANSIENT_LOCAL):
        for reliability in (ReliabilityPolicy.BEST_EFFORT, ReliabilityPolicy.RELIABLE):
            profile = QoSProfile(depth=1, reliability=reliability, durability=durability)
            camera.create_publisher(Image, '/image', profile)
    with subscribed() as (_, topic):
        wait(lambda: topic.check_publishers() or topic.matched == 4)
        assert topic.incompatible == {}
