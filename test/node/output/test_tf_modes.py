"""Poses and transforms of each tf_mode, on a plain node of rclpy that is not being spun."""

import time
from types import SimpleNamespace

from fake_engine import FakeEngine
from lingbot_map.mapping.points import PointFilter
from lingbot_map.settings import ParameterError
from lingbot_map_ros.frame import Frame
from lingbot_map_ros.input.admission import Admission
from lingbot_map_ros.mapping.ledger import Ledger
from lingbot_map_ros.mapping.map_session import MapSession
from lingbot_map_ros.output.frames import FrameTree
from lingbot_map_ros.output.tf_modes import ImageTransform
from lingbot_map_ros.parameters import NodeParams
from node_rig import to_time
import numpy as np
import pytest
import rclpy
from tf2_msgs.msg import TFMessage
from tf2_ros import StaticTransformBroadcaster
from transforms import OPTICAL, product, stamped

WAIT_S = 60.0
RGB = np.full((42, 56, 3), 128, np.uint8)


@pytest.fixture
def node(ros):
    node = rclpy.create_node('lingbot_map')
    yield node
    node.destroy_node()


class Robot:
    """The transforms and maps of a node in a tf_mode; `sent` are the transforms for /tf."""

    def __init__(self, node, **values):
        self.params = NodeParams.from_values({'num_scale_frames': 1, **values})
        self.sent = []
        only_static = self.params.tf_mode == 'off'
        self._tree = FrameTree(node, self.params.map_frame, only_static)
        self.transform = ImageTransform(node, self._tree, self.params)
        self.transform._broadcaster = SimpleNamespace(sendTransform=self.sent.append)
        self._admission = Admission(self.params)

    def extrinsics(self, *xyz_xyzw):
        message = stamped('base_link', 'cam', 0.0, *xyz_xyzw)
        self._tree._listener.static_callback(TFMessage(transforms=[message]))

    def place(self, *stamps_s, frame_id='cam'):
        """Place images of a new map and send their transforms; return the placements."""
        counts, engine = Ledger(None).counts(), FakeEngine(self.params)
        session = MapSession(0, self.params, self._admission, counts, self._tree, None)
        placements = []
        for stamp_s in stamps_s:
            frame = Frame(None, to_time(stamp_s), frame_id, 0.0, session)
            (result,) = engine.push(RGB, frame)
            assert session.estimate_scale(frame, result) is None
            placements.append(session.place(result)[0])
            self.transform.send(frame, placements[-1])
        return placements


def test_no_transform_is_older_than_the_newest_until_time_jumps_back(node):
    robot = Robot(node, time_jump_threshold=2.0)
    robot.place(100.0, 101.0)
    robot.place(100.5, 101.0, 101.5)  # the first two were under way when a reset came
    robot.place(50.0, 51.0)  # the bag starts again
    expected = [to_time(stamp_s) for stamp_s in (100.0, 101.0, 101.5, 50.0, 51.0)]
    assert [transform.header.stamp for transform in robot.sent] == expected


def test_without_tf_only_static_transforms_are_received(node):
    tree = FrameTree(node, 'map', only_static=True)
    probe = rclpy.create_node('robot')
    message = stamped('base_link', 'cam', 0.0, (0.3, 0.0, 0.5))
    StaticTransformBroadcaster(probe).sendTransform(message)
    end_s = time.monotonic() + WAIT_S
    while 'cam' not in tree.parents:
        assert time.monotonic() < end_s
        rclpy.spin_once(node, timeout_sec=0.05)
    assert tree.extrinsics('base_link', 'cam')[:3, 3] == pytest.approx((0.3, 0, 0.5))
    assert node.count_subscribers('/tf') == 0
    probe.destroy_node()


@pytest.mark.parametrize('tf_mode', ['off', 'map_to_camera'])
def test_the_map_is_level_with_the_robot_whenever_the_mount_is_known(node, tf_mode):
    robot = Robot(node, tf_mode=tf_mode)
    robot.extrinsics((0.3, 0.0, 0.5), product((0.0, 0.6, 0.0, 0.8), OPTICAL))
    (placement,) = robot.place(1.0)
    assert placement.body_frame == 'cam'
    assert placement.body.T_map_body[:3, 3] == pytest.approx((0.3, 0, 0.5))


def test_a_point_ahead_of_the_camera_is_ahead_of_the_robot(node):
    robot = Robot(node, tf_mode='map_to_base', scale=1.000001)
    robot.extrinsics((0.0, 0.0, 0.0), OPTICAL)
    (placement,) = robot.place(1.0)
    assert placement.body_frame == 'base_link'
    middle = PointFilter()(placement.frame).reshape(42, 56)[21, 28]
    np.testing.assert_allclose([middle[axis] for axis in 'xyz'], (2, 0, 0), atol=1e-5)


@pytest.mark.parametrize('tf_mode', ['map_to_base', 'map_to_odom'])
def test_a_camera_whose_images_come_in_the_frame_of_the_robot_has_no_mount(node, tf_mode):
    robot = Robot(node, tf_mode=tf_mode, scale=2.0)
    robot.place(1.0, frame_id='base_link')
    assert "the images have the frame 'base_link' itself" in robot.transform.trouble
    assert not robot.sent


@pytest.mark.parametrize(
    ('values', 'words'),
    [
        ({'tf_mode': 'map_to_base', 'base_frame': '', 'scale': 2.0}, "'base_frame' is empty"),
        ({'tf_mode': 'map_to_odom', 'odom_frame': '/', 'scale': 2.0}, "'odom_frame' is empty"),
        ({'map_frame': '/map'}, "'map_frame' is '/map'"),
        ({'tf_mode': 'map_to_odom', 'odom_frame': 'map', 'scale': 2.0}, 'the same frame'),
        ({'tf_mode': 'map_to_base'}, "'scale'.*'scale_source'"),
        ({'tf_mode': 'map_to_odom'}, "'scale'.*'scale_source'"),
    ],
)
def test_modes_that_cannot_work_are_refused(values, words):
    with pytest.raises(ParameterError, match=words):
        NodeParams.from_values(values)


def test_frames_that_a_mode_does_not_use_need_no_name():
    NodeParams.from_values({'base_frame': '', 'odom_frame': ''})
    NodeParams.from_values({'tf_mode': 'map_to_odom', 'scale_source': 'odometry'})
