import shlex

from launch import LaunchDescription
from launch.actions import (
    DeclareLaunchArgument,
    ExecuteProcess,
    OpaqueFunction,
    RegisterEventHandler,
    SetEnvironmentVariable,
    Shutdown,
)
from launch.substitutions import EnvironmentVariable, LaunchConfiguration
from launch_ros.event_handlers import OnStateTransition
from launch_ros.events.lifecycle import StateTransition
from lifecycle_msgs.msg import State
from lingbot_map_ros.launching import declare_arguments, mapping_node, rviz_node, share_file

LOSSLESS = ('0', '0.0')
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
    bag_after_start = OnStateTransition(
        # By id: rclpy leaves the labels of this message empty.
        matcher=lambda event: (
            isinstance(event, StateTransition)
            and event.action == node
            and event.msg.goal_state.id == State.PRIMARY_STATE_ACTIVE
        ),
        entities=[bag_player(context)],
        handle_once=True,
    )
    return [RegisterEventHandler(bag_after_start), node, *rviz(context)]


def rviz(context):
    return rviz_node(context, on_exit=Shutdown(reason='RViz was closed'))


def bag_player(context):
    """Return ros2 bag play, to be started when somebody listens."""
    more = shlex.split(LaunchConfiguration('bag_args').perform(context))
    bag = LaunchConfiguration('bag')
    rate = LaunchConfiguration('rate')
    clock = ['--clock', '100', '--rate', rate, '--disable-keyboard-controls']
    command = ['ros2', 'bag', 'play', bag, *clock, *more]
    return ExecuteProcess(cmd=command, output='screen', on_exit=after_bag)


def after_bag(event, _context):
    """End all if the bag could not be played; else leave the map for looking and saving."""
    return [Shutdown(reason='ros2 bag play failed')] if event.returncode else []


def lossless_replay(context):
    """Return the program that sends the next image only when the node is done with the last."""
    arguments = [LaunchConfiguration('bag').perform(context)]
    for option, name, default in (('--out', 'out', ''), ('--image-topic', 'image', 'image')):
        value = LaunchConfiguration(name).perform(context)
        if value != default:
            arguments += [option, value]
    return mapping_node(context, 'lingbot_map_replay', arguments)
