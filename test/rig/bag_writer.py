"""Small rosbag2 and ROS 1 bags for the tests, written by rosbags."""

import cv2
import numpy as np
from rosbags.rosbag1 import Writer as Ros1Writer
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import get_typestore, Stores

JAZZY = get_typestore(Stores.ROS2_JAZZY)
NOETIC = get_typestore(Stores.ROS1_NOETIC)


def header(stamp_ns, frame_id='cam7_optical', store=JAZZY):
    stamp = store.types['builtin_interfaces/msg/Time'](
        sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9
    )
    if store is NOETIC:
        return store.types['std_msgs/msg/Header'](seq=0, stamp=stamp, frame_id=frame_id)
    return store.types['std_msgs/msg/Header'](stamp=stamp, frame_id=frame_id)


def raw_image(stamp_ns, pixels, encoding='rgb8', padding=0, store=JAZZY):
    """Return an Image message of pixels (H, W, channels) with `padding` bytes after each row."""
    rows = pixels.reshape(len(pixels), -1)
    rows = np.pad(rows, ((0, 0), (0, padding)), constant_values=77)
    return store.types['sensor_msgs/msg/Image'](
        header=header(stamp_ns, store=store),
        height=pixels.shape[0],
        width=pixels.shape[1],
        encoding=encoding,
        is_bigendian=0,
        step=rows.shape[1],
        data=rows.ravel(),
    )


def compressed_image(stamp_ns, rgb, suffix='png'):
    ok, data = cv2.imencode(f'.{suffix}', rgb[..., ::-1])
    assert ok
    return JAZZY.types['sensor_msgs/msg/CompressedImage'](
        header=header(stamp_ns), format=suffix, data=data.ravel()
    )


def odometry(stamp_ns, xyz):
    types = JAZZY.types
    pose = types['geometry_msgs/msg/Pose'](
        position=types['geometry_msgs/msg/Point'](*map(float, xyz)),
        orientation=types['geometry_msgs/msg/Quaternion'](0.0, 0.0, np.sqrt(0.5), np.sqrt(0.5)),
    )
    zero = types['geometry_msgs/msg/Vector3'](0.0, 0.0, 0.0)
    return types['nav_msgs/msg/Odometry'](
        header=header(stamp_ns, 'world'),
        child_frame_id='body',
        pose=types['geometry_msgs/msg/PoseWithCovariance'](pose, np.zeros(36)),
        twist=types['geometry_msgs/msg/TwistWithCovariance'](
            types['geometry_msgs/msg/Twist'](zero, zero), np.zeros(36)
        ),
    )


def pose_stamped(stamp_ns, xyz):
    pose = odometry(stamp_ns, xyz).pose.pose
    return JAZZY.types['geometry_msgs/msg/PoseStamped'](header(stamp_ns, 'world'), pose)


def transform_stamped(stamp_ns, xyz, child='camera', parent='world'):
    pose, types = odometry(stamp_ns, xyz).pose.pose, JAZZY.types
    return types['geometry_msgs/msg/TransformStamped'](
        header(stamp_ns, parent),
        child,
        types['geometry_msgs/msg/Transform'](
            types['geometry_msgs/msg/Vector3'](*map(float, xyz)), pose.orientation
        ),
    )


def tf_message(*transforms):
    return JAZZY.types['tf2_msgs/msg/TFMessage'](list(transforms))


def pose_with_covariance_stamped(stamp_ns, xyz):
    message = odometry(stamp_ns, xyz)
    return JAZZY.types['geometry_msgs/msg/PoseWithCovarianceStamped'](
        header(stamp_ns, 'world'), message.pose
    )


def write_bag(path, messages, storage='sqlite3', compression=None):
    """Write (topic, time of recording, message) tuples as rosbag2 folder `path`."""
    writer = Writer(path, version=9, storage_plugin=StoragePlugin[storage.upper()])
    if compression:
        writer.set_compression(*compression)
    connections = {}
    with writer:
        for topic, recorded_ns, message in messages:
            msgtype = message.__msgtype__
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, msgtype, typestore=JAZZY)
            writer.write(connections[topic], recorded_ns, JAZZY.serialize_cdr(message, msgtype))
    return path


def write_ros1_bag(path, messages):
    """Write (topic, time of recording, message) tuples of NOETIC messages as bag `path`."""
    connections = {}
    with Ros1Writer(path) as writer:
        for topic, recorded_ns, message in messages:
            msgtype = message.__msgtype__
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, msgtype, typestore=NOETIC)
            writer.write(connections[topic], recorded_ns, NOETIC.serialize_ros1(message, msgtype))
    return path
