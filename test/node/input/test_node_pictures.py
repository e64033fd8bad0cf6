"""From pictures on topics to the pixels that reach the network, and to outputs in its frame."""

from array import array

from fake_engine import DEPTH, FakeEngine, STEP
from image_messages import compressed, encode, ENCODINGS, png, raw
from lingbot_map.geometry import quaternion_to_matrix, R_REP103_OPTICAL
from lingbot_map.images.decoding import compressed_to_rgb, to_rgb
from lingbot_map.images.view import camera_rotation, GREY, rotate_image, ROTATIONS
from lingbot_map.streaming.preprocess import open_rgb
from lingbot_map_ros.node import LingbotMapNode
from node_rig import running, to_time
import numpy as np
import pytest
import rclpy
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.parameter import Parameter
from sensor_msgs.msg import CompressedImage, Image
from sensor_msgs_py import point_cloud2
from std_msgs.msg import Header
import torch

pytestmark = pytest.mark.usefixtures('ros')
SIZE = (57, 43)  # width, height, both odd


def noise(size=SIZE, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)


def test_every_encoding_reaches_the_network_as_it_is_decoded():
    with running(num_scale_frames=1) as rig:
        messages = [encode(name, noise(), 3, i % 2) for i, name in enumerate(ENCODINGS)]
        for i, message in enumerate(messages):
            rig.publish(i + 1, message)
        rig.wait_counts(len(messages), len(messages))
        for picture, message in zip(rig.engine.pictures, messages, strict=True):
            np.testing.assert_array_equal(picture, to_rgb(message))


def test_file_raw_topic_and_png_topic_give_the_network_the_same_pixels(tmp_path):
    (tmp_path / 'picture.png').write_bytes(png(noise()).data)
    from_file = open_rgb(tmp_path / 'picture.png')
    with running(num_scale_frames=1) as rig:
        rig.publish(1.0, encode('bgr8', noise(), padding=5))
        rig.wait_counts(1, 1)
        np.testing.assert_array_equal(rig.engine.pictures[0], from_file)
    with running(num_scale_frames=1, image_transport='compressed') as rig:
        send = rig.publisher(CompressedImage, '/image/compressed')
        send.publish(stamped(1.0, png(noise())))
        rig.wait_counts(1, 1)
        np.testing.assert_array_equal(rig.engine.pictures[0], from_file)


def stamped(stamp_s, message):
    message.header = Header(stamp=to_time(stamp_s), frame_id='cam')
    return message


def test_compressed_topics_are_used_on_demand_and_bad_data_are_counted(capfd):
    jpeg = compressed(noise()[..., ::-1], '.jpg', 'rgb8; jpeg compressed bgr8')
    with running(num_scale_frames=2, image_transport='compressed') as rig:
        send = rig.publisher(CompressedImage, '/image/compressed', 100)
        send.publish(stamped(1.0, jpeg))
        for i in range(5):
            damaged = CompressedImage(format='jpeg', data=array('B', jpeg.data[: 100 * i]))
            send.publish(stamped(2.0 + i, damaged))
        send.publish(stamped(10.0, CompressedImage(format='32FC1; compressedDepth png')))
        send.publish(stamped(11.0, jpeg))
        rig.wait_counts(8, 2, bad_image=6)
        rig.wait_for('odometry', 2)
        assert rig.stamps('odometry') == [1, 11]
        np.testing.assert_array_equal(rig.engine.pictures[0], compressed_to_rgb(jpeg))
        kinds = rig.node.pipeline.ledger.kinds()
    assert kinds == {"data in format 'jpeg'": 5, "format '32FC1; compressedDepth png'": 1}
    assert capfd.readouterr().err.count('image dropped') == 2


@pytest.mark.parametrize(
    ('remapping', 'topic'),
    [
        ('unused:=/unused', '/image/compressed'),
        ('image:=/cam/image_raw', '/cam/image_raw/compressed'),
        ('image/compressed:=/bag/jpegs', '/bag/jpegs'),
    ],
)
def test_the_compressed_topic_follows_remappings(remapping, topic):
    context = rclpy.Context()
    rclpy.init(args=['--ros-args', '-r', remapping], context=context)
    values = {'autostart': False, 'image_transport': 'compressed'}
    overrides = [Parameter(name, value=value) for name, value in values.items()]
    node = LingbotMapNode(FakeEngine, context=context, parameter_overrides=overrides)
    try:
        assert node.trigger_configure() == TransitionCallbackReturn.SUCCESS
        assert node.trigger_activate() == TransitionCallbackReturn.SUCCESS
        assert [
            name
            for name, types in node.get_topic_names_and_types()
            if 'sensor_msgs/msg/CompressedImage' in types
        ] == [topic]
    finally:
        assert node.close(10.0)
        node.destroy_node()
        rclpy.shutdown(context=context)


def test_what_is_no_picture_is_refused_once_per_kind_and_counted(capfd):
    bad = ['foo8', '32FC1', '16UC3', 'foo8', '32FC1', 'foo8']
    with running(num_scale_frames=1) as rig:
        rig.publish(1.0, encode('rgb8', noise()))
        for i, encoding in enumerate(bad):
            rig.publish(2.0 + i, raw(encoding, np.zeros((43, 57 * 12), np.uint8), 43, 57))
        rig.send(9.0, size=(0, 0))
        rig.send(10.0, step=7)
        rig.send(11.0, size=(4000, 1), data=bytes(12000))  # no patch row would be left
        rig.publish(20.0, encode('rgb8', noise()))
        rig.wait_counts(11, 2, bad_image=9)
        rig.wait_for('odometry', 2)
        assert rig.stamps('odometry') == [1, 20]
        assert rig.state() == 'TRACKING'
        shown = rig.diagnostic('bad_images')
    assert shown.startswith("encoding 'foo8': 3, encoding '32FC1': 2, ")
    err = capfd.readouterr().err
    assert [err.count(f"encoding '{name}'") for name in ('foo8', '32FC1', '16UC3')] == [1, 1, 1]


def test_random_messages_are_all_accounted_for():
    rng = np.random.default_rng(6)
    good = 0
    with running(num_scale_frames=1) as rig:
        rig.publish(1.0, encode('rgb8', noise()))
        for i in range(300):
            message = encode(str(rng.choice(ENCODINGS)), noise(seed=i))
            if rng.random() < 0.5:
                good += 1
            else:
                spoil(message, rng)
            rig.publish(2.0 + i, message)
            if i % 20 == 0:
                rig.wait_for('processed', i + 2)
        rig.wait_counts(301, good + 1, bad_image=300 - good)
        assert rig.node.pipeline.worker.errors == 0
        assert rig.node.pipeline.session.number == 0


def spoil(message: Image, rng):
    """Make a message malformed in one of many ways, none of which is a picture."""
    change, value = [
        ('data', array('B')),
        ('data', message.data[: int(rng.integers(0, len(message.data) // 2))]),
        ('width', 0),
        ('height', 0),
        ('width', int(rng.integers(20000, 2**32))),
        ('height', int(rng.integers(20000, 2**32))),
        ('step', int(rng.integers(200000, 2**32))),
        ('encoding', bytes(rng.integers(33, 127, 5).astype(np.uint8)).decode()),
    ][rng.integers(0, 8)]
    setattr(message, change, value)
    if change == 'step':
        message.data = message.data[:-1]


def test_an_overlay_behind_the_mask_changes_nothing_and_never_becomes_points():
    first, second = noise(), noise(seed=1)
    inside = np.zeros((43, 57), bool)
    inside[8:, 10:] = True
    second[inside] = first[inside]
    with running(
        ('points', 'depth'), num_scale_frames=1, image_mask='10,8,0,0', points__stride=1
    ) as rig:
        rig.publish(1.0, encode('rgb8', first))
        rig.publish(2.0, encode('rgb8', second))
        rig.wait_counts(2, 2)
        one, two = rig.engine.pictures
        np.testing.assert_array_equal(one, two)
        assert (one[~inside] == GREY).all()
        np.testing.assert_array_equal(one[inside], first[inside])
        depth = np.frombuffer(rig.wait_for('depth', 1)[0].data, '<f4').reshape(42, 56)
        assert np.isnan(depth[:7]).all()
        assert np.isnan(depth[:, :9]).all()
        assert np.isfinite(depth[9:, 11:]).all()
        assert rig.wait_for('points', 1)[0].width == np.isfinite(depth).sum()


def test_a_mask_file_of_another_size_is_refused_with_both_sizes(tmp_path, capfd):
    (tmp_path / 'mask.png').write_bytes(png(np.full((10, 20, 3), 255, np.uint8)).data)
    with running(num_scale_frames=1, image_mask=str(tmp_path / 'mask.png')) as rig:
        rig.publish(1.0, encode('rgb8', noise()))
        rig.wait_counts(1, 0, bad_image=1)
    assert '20x10 pixels and the images have 57x43' in capfd.readouterr().err


def test_a_mask_that_is_none_fails_to_configure(capfd):
    with running(autostart=False, image_mask='/nowhere.png') as rig:
        assert rig.node.trigger_configure() == TransitionCallbackReturn.FAILURE
        assert rig.node.pipeline is None
    assert "'image_mask': '/nowhere.png' is neither" in capfd.readouterr().err


@pytest.mark.parametrize('degrees', ROTATIONS)
def test_a_camera_mounted_sideways_keeps_its_frame_and_the_map_is_upright(degrees):
    """The fake network sees a wall ahead, wider than high, and moves towards it."""
    upright = noise((56, 42))
    mounted = rotate_image(upright, -degrees % 360)
    with running(
        ('points', 'depth', 'depth_info'), num_scale_frames=1, image_rotation=degrees
    ) as rig:
        for i in range(3):
            rig.publish(1.0 + i, encode('rgb8', mounted))
        rig.wait_counts(3, 3)
        np.testing.assert_array_equal(rig.engine.pictures[0], upright)
        pose = rig.wait_for('odometry', 3)[2].pose.pose
        position = (pose.position.x, pose.position.y, pose.position.z)
        assert position == pytest.approx((2 * STEP, 0, 0), abs=1e-6)
        q = pose.orientation
        R_map_cam = quaternion_to_matrix(torch.tensor([q.x, q.y, q.z, q.w])).numpy()
        expected = R_REP103_OPTICAL @ camera_rotation(degrees)
        np.testing.assert_allclose(R_map_cam, expected, atol=1e-6)
        depth, info = rig.wait_for('depth', 1)[0], rig.wait_for('depth_info', 1)[0]
        assert (depth.height, depth.width) == mounted.shape[:2]
        assert (info.height, info.width) == mounted.shape[:2]
        assert info.header.frame_id == depth.header.frame_id == 'cam'
        cloud = point_cloud2.read_points(rig.wait_for('points', 1)[0], ['x', 'y', 'z'])
        spans = [np.ptp(cloud[axis]) for axis in 'xyz']
        assert spans == pytest.approx((0, 54 / 56 * DEPTH, 40 / 56 * DEPTH), abs=1e-5)
        assert cloud['x'].mean() == pytest.approx(DEPTH, abs=1e-5)
