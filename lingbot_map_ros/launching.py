"""
Parts of the launch files: their arguments, the mapping node and RViz.

`ros2 launch` runs with the Python of ROS, which may have no torch: do not import it here.
"""

from __future__ import annotations

from collections.abc import Mapping

from launch import LaunchContext
from launch.actions import DeclareLaunchArgument
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import LifecycleNode, Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare
from lingbot_map_ros.parameters import PARAMETERS
import yaml

PACKAGE = 'lingbot_map_ros'
_BOOLEANS = ('true', 'false')
# Name, default, description and, if restricted, choices.
_ARGUMENTS = (
    ('namespace', '', 'namespace of the node and its topics'),
    ('image', 'image', 'topic of the camera images; compressed images are on IMAGE/compressed'),
    ('camera_info', 'camera_info', 'topic of the calibration'),
    ('odom', 'odom', 'topic of the odometry, for the scale'),
    ('use_sim_time', 'false', 'use the time from /clock', _BOOLEANS),
    (
        'log_level',
        'info',
        'lowest severity that is logged',
        ('debug', 'info', 'warn', 'error', 'fatal'),
    ),
    ('respawn', 'true', 'restart the node 5 s after it exits', _BOOLEANS),
    ('rviz', 'false', 'also start RViz', _BOOLEANS),
)
# Arguments that set the parameter of the same name.
_OVERRIDES = (
    'model',
    'checkpoint',
    'device',
    'image_transport',
    'tf_mode',
    'map_frame',
    'odom_frame',
    'base_frame',
    'scale',
    'scale_source',
)
_RESPAWN_DELAY_S = 5.0


def share_file(*names: str) -> PathJoinSubstitution:
    """Return the path of a file in the share folder of the package."""
    return PathJoinSubstitution([FindPackageShare(PACKAGE), *names])


def declare_arguments(defaults: Mapping[str, str]) -> list[DeclareLaunchArgument]:
    """Declare the arguments of the mapping node and RViz; `defaults` replaces some defaults."""
    return [
        DeclareLaunchArgument(
            'params_file',
            default_value=share_file('config', 'lingbot_map.yaml'),
            description='parameter file of the node; config/ has files for common cases',
        ),
        *(_declare(name, '', _override_description(name)) for name in _OVERRIDES),
        *(
            _declare(name, defaults.get(name, default), *rest)
            for name, default, *rest in _ARGUMENTS
        ),
        DeclareLaunchArgument(
            'rviz_config',
            default_value=share_file('config', 'lingbot_map.rviz'),
            description='configuration of RViz; if map_frame is given, it is the fixed frame',
        ),
    ]


def _declare(name: str, default: str, description: str, choices=None) -> DeclareLaunchArgument:
    if name in PARAMETERS and PARAMETERS[name].choices:
        choices = ('', *PARAMETERS[name].choices)
    return DeclareLaunchArgument(
        name, default_value=default, description=description, choices=choices
    )


def _override_description(name: str) -> str:
    return f'{PARAMETERS[name].description} Empty: as in params_file.'


def mapping_node(
    context: LaunchContext,
    executable: str = 'lingbot_map_node',
    arguments: list[str] | None = None,
) -> LifecycleNode:
    """Return the node, or another program with its parameters, set by the launch arguments."""
    value = LaunchConfiguration
    return LifecycleNode(
        package=PACKAGE,
        executable=executable,
        name='lingbot_map',
        namespace=value('namespace'),
        arguments=arguments or [],
        parameters=[value('params_file'), _overrides(context)],
        remappings=[
            *_image_remappings(),
            ('camera_info', value('camera_info')),
            ('odom', value('odom')),
        ],
        ros_arguments=['--log-level', value('log_level')],
        respawn=value('respawn'),
        respawn_delay=_RESPAWN_DELAY_S,
        output='screen',
    )


def _overrides(context: LaunchContext) -> dict[str, ParameterValue]:
    """Return the parameters set by arguments; for empty arguments params_file applies."""
    given = {name: LaunchConfiguration(name).perform(context) for name in _OVERRIDES}
    return {name: _typed(name, text) for name, text in given.items() if text} | _sim_time()


def _typed(name: str, text: str) -> ParameterValue | int | float | str:
    """Parse a parameter; strings are not parsed as YAML, where 'off' is a boolean."""
    if isinstance(PARAMETERS[name].default, str):
        return ParameterValue(text, value_type=str)
    return yaml.safe_load(text)


def _sim_time() -> dict[str, ParameterValue]:
    return {'use_sim_time': ParameterValue(LaunchConfiguration('use_sim_time'), value_type=bool)}


def _image_remappings() -> list[tuple]:
    image = LaunchConfiguration('image')
    return [('image', image), ('image/compressed', [image, '/compressed'])]


def rviz_node(context: LaunchContext, **options) -> list[Node]:
    """Return RViz in the namespace of the mapping node, or nothing without rviz:=true."""
    value = LaunchConfiguration
    if value('rviz').perform(context) != 'true':
        return []
    map_frame = value('map_frame').perform(context)
    return [
        Node(
            package='rviz2',
            executable='rviz2',
            name='rviz2',
            namespace=value('namespace'),
            arguments=['-d', value('rviz_config'), *(['-f', map_frame] if map_frame else [])],
            parameters=[_sim_time()],
            remappings=_image_remappings(),
            output='screen',
            **options,
        )
    ]
