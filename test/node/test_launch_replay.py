"""Starts the replay of a small bag: every image, and where there is ros2 bag, in real time."""

from pathlib import Path
import shutil
import tempfile
import unittest

from bag_writer import raw_image, write_bag
from nav_msgs.msg import Odometry
import numpy as np
import pytest
import rclpy
from rclpy.wait_for_message import wait_for_message

try:
    from launch import LaunchDescription
    from launch.actions import IncludeLaunchDescription
    from launch_ros.substitutions import FindPackageShare
    import launch_testing
except ImportError:
    pytest.skip('launch_testing comes with a distribution of ROS', allow_module_level=True)

WAIT_S = 60.0
TOPIC = '/front/image_raw'
IMAGES = 30
FOLDER = tempfile.TemporaryDirectory()  # until the tests are over
RATES = ['0', '2'] if shutil.which('ros2') else ['0']


def noisy_bag(path):
    pixels = np.random.default_rng(0).integers(0, 256, (42, 56, 3), np.uint8)
    stamps_ns = [10**18 + i * 100_000_000 for i in range(IMAGES)]
    return write_bag(path, [(TOPIC, stamp, raw_image(stamp, pixels)) for stamp in stamps_ns])


@pytest.mark.launch_test
@launch_testing.parametrize('rate', RATES)
def generate_test_description(rate):
    folder = Path(FOLDER.name)
    path = [FindPackageShare('lingbot_map_ros'), '/launch/replay.launch.py']
    arguments = {
        'bag': str(noisy_bag(folder / f'bag_{rate}')),
        'rate': rate,
        'out': str(folder / 'out'),
        'image': TOPIC,
        'model': 'tiny',
        'checkpoint': 'random',
        'device': 'cpu',
        'rviz': 'false',
    }
    included = IncludeLaunchDescription(path, launch_arguments=arguments.items())
    return LaunchDescription(
        [included, launch_testing.util.KeepAliveProc(), launch_testing.actions.ReadyToTest()]
    )


class TestReplay(unittest.TestCase):
    def test_the_images_become_poses(self, proc_output, proc_info, rate):
        if rate == '0':
            words = f'{IMAGES} images sent, {IMAGES} poses, 0 lost'
            proc_output.assertWaitFor(words, stream='stdout', timeout=WAIT_S)
            proc_info.assertWaitForShutdown('lingbot_map_replay', timeout=WAIT_S)
        else:
            self.assertEqual(frame_of_a_pose(), 'map')


def frame_of_a_pose():
    """Wait for the node's odometry; return its frame id."""
    rclpy.init()
    probe = rclpy.create_node('probe')
    heard, message = wait_for_message(
        Odometry, probe, '/lingbot_map/odometry', time_to_wait=WAIT_S
    )
    probe.destroy_node()
    rclpy.shutdown()
    return message.header.frame_id if heard else 'none'


@launch_testing.post_shutdown_test()
class TestEnd(unittest.TestCase):
    def test_ctrl_c_ends_it_with_0(self, proc_info, rate):
        program = 'lingbot_map_replay' if rate == '0' else 'lingbot_map_node'
        launch_testing.asserts.assertExitCodes(proc_info, process=program)
