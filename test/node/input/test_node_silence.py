"""What the node reports about publishers of images, and while no images arrive."""

import subprocess
import sys

from diagnostic_msgs.msg import DiagnosticStatus
from lingbot_map_ros.input import image_topic as silence
from node_rig import running, to_time
import pytest
import rclpy
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image

pytestmark = pytest.mark.usefixtures('ros')
_BEST_EFFORT = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)


@pytest.fixture
def camera():
    """Yield a node that publishes images beside the probe."""
    node = rclpy.create_node('weak_camera', namespace='/front')
    yield node
    node.destroy_node()


@pytest.fixture
def impatient(monkeypatch):
    """Let a node report silence at once."""
    monkeypatch.setattr(silence, 'PATIENCE_S', 0.0)


def newest_status(rig):
    return rig.heard['diagnostics'][-1].status[0]


def wait_value(rig, key, is_right):
    """Wait for diagnostics whose value of `key` is right; return the level and the value."""
    found = []

    def has_come():
        if rig.heard['diagnostics']:
            status = newest_status(rig)
            found[:] = [status.level, {v.key: v.value for v in status.values}.get(key, '')]
        return found and is_right(found[1])

    rig.wait(has_come, f'diagnostics {key}')
    return found


@pytest.mark.usefixtures('impatient')
def test_silence_is_stale_and_logged_once_until_an_image_comes(capfd):
    with running(num_scale_frames=1) as rig:
        level, text = wait_value(rig, 'silence', bool)
        assert level == DiagnosticStatus.STALE
        assert '/image (sensor_msgs/msg/Image, 1 publisher)' in text
        assert 'nothing is published' in text
        rig.probe.destroy_publisher(rig._image_pub)
        wait_value(rig, 'silence', lambda text: 'is the camera driver running' in text)
        rig.probe.create_publisher(Image, '/cam/image_raw', 1)
        _, text = wait_value(rig, 'silence', lambda text: 'but on' in text)
        assert 'but on /cam/image_raw (image_transport: raw): remap' in text
        assert '/lingbot_map/depth' not in text  # an image topic too, but of the node itself
        rig._image_pub = rig.publisher(Image, '/image', 1)
        rig.send(1.0)
        rig.wait_counts(1, 1)
        assert rig.state() == 'TRACKING'
        level, _ = wait_value(rig, 'silence', lambda text: not text)
        assert level == DiagnosticStatus.OK
    assert capfd.readouterr().err.count('no images arrive on /image') == 1


@pytest.mark.usefixtures('impatient')
def test_simulated_time_that_stands_still_is_the_reason_given_and_no_watchdog_fires(capfd):
    with running(num_scale_frames=1, use_sim_time=True, watchdog_timeout=0.2) as rig:
        _, text = wait_value(rig, 'silence', bool)
        assert 'nothing was received on /clock' in text
        capfd.readouterr()
        rig.send(0)  # without stamp
        rig.wait_counts(1, 0, zero_stamp=1)
        assert 'is /clock published' in capfd.readouterr().err
        clock = rig.publisher(Clock, '/clock')
        clock.publish(Clock(clock=to_time(100.0)))
        rig.wait(lambda: rig.node.get_clock().now().nanoseconds > 0)
        rig.send(100.0)
        rig.wait_counts(2, 1, zero_stamp=1)
        wait_value(rig, 'silence', lambda text: '/clock stands still at 100.0' in text)
        assert not rig.node.leaving.is_set()
        rig.send(101.0)  # as before the pause, though /clock has not gone on
        rig.wait_counts(3, 2, zero_stamp=1)
        assert rig.call('reset').success
        rig.send(0)
        rig.wait_for('odometry', 3)
        assert rig.stamps('odometry') == [100, 101, 100]


def test_one_of_two_publishers_is_named_and_the_other_one_heard(camera):
    with running(num_scale_frames=1) as rig:  # lossless: subscribed reliably
        weak = [camera.create_publisher(Image, '/image', _BEST_EFFORT) for _ in range(2)]
        level, value = wait_value(rig, 'image_publishers_not_heard', lambda v: '(2' in v)
        assert level == DiagnosticStatus.ERROR
        assert value.startswith('/front/weak_camera (2 publishers) on /image: best effort')
        assert 'qos_overrides./image.subscription.reliability' in value
        assert 'probe' not in value
        assert rig.diagnostic('image_publishers_heard') == '1'
        rig.send(1.0)
        rig.wait_counts(1, 1)
        for publisher in weak:
            camera.destroy_publisher(publisher)
        level, _ = wait_value(rig, 'image_publishers_not_heard', lambda value: not value)
        assert level != DiagnosticStatus.ERROR


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
        assert 'were lost in transport' in capfd.readouterr().err
        assert 'fastdds_large_messages.xml' in silence.silence_text(rig.node, topic)
        assert int(rig.diagnostic('images_lost_on_the_way')) > 0
