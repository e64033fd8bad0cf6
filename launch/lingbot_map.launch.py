from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, OpaqueFunction
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

# Name, default, description.
ARGUMENTS = [
    ('namespace', '', 'namespace of the node and its topics'),
    ('image', 'image', 'topic of the camera images'),
    ('camera_info', 'camera_info', 'topic of the calibration'),
    ('model', '', 'network preset; empty: as in params_file'),
    ('checkpoint', '', 'weights, a path or hf:owner/name/file; empty: as in params_file'),
    ('use_sim_time', 'false', 'take the time from /clock'),
    ('log_level', 'info', 'debug, info, warn, error or fatal'),
    ('respawn', 'true', 'start the node again 5 s after it has ended'),
]


def generate_launch_description():
    """Start the node; it configures and activates itself (parameter autostart)."""
    params_file = PathJoinSubstitution(
        [FindPackageShare('lingbot_map_ros'), 'config', 'lingbot_map.yaml']
    )
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                'params_file', default_value=params_file, description='parameters of the node'
            ),
            *(
                DeclareLaunchArgument(name, default_value=default, description=description)
                for name, default, description in ARGUMENTS
            ),
            OpaqueFunction(function=start_node),
        ]
    )


def start_node(context):
    """Return the node with its arguments; what was left empty does not override params_file."""
    value = LaunchConfiguration
    given = {name: value(name).perform(context) for name in ('model', 'checkpoint')}
    overrides = {
        name: ParameterValue(text, value_type=str) for name, text in given.items() if text
    }
    overrides['use_sim_time'] = ParameterValue(value('use_sim_time'), value_type=bool)
    node = Node(
        package='lingbot_map_ros',
        executable='lingbot_map_node',
        name='lingbot_map',
        namespace=value('namespace'),
        parameters=[value('params_file'), overrides],
        remappings=[
            ('image', value('image')),
            ('image/compressed', [value('image'), '/compressed']),
            ('camera_info', value('camera_info')),
        ],
        ros_arguments=['--log-level', value('log_level')],
        respawn=value('respawn'),
        respawn_delay=5.0,
        output='screen',
    )
    return [node]
