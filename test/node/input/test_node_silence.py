"""When no images come, one line says where there are some."""

import subprocess
import sys

from image_messages import encode
from lingbot_map_ros.input import image_topic as silence
from node_rig import running
import numpy as np
import pytest
from sensor_msgs.msg import CompressedImage, Image

pytestmark = pytest.mark.usefixtures('ros')


@pytest.fixture
def rig(monkeypatch):
    """Yield a running node; the probe's own publisher on /image is gone."""
    monkeypatch.setattr(silence, 'PATIENCE_S', 0.0)
    with running(num_scale_frames=1) as rig:
        rig.probe.destroy_publisher(rig._image_pub)
        rig.wait(lambda: rig.node.count_publishers('/image') == 0)
        yield rig


def text_with(rig, *topics):
    rig.wait(lambda: all(rig.node.count_publishers(topic) for topic in topics))
    return silence.silence_text(rig.node, rig.node._image_topic)


def test_only_a_compressed_topic_exists(rig):
    rig.probe.create_publisher(CompressedImage, '/cam/image_raw/compressed', 1)
    text = text_with(rig, '/cam/image_raw/compressed')
    assert '/image (sensor_msgs/msg/Image, 0 publishers)' in text
    assert '/cam/image_raw/compressed (image_transport: compressed)' in text
    assert '\n' not in text


def test_the_topic_has_another_name(rig):
    rig.probe.create_publisher(Image, '/cam/image_raw', 1)
    text = text_with(rig, '/cam/image_raw')
    assert 'but on /cam/image_raw (image_transport: raw): remap' in text
    assert '/lingbot_map/depth' not in text  # an image topic too, but of the node itself


def test_nobody_publishes_images(rig):
    text = text_with(rig)
    assert 'camera driver' in text
    assert 'ROS_DOMAIN_ID' in text


def test_the_publisher_is_silent(rig):
    rig.probe.create_publisher(Image, '/image', 1)
    text = text_with(rig, '/image')
    assert '1 publisher)' in text
    assert 'silent' in text


_CAMERA = """
import time
import rclpy
from sensor_msgs.msg import Image
rclpy.init()
publisher = rclpy.create_node('camera').create_publisher(Image, '/image', 1)
picture = Image(height=1080, width=1920, step=5760, encoding='rgb8', data=bytes(6220800))
while True:
    publisher.publish(picture)
    time.sleep(0.05)
"""


def test_images_that_get_lost_on_the_way_are_told_from_silence(monkeypatch, capfd):
    # From another process, far larger than the middleware's default shared memory.
    monkeypatch.delenv('FASTRTPS_DEFAULT_PROFILES_FILE', raising=False)
    with running(num_scale_frames=1, queue='latest') as rig:
        camera = subprocess.Popen([sys.executable, '-c', _CAMERA])
        try:
            topic = rig.node._image_topic
            rig.wait(lambda: topic.lost)
        finally:
            camera.kill()
            camera.wait()
        assert 'lost on the way here' in capfd.readouterr().err
        assert 'fastdds_large_messages.xml' in silence.silence_text(rig.node, topic)
        assert int(rig.diagnostic('images_lost_on_the_way')) > 0


def test_it_is_said_once_and_ends_with_the_first_image(capfd, rig):  # from before the rig on
    for _ in range(4):
        rig.diagnostic('state')
    publisher = rig.probe.create_publisher(Image, '/image', 1)
    rig.wait(lambda: publisher.get_subscription_count() == 1)
    rig._image_pub = publisher
    rig.publish(1.0, encode('rgb8', np.zeros((42, 56, 3), np.uint8)))
    rig.wait_counts(1, 1)
    assert rig.state() == 'TRACKING'
    assert capfd.readouterr().err.count('no images come on /image') == 1


def test_compressed_transport_names_its_own_topic():
    with running(num_scale_frames=1, image_transport='compressed') as rig:
        text = text_with(rig, '/image')
        assert '/image/compressed (sensor_msgs/msg/CompressedImage, 0 publishers)' in text
        assert 'but on /image (image_transport: raw)' in text
