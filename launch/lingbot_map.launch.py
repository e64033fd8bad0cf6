from launch import LaunchDescription
from launch.actions import OpaqueFunction
from lingbot_map_ros.launching import declare_arguments, mapping_node, rviz_node


def generate_launch_description():
    """Start the node; it configures and activates itself (parameter autostart)."""
    return LaunchDescription([*declare_arguments({}), OpaqueFunction(function=start)])


def start(context):
    """Return the node and, with rviz:=true, RViz."""
    return [mapping_node(context), *rviz_node(context)]
