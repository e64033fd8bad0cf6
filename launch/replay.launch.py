import shlex

from launch import LaunchDescription
from launch.actions import (
    DeclareLaunchArgument,
    ExecuteProcess,
    OpaqueFunction,
    SetEnvironmentVariable,
    Shutdown,
    TimerAction,
)
from launch.substitutions import EnvironmentVariable, LaunchConfiguration
from launch_ros.ros_adapters import get_ros_node
from lingbot_map_ros.launching import declare_arguments, mapping_node, rviz_node, share_file
from rclpy.node import NodeNameNonExistentError

LOSSLESS = ('0', '0.0')
IMAGE_TYPES = {'sensor_msgs/msg/Image', 'sensor_msgs/msg/CompressedImage'}
POLL_S = 0.5
DISCOVERY_S = '3'
PROFILE = 'FASTRTPS_DEFAULT_PROFILES_FILE'


def generate_launch_description():
    """Play a bag to the node and show the map in RViz."""
    return LaunchDescription(
        [
            DeclareLaunchArgument('bag', description='rosbag2 to play (folder or file)'),
            DeclareLaunchArgument(
                'rate',
                default_value='1.0',
                description='0: process every image of the bag, as fast as possible, and no '
                'other topic. Otherwise: play the whole bag at this multiple of real time with '
                'ros2 bag play and /clock; the node drops images as on a robot',
            ),
            DeclareLaunchArgument(
                'bag_args', default_value='', description='additional arguments of ros2 bag play'
            ),
            DeclareLaunchArgument(
                'out', default_value='', description='output folder of rate 0 (results/NAME)'
            ),
            *declare_arguments({'use_sim_time': 'true', 'respawn': 'false', 'rviz': 'true'}),
            # Without it, many images and clouds are lost between processes.
            SetEnvironmentVariable(
                PROFILE,
                EnvironmentVariable(
                    PROFILE, default_value=share_file('config', 'fastdds_large_messages.xml')
                ),
            ),
            OpaqueFunction(function=start),
        ]
    )


def start(context):
    """Return the actions for the given rate."""
    if LaunchConfiguration('rate').perform(context) in LOSSLESS:
        # The replay program sends raw images and no clock.
        fixed = {'image_transport': 'raw', 'use_sim_time': 'false', 'respawn': 'false'}
        context.launch_configurations.update(fixed)
        return [lossless_replay(context), *rviz(context)]
    node = mapping_node(context)
    play = OpaqueFunction(function=play_when_subscribed, args=[node])
    return [node, play, *rviz(context)]


def play_when_subscribed(context, node):
    """Start the bag when the node has loaded its network and subscribes to images."""
    if subscribes_to_images(get_ros_node(context), node.node_name):
        return [bag_player(context)]
    again = OpaqueFunction(function=play_when_subscribed, args=[node])
    return [TimerAction(period=POLL_S, actions=[again])]


def subscribes_to_images(observer, node_name):
    namespace, _, name = node_name.rpartition('/')
    try:
        topics = observer.get_subscriber_names_and_types_by_node(name, namespace or '/')
    except NodeNameNonExistentError:  # not yet
        return False
    return any(IMAGE_TYPES & set(types) for _, types in topics)


def rviz(context):
    return rviz_node(context, on_exit=after_rviz)


def after_rviz(_event, context):
    return shutdown('RViz was closed', context)


def bag_player(context):
    """Return ros2 bag play, with a delay for discovery, since it does not wait for that."""
    rate = LaunchConfiguration('rate')
    bag = LaunchConfiguration('bag')
    options = ['--delay', DISCOVERY_S, '--clock', '100', '--disable-keyboard-controls']
    more = shlex.split(LaunchConfiguration('bag_args').perform(context))
    command = ['ros2', 'bag', 'play', bag, '--rate', rate, *options, *more]
    return ExecuteProcess(cmd=command, output='screen', on_exit=after_bag)


def after_bag(event, context):
    """Shut down if the bag cannot be played; else keep the node running with its map."""
    return shutdown('ros2 bag play failed', context) if event.returncode else []


def shutdown(reason, context):
    """Shut down once; launch treats a second Shutdown as an error."""
    return [] if context.is_shutdown else [Shutdown(reason=reason)]


def lossless_replay(context):
    """Return the replay program, which sends an image when the previous one is processed."""
    arguments = [LaunchConfiguration('bag').perform(context)]
    for option, name, default in (('--out', 'out', ''), ('--image-topic', 'image', 'image')):
        value = LaunchConfiguration(name).perform(context)
        if value != default:
            arguments += [option, value]
    return mapping_node(context, 'lingbot_map_replay', arguments)
