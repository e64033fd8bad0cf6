"""From pictures on topics to the pixels that reach the network, and to outputs in its frame."""

from array import array

from fake_engine import STEP
from image_messages import compressed, encode, ENCODINGS, png, raw
from lingbot_map.geometry import quaternion_to_matrix, R_REP103_OPTICAL
from lingbot_map.images.decoding import compressed_to_rgb, to_rgb
from lingbot_map.images.view import camera_rotation, GREY, rotate_image
from lingbot_map.streaming.preprocess import open_rgb
from node_rig import running, to_time
import numpy as np
import pytest
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import Header
import torch

pytestmark = pytest.mark.usefixtures('ros')
SIZE = (57, 43)  # width, height, both odd


def noise(size=SIZE, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)


@pytest.fixture
def from_file(tmp_path):
    """Return the pixels of `noise()` as the network gets them from a file."""
    (tmp_path / 'picture.png').write_bytes(png(noise()).data)
    return open_rgb(tmp_path / 'picture.png')


def test_raw_images_reach_the_network_and_all_others_are_accounted_for(from_file, capfd):
    with running(num_scale_frames=1) as rig:
        rig.publish(1.0, encode('bgr8', noise(), padding=5))
        rig.wait_counts(1, 1)
        np.testing.assert_array_equal(rig.engine.pictures[0], from_file)
        send_every_encoding(rig)
        good, bad = 1 + len(ENCODINGS), send_what_is_no_picture(rig)
        rig.publish(200.0, encode('rgb8', noise()))
        rig.wait_counts(good + 1 + bad, good + 1, bad_image=bad)
        rig.wait_for('odometry', good + 1)
        assert rig.stamps('odometry')[-2:] == [99 + len(ENCODINGS), 200]
        assert rig.state() == 'TRACKING'
        shown = rig.diagnostic('bad_images')
        assert shown.startswith("encoding 'foo8': 3, encoding '32FC1': 2, ")
        err = capfd.readouterr().err
        names = ('foo8', '32FC1', '16UC3')
        assert [err.count(f"encoding '{name}'") for name in names] == [1, 1, 1]

        right = good + 1 + send_random_messages(rig)
        rig.wait_counts(good + 1 + bad + 300, right, bad_image=bad + 300 - (right - good - 1))
        assert rig.node.pipeline.worker.errors == 0
        assert rig.node.pipeline.session.number == 0


def send_every_encoding(rig):
    messages = [encode(name, noise(), 3, i % 2) for i, name in enumerate(ENCODINGS)]
    for i, message in enumerate(messages):
        rig.publish(100.0 + i, message)
    rig.wait_counts(1 + len(messages), 1 + len(messages))
    for picture, message in zip(list(rig.engine.pictures)[1:], messages, strict=True):
        np.testing.assert_array_equal(picture, to_rgb(message))


def send_what_is_no_picture(rig):
    """Return how many images must be refused."""
    bad = ['foo8', '32FC1', '16UC3', 'foo8', '32FC1', 'foo8']
    for i, encoding in enumerate(bad):
        rig.publish(150.0 + i, raw(encoding, np.zeros((43, 57 * 12), np.uint8), 43, 57))
    rig.send(160.0, size=(0, 0))
    rig.send(161.0, step=7)
    rig.send(162.0, size=(4000, 1), data=bytes(12000))  # no patch row would be left
    return len(bad) + 3


def send_random_messages(rig, count=300):
    """Send pictures and what is none; return how many pictures there were."""
    rng = np.random.default_rng(6)
    before, good = rig.counts().received, 0
    for i in range(count):
        message = encode(str(rng.choice(ENCODINGS)), noise(seed=i))
        if rng.random() < 0.5:
            good += 1
        else:
            spoil(message, rng)
        rig.publish(1000.0 + i, message)
        if i % 20 == 0:
            rig.wait_for('processed', before + i + 1)
    return good


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


def stamped(stamp_s, message):
    message.header = Header(stamp=to_time(stamp_s), frame_id='cam')
    return message


def test_compressed_topics_are_used_on_demand_and_bad_data_are_counted(from_file, capfd):
    jpeg = compressed(noise()[..., ::-1], '.jpg', 'rgb8; jpeg compressed bgr8')
    with running(num_scale_frames=1, image_transport='compressed') as rig:
        send = rig.publisher(CompressedImage, '/image/compressed', 100)
        send.publish(stamped(1.0, jpeg))
        for i in range(5):
            damaged = CompressedImage(format='jpeg', data=array('B', jpeg.data[: 100 * i]))
            send.publish(stamped(2.0 + i, damaged))
        send.publish(stamped(10.0, CompressedImage(format='32FC1; compressedDepth png')))
        send.publish(stamped(11.0, jpeg))
        send.publish(stamped(12.0, png(noise())))
        rig.wait_counts(9, 3, bad_image=6)
        rig.wait_for('odometry', 3)
        assert rig.stamps('odometry') == [1, 11, 12]
        np.testing.assert_array_equal(rig.engine.pictures[0], compressed_to_rgb(jpeg))
        np.testing.assert_array_equal(rig.engine.pictures[2], from_file)
        kinds = rig.node.pipeline.ledger.kinds()
    assert kinds == {"data in format 'jpeg'": 5, "format '32FC1; compressedDepth png'": 1}
    assert capfd.readouterr().err.count('image dropped') == 2


def test_outputs_of_a_camera_mounted_sideways_are_of_its_own_image_without_the_mask():
    first, second = noise((42, 56)), noise((42, 56), seed=1)
    inside = np.zeros((56, 42), bool)
    inside[8:, 10:] = True
    second[inside] = first[inside]
    with running(
        ('points', 'depth', 'depth_info'),
        num_scale_frames=1,
        image_rotation=90,
        image_mask='10,8,0,0',
        points__stride=1,
    ) as rig:
        rig.publish(1.0, encode('rgb8', first))
        rig.publish(2.0, encode('rgb8', second))
        rig.wait_counts(2, 2)
        one, two = rig.engine.pictures
        np.testing.assert_array_equal(one, two)
        masked = np.where(inside[..., None], first, np.uint8(GREY))
        np.testing.assert_array_equal(one, rotate_image(masked, 90))
        pose = rig.wait_for('odometry', 2)[1].pose.pose
        position = (pose.position.x, pose.position.y, pose.position.z)
        assert position == pytest.approx((STEP, 0, 0), abs=1e-6)
        q = pose.orientation
        R_map_cam = quaternion_to_matrix(torch.tensor([q.x, q.y, q.z, q.w])).numpy()
        np.testing.assert_allclose(R_map_cam, R_REP103_OPTICAL @ camera_rotation(90), atol=1e-6)
        message, info = rig.wait_for('depth', 1)[0], rig.wait_for('depth_info', 1)[0]
        assert (message.height, message.width) == (info.height, info.width) == (56, 42)
        assert info.header.frame_id == message.header.frame_id == 'cam'
        depth = np.frombuffer(message.data, '<f4').reshape(56, 42)
        np.testing.assert_array_equal(np.isfinite(depth), inside)
        assert rig.wait_for('points', 1)[0].width == inside.sum()
