"""Starts the launch file as a bringup does: included, with arguments, in a namespace."""

import unittest

import pytest
import rclpy
from rclpy.parameter import parameter_value_to_python
from rclpy.parameter_client import AsyncParameterClient

try:
    from launch import LaunchDescription
    from launch.actions import GroupAction, IncludeLaunchDescription
    from launch_ros.actions import PushRosNamespace
    from launch_ros.substitutions import FindPackageShare
    import launch_testing
except ImportError:
    pytest.skip('launch_testing comes with a distribution of ROS', allow_module_level=True)

WAIT_S = 60.0
ARGUMENTS = {
    'model': 'tiny',
    'checkpoint': 'random',
    'device': 'cpu',
    'image': '/front/image_raw',
    'tf_mode': 'off',
    'scale': '2',
    'map_frame': 'hall',
    'respawn': 'false',
}
EXPECTED = {'model': 'tiny', 'tf_mode': 'off', 'scale': 2, 'map_frame': 'hall', 'image_width': 0}


@pytest.mark.launch_test
def generate_test_description():
    path = [FindPackageShare('lingbot_map_ros'), '/launch/lingbot_map.launch.py']
    included = IncludeLaunchDescription(path, launch_arguments=ARGUMENTS.items())
    bringup = GroupAction([PushRosNamespace('robot1'), included])
    return LaunchDescription([bringup, launch_testing.actions.ReadyToTest()])


class TestNode(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        rclpy.init()
        cls.probe = rclpy.create_node('probe')

    @classmethod
    def tearDownClass(cls):
        cls.probe.destroy_node()
        rclpy.shutdown()

    def test_it_waits_for_the_images_of_the_topic(self, proc_output):
        proc_output.assertWaitFor('waiting for images on /front/image_raw', timeout=WAIT_S)

    def test_arguments_are_parameters_and_empty_ones_leave_the_file(self):
        client = AsyncParameterClient(self.probe, '/robot1/lingbot_map')
        self.assertTrue(client.wait_for_services(WAIT_S))
        answer = client.get_parameters(list(EXPECTED))
        rclpy.spin_until_future_complete(self.probe, answer, timeout_sec=WAIT_S)
        values = [parameter_value_to_python(v) for v in answer.result().values]
        self.assertEqual(dict(zip(EXPECTED, values, strict=True)), EXPECTED)


@launch_testing.post_shutdown_test()
class TestEnd(unittest.TestCase):
    def test_ctrl_c_ends_it_with_0(self, proc_info):
        launch_testing.asserts.assertExitCodes(proc_info)
