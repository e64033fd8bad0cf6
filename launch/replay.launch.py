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
    """Play a bag to the node and show in RViz what comes of it."""
    return LaunchDescription(
        [
            DeclareLaunchArgument('bag', description='rosbag2 to play, a folder or a file'),
            DeclareLaunchArgument(
                'rate',
                default_value='1.0',
                description='0 runs every image, one after the other, and nothing else of the '
                'bag; otherwise ros2 bag play plays all of it so many times as fast as it was '
                'recorded, with /clock, and the node takes images as on a robot',
            ),
            DeclareLaunchArgument(
                'bag_args', default_value='', description='more arguments for ros2 bag play'
            ),
            DeclareLaunchArgument(
                'out', default_value='', description='where rate 0 writes (results/NAME)'
            ),
            *declare_arguments({'use_sim_time': 'true', 'respawn': 'false', 'rviz': 'true'}),
            # Else many images and clouds are lost between the processes.
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
    """Return the actions for the rate that was asked for."""
    if LaunchConfiguration('rate').perform(context) in LOSSLESS:
        # The program sends decoded images, without a clock.
        fixed = {'image_transport': 'raw', 'use_sim_time': 'false', 'respawn': 'false'}
        context.launch_configurations.update(fixed)
        return [lossless_replay(context), *rviz(context)]
    node = mapping_node(context)
    play = OpaqueFunction(function=play_when_subscribed, args=[node])
    return [node, play, *rviz(context)]


def play_when_subscribed(context, node):
    """Start the bag when the node, which has a network to load, subscribes to images."""
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
    """Return ros2 bag play, which does not wait until others have discovered it."""
    rate = LaunchConfiguration('rate')
    bag = LaunchConfiguration('bag')
    options = ['--delay', DISCOVERY_S, '--clock', '100', '--disable-keyboard-controls']
    more = shlex.split(LaunchConfiguration('bag_args').perform(context))
    command = ['ros2', 'bag', 'play', bag, '--rate', rate, *options, *more]
    return ExecuteProcess(cmd=command, output='screen', on_exit=after_bag)


def after_bag(event, context):
    """End all if the bag could not be played; else leave the map for looking and saving."""
    return shutdown('ros2 bag play failed', context) if event.returncode else []


def shutdown(reason, context):
    """End all, unless that is under way: a second time launch takes for an error."""
    return [] if context.is_shutdown else [Shutdown(reason=reason)]


def lossless_replay(context):
    """Return the program that sends the next image only when the node is done with the last."""
    arguments = [LaunchConfiguration('bag').perform(context)]
    for option, name, default in (('--out', 'out', ''), ('--image-topic', 'image', 'image')):
        value = LaunchConfiguration(name).perform(context)
        if value != default:
            arguments += [option, value]
    return mapping_node(context, 'lingbot_map_replay', arguments)
