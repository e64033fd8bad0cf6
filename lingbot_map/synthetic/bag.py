"""Write a rendered clip as a rosbag2 recording (mcap) with ground truth, without ROS."""

import importlib.util
import io
from pathlib import Path
import shutil

from lingbot_map.errors import UserError
from lingbot_map.geometry import matrix_to_quaternion
from lingbot_map.synthetic.rendering import Clip
import numpy as np
from PIL import Image
import torch

WORLD_FRAME = 'room'  # z up
CAMERA_FRAME = 'camera_optical_frame'
JPEG_QUALITY = 45
_FIRST_STAMP_NS = 1_700_000_000 * 10**9
_PERIOD_NS = 10**8
_IMAGE_TOPIC, _INFO_TOPIC, _TRUTH_TOPIC = (
    '/camera/image/compressed',
    '/camera/camera_info',
    '/ground_truth',
)


def write_sample_bag(path: Path, clip: Clip) -> None:
    """
    Write the first room of the clip at 10 Hz: JPEG images, camera_info, ground truth.

    Ground truth (Odometry) is the pose of the camera's optical frame in the room (z up). The bag
    is written to a temporary folder, which is then renamed.

    :raises UserError: the path exists, its parent does not, or rosbags is not installed.
    """
    check_target(path)
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import get_typestore, Stores

    store = get_typestore(Stores.ROS2_JAZZY)
    partial = path.with_name(f'.{path.name}.part')
    shutil.rmtree(partial, ignore_errors=True)
    with Writer(partial, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        connections = {
            topic: writer.add_connection(topic, message_type, typestore=store)
            for topic, message_type in (
                (_IMAGE_TOPIC, 'sensor_msgs/msg/CompressedImage'),
                (_INFO_TOPIC, 'sensor_msgs/msg/CameraInfo'),
                (_TRUTH_TOPIC, 'nav_msgs/msg/Odometry'),
            )
        }
        for frame in range(clip.rgb.shape[1]):
            stamp_ns = _FIRST_STAMP_NS + frame * _PERIOD_NS
            for topic, message in _messages(store.types, clip, frame, stamp_ns).items():
                connection = connections[topic]
                writer.write(
                    connection, stamp_ns, store.serialize_cdr(message, connection.msgtype)
                )
    _rename(partial, path)


def check_target(path: Path) -> None:
    """Raise UserError if no bag can be written to `path`."""
    if importlib.util.find_spec('rosbags') is None:
        raise UserError("the package 'rosbags' is not installed: pip install rosbags")
    if path.exists():
        raise UserError(f"'{path}' already exists: choose another folder or remove it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"'{path.parent}' is not a folder: create it first")


def _rename(partial, path):
    # The file name and metadata.yaml contain the folder's name.
    metadata = (partial / 'metadata.yaml').read_text()
    (partial / 'metadata.yaml').write_text(metadata.replace(partial.name, path.name))
    (partial / f'{partial.name}.mcap').rename(partial / f'{path.name}.mcap')
    partial.rename(path)


def _messages(types, clip, frame, stamp_ns):
    stamp = types['builtin_interfaces/msg/Time'](sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9)

    def header(frame_id):
        return types['std_msgs/msg/Header'](stamp=stamp, frame_id=frame_id)

    image = types['sensor_msgs/msg/CompressedImage'](
        header=header(CAMERA_FRAME),
        format='rgb8; jpeg compressed bgr8',
        data=np.frombuffer(_jpeg(clip.rgb[0, frame]), np.uint8),
    )
    return {
        _IMAGE_TOPIC: image,
        _INFO_TOPIC: _camera_info(types, header(CAMERA_FRAME), clip, frame),
        _TRUTH_TOPIC: _odometry(types, header(WORLD_FRAME), clip.T_world_cam[0, frame].double()),
    }


def _jpeg(rgb):
    buffer = io.BytesIO()
    image = Image.fromarray(rgb.permute(1, 2, 0).contiguous().cpu().numpy())
    image.save(buffer, 'JPEG', quality=JPEG_QUALITY, optimize=True)
    return buffer.getvalue()


def _camera_info(types, header, clip, frame):
    K = clip.K[0, frame].double().cpu().numpy()
    height, width = clip.rgb.shape[-2:]
    return types['sensor_msgs/msg/CameraInfo'](
        header=header,
        height=height,
        width=width,
        distortion_model='plumb_bob',
        d=np.zeros(5),
        k=K.flatten(),
        r=np.eye(3).flatten(),
        p=np.hstack((K, np.zeros((3, 1)))).flatten(),
        binning_x=0,
        binning_y=0,
        roi=types['sensor_msgs/msg/RegionOfInterest'](
            x_offset=0, y_offset=0, height=0, width=0, do_rectify=False
        ),
    )


def _odometry(types, header, T_room_cam: torch.Tensor):
    vector = types['geometry_msgs/msg/Vector3']
    x, y, z, w = matrix_to_quaternion(T_room_cam[:3, :3]).tolist()
    pose = types['geometry_msgs/msg/Pose'](
        position=types['geometry_msgs/msg/Point'](
            **dict(zip('xyz', T_room_cam[:3, 3].tolist(), strict=True))
        ),
        orientation=types['geometry_msgs/msg/Quaternion'](x=x, y=y, z=z, w=w),
    )
    twist = types['geometry_msgs/msg/Twist'](
        linear=vector(x=0, y=0, z=0), angular=vector(x=0, y=0, z=0)
    )
    # The twist is unknown, hence the large covariance.
    unknown = np.diag(np.full(6, 1e6)).flatten()
    return types['nav_msgs/msg/Odometry'](
        header=header,
        child_frame_id=CAMERA_FRAME,
        pose=types['geometry_msgs/msg/PoseWithCovariance'](pose=pose, covariance=np.zeros(36)),
        twist=types['geometry_msgs/msg/TwistWithCovariance'](twist=twist, covariance=unknown),
    )
