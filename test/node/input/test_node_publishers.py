"""Publishers of the image topic that do not fit, and topics that stay silent."""

from diagnostic_msgs.msg import DiagnosticStatus
from lingbot_map_ros.input import image_topic as silence
from node_rig import running, to_time
import pytest
import rclpy
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image

pytestmark = pytest.mark.usefixtures('ros')
_OVERRIDE = 'qos_overrides./image.subscription.'
_BEST_EFFORT = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)


@pytest.fixture
def camera():
    """Yield a node that publishes images beside the probe."""
    node = rclpy.create_node('weak_camera', namespace='/front')
    yield node
    node.destroy_node()


def newest_status(rig):
    return rig.heard['diagnostics'][-1].status[0]


def wait_value(rig, key, is_right):
    """Wait for diagnostics whose value of `key` is right; return the level and the value."""

    def value():
        return {v.key: v.value for v in newest_status(rig).values}.get(key, '')

    rig.wait(lambda: rig.heard['diagnostics'] and is_right(value()), f'diagnostics {key}')
    return newest_status(rig).level, value()


@pytest.mark.parametrize(
    'override, policy',
    [({_OVERRIDE + 'reliability': 'reliable'}, 'reliability'),
     ({_OVERRIDE + 'durability': 'transient_local'}, 'durability')],
)  # fmt: skip
def test_a_publisher_that_does_not_fit_is_named_with_the_remedy(camera, override, policy, capfd):
    with running(autostart=False, queue='latest', **override) as rig:
        rig.probe.destroy_publisher(rig._image_pub)
        pub = camera.create_publisher(Image, '/image', _BEST_EFFORT)
        rig.node._autostart_timer = rig.node.create_timer(1e6, lambda: None)
        rig.node._autostart()
        level, value = wait_value(rig, 'image_publishers_not_heard', bool)
        assert level == DiagnosticStatus.ERROR
        assert value.startswith('/front/weak_camera on /image: ')
        assert f'{_OVERRIDE}{policy}' in value
        camera.destroy_publisher(pub)
        level, value = wait_value(rig, 'image_publishers_not_heard', lambda value: not value)
        assert level != DiagnosticStatus.ERROR
    log = capfd.readouterr().err
    assert log.count('images of /front/weak_camera on /image are not heard') == 1


def test_one_of_two_publishers_is_named_and_the_other_one_heard(camera):
    with running(num_scale_frames=1) as rig:  # lossless: subscribed reliably
        for _ in range(2):
            camera.create_publisher(Image, '/image', _BEST_EFFORT)
        level, value = wait_value(rig, 'image_publishers_not_heard', bool)
        assert level == DiagnosticStatus.ERROR
        assert value.startswith('/front/weak_camera (2 publishers) on /image: best effort')
        assert 'probe' not in value
        assert rig.diagnostic('image_publishers_heard') == '1'
        rig.send(1.0)
        rig.wait_counts(1, 1)


def test_every_policy_fits_the_default_subscription(camera):
    for durability in (DurabilityPolicy.VOLATILE, DurabilityPolicy.TRANSIENT_LOCAL):
        for reliability in (ReliabilityPolicy.BEST_EFFORT, ReliabilityPolicy.RELIABLE):
            profile = QoSProfile(depth=1, reliability=reliability, durability=durability)
            camera.create_publisher(Image, '/image', profile)
    with running(queue='latest', num_scale_frames=1) as rig:
        rig.wait(lambda: rig.diagnostic('image_publishers_heard') == '5')
        assert rig.diagnostic('image_publishers_not_heard') == ''


def test_silence_is_stale_until_an_image_comes(monkeypatch):
    monkeypatch.setattr(silence, 'PATIENCE_S', 0.0)
    with running(num_scale_frames=1) as rig:
        level, text = wait_value(rig, 'silence', bool)
        assert level == DiagnosticStatus.STALE
        assert '/image (sensor_msgs/msg/Image, 1 publisher)' in text
        rig.send(1.0)
        level, text = wait_value(rig, 'silence', lambda text: not text)
        assert level == DiagnosticStatus.OK
        rig.wait_counts(1, 1)


def test_simulated_time_that_stands_still_is_the_reason_given_and_no_watchdog_fires(monkeypatch):
    monkeypatch.setattr(silence, 'PATIENCE_S', 0.0)
    with running(num_scale_frames=1, use_sim_time=True, watchdog_timeout=0.2) as rig:
        _, text = wait_value(rig, 'silence', bool)
        assert 'nothing has come on /clock' in text
        clock = rig.publisher(Clock, '/clock')
        clock.publish(Clock(clock=to_time(100.0)))
        rig.wait(lambda: rig.node.get_clock().now().nanoseconds > 0)
        rig.send(100.0)
        rig.wait_counts(1, 1)
        wait_value(rig, 'silence', lambda text: '/clock stands still at 100.0' in text)
        assert not rig.node.leaving.is_set()
        rig.send(101.0)  # as before the pause, though /clock has not gone on
        rig.wait_counts(2, 2)


def test_images_without_stamp_wait_for_simulated_time(capfd):
    with running(num_scale_frames=1, use_sim_time=True) as rig:
        rig.send(0)
        rig.wait_counts(1, 0, zero_stamp=1)
        clock = rig.publisher(Clock, '/clock')
        clock.publish(Clock(clock=to_time(50.0)))
        rig.wait(lambda: rig.node.get_clock().now().nanoseconds > 0)
        rig.send(0)
        rig.wait_for('odometry', 1)
        assert rig.stamps('odometry') == [50]
    assert '/clock' in capfd.readouterr().err
