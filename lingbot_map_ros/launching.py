"""
What the launch files are made of: their arguments, the mapping node and RViz.

`ros2 launch` runs on the Python of ROS, which need not have torch: nothing here may import it.
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
# Name, default, description and, unless anything goes, choices.
_ARGUMENTS = (
    ('namespace', '', 'namespace of the node and its topics'),
    ('image', 'image', 'topic of the camera images; compressed ones are on IMAGE/compressed'),
    ('camera_info', 'camera_info', 'topic of the calibration'),
    ('odom', 'odom', 'topic of the odometry that the scale is taken from'),
    ('use_sim_time', 'false', 'take the time from /clock', _BOOLEANS),
    (
        'log_level',
        'info',
        'least severe messages to show',
        ('debug', 'info', 'warn', 'error', 'fatal'),
    ),
    ('respawn', 'true', 'start the node again 5 s after it has ended', _BOOLEANS),
    ('rviz', 'false', 'start RViz too', _BOOLEANS),
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
    """Return the path of a file that the package has installed in its share folder."""
    return PathJoinSubstitution([FindPackageShare(PACKAGE), *names])


def declare_arguments(defaults: Mapping[str, str]) -> list[DeclareLaunchArgument]:
    """Declare the arguments of the mapping node and RViz, some with other `defaults`."""
    return [
        DeclareLaunchArgument(
            'params_file',
            default_value=share_file('config', 'lingbot_map.yaml'),
            description='parameters of the node; config/ has some for common cases',
        ),
        *(_declare(name, '', _override_description(name)) for name in _OVERRIDES),
        *(
            _declare(name, defaults.get(name, default), *rest)
            for name, default, *rest in _ARGUMENTS
        ),
        DeclareLaunchArgument(
            'rviz_config',
            default_value=share_file('config', 'lingbot_map.rviz'),
            description='what RViz shows; its fixed frame is map_frame, if that is given',
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
    """Return the node, or another program with the same parameters, as the arguments have it."""
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
    """Return the parameters set by arguments; an empty argument leaves what params_file says."""
    given = {name: LaunchConfiguration(name).perform(context) for name in _OVERRIDES}
    return {name: _typed(name, text) for name, text in given.items() if text} | _sim_time()


def _typed(name: str, text: str) -> ParameterValue | int | float | str:
    """Return the value of a parameter: text stays text, or 'off' would become a truth value."""
    if isinstance(PARAMETERS[name].default, str):
        return ParameterValue(text, value_type=str)
    return yaml.safe_load(text)


def _sim_time() -> dict[str, ParameterValue]:
    return {'use_sim_time': ParameterValue(LaunchConfiguration('use_sim_time'), value_type=bool)}


def _image_remappings() -> list[tuple]:
    image = LaunchConfiguration('image')
    return [('image', image), ('image/compressed', [image, '/compressed'])]


def rviz_node(context: LaunchContext, **options) -> list[Node]:
    """Return RViz in the namespace of the mapping node, if it is asked for."""
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
