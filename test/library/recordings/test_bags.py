"""Bags of every kind made here, read back; and what is said about bad ones."""

from dataclasses import replace
import sys

from bag_writer import (
    compressed_image,
    header,
    NOETIC,
    odometry,
    pose_stamped,
    pose_with_covariance_stamped,
    raw_image,
    tf_message,
    transform_stamped,
    write_bag,
    write_ros1_bag,
)
import cv2
from lingbot_map.recordings.bags import read_pose_topic
from lingbot_map.recordings.open import open_source
from lingbot_map.recordings.source import SourceError
import numpy as np
import pytest
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer
from rosbags.typesys import get_types_from_msg, get_typestore, Stores
import yaml

SECOND = 10**9


def picture(seed=0, channels=3):
    return np.random.default_rng(seed).integers(0, 256, (6, 7, channels), dtype=np.uint8)


def pictures(count, topic='/image'):
    return [
        (topic, (5 + i) * SECOND, raw_image((5 + i) * SECOND, picture(i))) for i in range(count)
    ]


def assert_reads_pictures(source, count):
    stamps, images = zip(*source, strict=True)
    assert len(source) == count
    assert stamps == tuple((5 + i) * SECOND for i in range(count))
    for seed, image in enumerate(images):
        np.testing.assert_array_equal(image, picture(seed))


@pytest.mark.parametrize('storage', ['sqlite3', 'mcap'])
def test_rosbag2(tmp_path, storage):
    source = open_source(write_bag(tmp_path / 'bag', pictures(4), storage))
    assert source.frame_id == 'cam7_optical'
    assert_reads_pictures(source, 4)
    assert_reads_pictures(source, 4)


@pytest.mark.parametrize('mode', [CompressionMode.MESSAGE, CompressionMode.FILE])
def test_compressed_rosbag2(tmp_path, mode):
    bag = write_bag(tmp_path / 'bag', pictures(3), compression=(mode, CompressionFormat.ZSTD))
    assert_reads_pictures(open_source(bag), 3)


def test_ros1_bag(tmp_path):
    messages = [
        ('/image', (5 + i) * SECOND, raw_image((5 + i) * SECOND, picture(i), store=NOETIC))
        for i in range(3)
    ]
    assert_reads_pictures(open_source(write_ros1_bag(tmp_path / 'old.bag', messages)), 3)


def test_a_storage_file_without_metadata_is_read(tmp_path):
    bag = write_bag(tmp_path / 'bag', pictures(3), 'mcap')
    assert_reads_pictures(open_source(bag / 'bag.mcap'), 3)
    (bag / 'metadata.yaml').unlink()
    assert_reads_pictures(open_source(bag), 3)


def test_split_files_are_one_recording(tmp_path):
    first = write_bag(tmp_path / 'bag', pictures(3), 'mcap')
    second = write_bag(tmp_path / 'next', pictures(5)[3:], 'mcap')
    (second / 'next.mcap').rename(first / 'next.mcap')
    both = [yaml.safe_load((bag / 'metadata.yaml').read_text()) for bag in (first, second)]
    whole, other = (content['rosbag2_bagfile_information'] for content in both)
    whole['relative_file_paths'] += other['relative_file_paths']
    whole['files'] += other['files']
    whole['message_count'] += other['message_count']
    whole['duration']['nanoseconds'] = 4 * SECOND
    whole['topics_with_message_count'][0]['message_count'] += 2
    (first / 'metadata.yaml').write_text(yaml.safe_dump(both[0]))
    assert_reads_pictures(open_source(first), 5)


@pytest.mark.parametrize(
    ('encoding', 'channels', 'order'),
    [
        ('rgb8', 3, [0, 1, 2]),
        ('bgr8', 3, [2, 1, 0]),
        ('rgba8', 4, [0, 1, 2]),
        ('bgra8', 4, [2, 1, 0]),
        ('mono8', 1, [0, 0, 0]),
    ],
)
@pytest.mark.parametrize('padding', [0, 5])
def test_raw_encodings_and_padded_rows(tmp_path, encoding, channels, order, padding):
    pixels = picture(channels=channels)
    image = raw_image(SECOND, pixels, encoding, padding)
    ((_, rgb),) = open_source(write_bag(tmp_path / 'bag', [('/image', SECOND, image)]))
    np.testing.assert_array_equal(rgb, pixels[..., order])


def test_png_topic_has_the_exact_pixels(tmp_path):
    messages = [
        ('/image/compressed', (5 + i) * SECOND, compressed_image((5 + i) * SECOND, picture(i)))
        for i in range(3)
    ]
    assert_reads_pictures(open_source(write_bag(tmp_path / 'bag', messages)), 3)


def test_jpeg_topic_has_its_channels_in_order(tmp_path):
    red = np.zeros((16, 16, 3), np.uint8)
    red[..., 0] = 200
    messages = [('/image/compressed', SECOND, compressed_image(SECOND, red, 'jpg'))]
    ((_, rgb),) = open_source(write_bag(tmp_path / 'bag', messages))
    assert rgb.reshape(-1, 3).mean(axis=0) == pytest.approx((200, 0, 0), abs=3)


def test_a_mosaic_compressed_to_png_becomes_colours(tmp_path):
    red = np.zeros((6, 8), np.uint8)
    red[::2, ::2] = 200
    message = compressed_image(SECOND, np.repeat(red[..., None], 3, axis=2))
    grey = cv2.imencode('.png', red)[1].ravel()
    message = replace(message, format='bayer_rggb8; png compressed ', data=grey)
    ((_, rgb),) = open_source(write_bag(tmp_path / 'bag', [('/image', SECOND, message)]))
    np.testing.assert_array_equal(rgb, np.full((6, 8, 3), (200, 0, 0)))


def test_compressed_depth_is_no_picture(tmp_path):
    message = replace(compressed_image(SECOND, picture()), format='16UC1; compressedDepth png')
    with pytest.raises(SourceError, match="'16UC1; compressedDepth png' is depth"):
        open_source(write_bag(tmp_path / 'bag', [('/depth', SECOND, message)]))


def test_stamps_that_do_not_increase_are_left_out_and_counted(tmp_path):
    stamps = [5, 6, 6, 4, 7]
    messages = [
        ('/image', (10 + i) * SECOND, raw_image(stamp * SECOND, picture()))
        for i, stamp in enumerate(stamps)
    ]
    source = open_source(write_bag(tmp_path / 'bag', messages))
    assert [stamp // SECOND for stamp, _ in source] == [5, 6, 7]
    assert source.skipped == 2


def test_a_header_without_stamp_takes_the_time_of_recording(tmp_path):
    messages = [('/image', (10 + i) * SECOND, raw_image(0, picture())) for i in range(3)]
    source = open_source(write_bag(tmp_path / 'bag', messages))
    assert [stamp // SECOND for stamp, _ in source] == [10, 11, 12]


def test_the_topic_can_be_chosen(tmp_path):
    bag = write_bag(tmp_path / 'bag', pictures(3) + pictures(2, '/left/image'))
    assert_reads_pictures(open_source(bag, image_topic='/left/image'), 2)
    assert_reads_pictures(open_source(bag, image_topic='image'), 3)


def test_several_image_topics_are_listed(tmp_path):
    bag = write_bag(tmp_path / 'bag', pictures(2) + pictures(2, '/left/image'))
    with pytest.raises(
        SourceError,
        match=r'--image-topic.*/image \(sensor_msgs/msg/Image\), '
        r'/left/image',
    ):
        open_source(bag)


def test_no_image_topic_lists_the_topics(tmp_path):
    bag = write_bag(tmp_path / 'bag', [('/odom', SECOND, odometry(SECOND, (0, 0, 0)))])
    with pytest.raises(SourceError, match=r'no image topic.*/odom \(nav_msgs/msg/Odometry\)'):
        open_source(bag)


@pytest.mark.parametrize('topic', ['/nope', '/odom'])
def test_an_unknown_topic_lists_the_image_topics(tmp_path, topic):
    bag = write_bag(
        tmp_path / 'bag', [*pictures(2), ('/odom', SECOND, odometry(SECOND, (0, 0, 0)))]
    )
    with pytest.raises(SourceError, match=f"no images on '{topic}'; image topics: /image"):
        open_source(bag, image_topic=topic)


def test_an_unknown_encoding_is_named(tmp_path):
    image = raw_image(SECOND, picture(), 'foo8')
    with pytest.raises(SourceError, match="'foo8'"):
        open_source(write_bag(tmp_path / 'bag', [('/image', SECOND, image)]))


def test_an_image_with_too_little_data_is_named(tmp_path):
    image = raw_image(SECOND, picture())
    image.data = image.data[:-1]
    with pytest.raises(SourceError, match='data has 125 bytes.*needs 126'):
        open_source(write_bag(tmp_path / 'bag', [('/image', SECOND, image)]))


@pytest.mark.parametrize('storage', ['sqlite3', 'mcap', 'ros1', 'zstd'])
@pytest.mark.parametrize('part', [0.0, 0.3, 0.8])
def test_a_bag_cut_short_is_one_line(tmp_path, storage, part):
    if storage == 'ros1':
        bag = file = write_ros1_bag(
            tmp_path / 'a.bag', [('/image', SECOND, raw_image(SECOND, picture(), store=NOETIC))]
        )
    else:
        packed = (CompressionMode.FILE, CompressionFormat.ZSTD) if storage == 'zstd' else None
        bag = write_bag(
            tmp_path / 'bag', pictures(40), 'mcap' if storage == 'mcap' else 'sqlite3', packed
        )
        (file,) = (f for f in bag.iterdir() if f.name != 'metadata.yaml')
    data = file.read_bytes()
    file.write_bytes(data[: int(part * len(data))])
    with pytest.raises(SourceError, match=f'{bag.name}.*damaged') as raised:
        list(open_source(bag))
    assert '\n' not in str(raised.value)


def test_random_damage_is_never_a_traceback(tmp_path):
    """Whatever bytes are wrong: all pictures with some pixels changed, or one line."""
    generator = np.random.default_rng(0)
    for storage in ('sqlite3', 'mcap'):
        bag = write_bag(tmp_path / storage, pictures(8), storage)
        for file in bag.iterdir():
            data = file.read_bytes()
            for _ in range(40):
                at = int(generator.integers(0, len(data) - 8))
                file.write_bytes(data[:at] + generator.bytes(8) + data[at + 8 :])
                try:
                    assert list(open_source(bag))
                except SourceError as error:
                    assert '\n' not in str(error) and storage in str(error)
            file.write_bytes(data)


def test_fps_is_refused_for_a_bag(tmp_path):
    with pytest.raises(SourceError, match='stamps of its own'):
        open_source(write_bag(tmp_path / 'bag', pictures(2)), fps=5)


def test_rosbags_missing_is_one_line(tmp_path, monkeypatch):
    bag = write_bag(tmp_path / 'bag', pictures(2))
    monkeypatch.setitem(sys.modules, 'rosbags.highlevel', None)
    with pytest.raises(SourceError, match='pip install rosbags'):
        open_source(bag)


@pytest.mark.parametrize(
    'make', [odometry, pose_stamped, pose_with_covariance_stamped, transform_stamped]
)
def test_ground_truth_is_found_by_its_name(tmp_path, make):
    messages = (
        pictures(2)
        + [('/odom', SECOND, odometry(SECOND, (9, 9, 9)))]
        + [('/ground_truth/pose', 0, make(stamp * SECOND, (stamp, 2, 3))) for stamp in (2, 1)]
    )
    track = read_pose_topic(write_bag(tmp_path / 'bag', messages))
    assert track.name.endswith(' /ground_truth/pose')
    assert track.stamps_ns.tolist() == [SECOND, 2 * SECOND]
    np.testing.assert_allclose(
        track.T[1], [[0, -1, 0, 2], [1, 0, 0, 2], [0, 0, 1, 3], [0, 0, 0, 1]], atol=1e-12
    )


def test_ground_truth_by_topic_or_none(tmp_path):
    bag = write_bag(
        tmp_path / 'bag', [*pictures(2), ('/odom', SECOND, odometry(SECOND, (9, 9, 9)))]
    )
    assert read_pose_topic(bag) is None
    assert read_pose_topic(bag, 'odom').T[0, 0, 3] == 9
    with pytest.raises(SourceError, match=r"no poses on '/image'; pose topics: /odom"):
        read_pose_topic(bag, '/image')


def transforms_bag(path):
    messages = [*pictures(2)]
    for stamp in (1, 2, 3):
        messages.append(
            (
                '/tf',
                stamp * SECOND,
                tf_message(
                    transform_stamped(stamp * SECOND, (stamp, 0, 0), 'base_link', 'odom'),
                    transform_stamped(stamp * SECOND, (0, stamp, 0), 'tool', 'base_link'),
                ),
            )
        )
    messages.append(
        ('/tf', 4 * SECOND, tf_message(transform_stamped(4 * SECOND, (4, 0, 0), 'base_link')))
    )
    return write_bag(path, messages)


def test_transforms_are_chosen_by_their_child_frame(tmp_path):
    bag = transforms_bag(tmp_path / 'bag')
    track = read_pose_topic(bag, '/tf', 'tool')
    assert track.body == 'tool'
    assert track.stamps_ns.tolist() == [SECOND, 2 * SECOND, 3 * SECOND]
    assert track.T[:, 1, 3].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ('frame', 'words'),
    [
        ('', 'choose one with --gt-frame: base_link, tool'),
        ('lidar', "no poses of the frame 'lidar'; its frames: base_link, tool"),
        ('base_link', "'base_link' in several parents: odom, world"),
    ],
)
def test_a_choice_of_frame_that_is_none_is_named(tmp_path, frame, words):
    with pytest.raises(SourceError, match=words):
        read_pose_topic(transforms_bag(tmp_path / 'bag'), '/tf', frame)


def test_types_that_only_the_bag_knows(tmp_path):
    """A type of the robot's maker lies between the images; its definition is in the bag."""
    definition = 'std_msgs/Header header\nfloat32[3] forces\n'
    store = get_typestore(Stores.ROS2_JAZZY)
    store.register(get_types_from_msg(definition, 'acme_msgs/msg/Forces'))
    writer = Writer(tmp_path / 'bag', version=9, storage_plugin=StoragePlugin.MCAP)
    with writer:
        forces = writer.add_connection('/forces', 'acme_msgs/msg/Forces', typestore=store)
        images = writer.add_connection('/image', 'sensor_msgs/msg/Image', typestore=store)
        message = store.types['acme_msgs/msg/Forces'](header(SECOND), np.zeros(3, np.float32))
        for topic, stamp, image in pictures(3):
            assert topic == '/image'
            writer.write(forces, stamp, store.serialize_cdr(message, 'acme_msgs/msg/Forces'))
            writer.write(images, stamp, store.serialize_cdr(image, 'sensor_msgs/msg/Image'))
    assert_reads_pictures(open_source(tmp_path / 'bag'), 3)
    with pytest.raises(SourceError, match=r'image topics: /image'):
        open_source(tmp_path / 'bag', '/forces')


def test_pictures_are_decoded_only_when_asked_for(tmp_path, monkeypatch):
    source = open_source(write_bag(tmp_path / 'bag', pictures(5)))
    decoded = []
    monkeypatch.setattr(type(source), '_rgb', lambda _, message: decoded.append(message))
    for stamp_ns, read in source.lazy():
        if stamp_ns == 7 * SECOND:
            read()
    assert len(decoded) == 1
