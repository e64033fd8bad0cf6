"""Checks the files in config/ against the node and against RViz of Jazzy."""

from pathlib import Path

from lingbot_map_ros.parameters import NodeParams, PARAMETERS
import pytest
import rclpy
from rclpy.parameter import Parameter
from rclpy.qos import (
    DurabilityPolicy,
    qos_check_compatible,
    QoSCompatibility,
    QoSProfile,
    ReliabilityPolicy,
)
import yaml

CONFIG = Path(__file__).parents[2] / 'config'
PRESETS = ('gpu_16gb', 'gpu_24gb', 'gpu_8gb', 'handheld', 'low_memory', 'robot_with_odom')
VIEW = yaml.safe_load((CONFIG / 'lingbot_map.rviz').read_text())['Visualization Manager']
TYPES = {
    'rviz_default_plugins/PointCloud2': 'sensor_msgs/msg/PointCloud2',
    'rviz_default_plugins/Path': 'nav_msgs/msg/Path',
    'rviz_default_plugins/Odometry': 'nav_msgs/msg/Odometry',
}
# Names as rviz_default_plugins 14 (Jazzy) declares them; every display has the first four.
COMMON = {'Class', 'Enabled', 'Name', 'Value'}
PROPERTIES = {
    'Grid': 'Alpha,Cell Size,Color,Line Style,Normal Cell Count,Offset,Plane,Plane Cell Count,'
    'Reference Frame',
    'TF': 'Filter (blacklist),Filter (whitelist),Frame Timeout,Frames,Marker Scale,Show Arrows,'
    'Show Axes,Show Names,Tree,Update Interval',
    'PointCloud2': 'Alpha,Autocompute Intensity Bounds,Autocompute Value Bounds,Axis,Channel Name,'
    'Color,Color Transformer,Decay Time,Invert Rainbow,Max Color,Max Intensity,Min Color,'
    'Min Intensity,Position Transformer,Selectable,Size (Pixels),Size (m),Style,Topic,'
    'Use Fixed Frame,Use rainbow',
    'Path': 'Alpha,Buffer Length,Color,Head Diameter,Head Length,Length,Line Style,Line Width,'
    'Offset,Pose Color,Pose Style,Radius,Shaft Diameter,Shaft Length,Topic',
    'Odometry': 'Angle Tolerance,Covariance,Keep,Position Tolerance,Shape,Topic',
    'Image': 'Max Value,Median window,Min Value,Normalize Range,Topic',
}
TOPIC = {'Depth', 'Durability Policy', 'History Policy', 'Reliability Policy', 'Value'}


def flat(tree, prefix=''):
    """Return {'points.stride': 2, ...} of nested mappings."""
    values = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            values |= flat(value, f'{prefix}{name}.')
        else:
            values[prefix + name] = value
    return values


def values_of(path):
    return flat(yaml.safe_load(path.read_text())['/**']['ros__parameters'])


@pytest.mark.parametrize('path', CONFIG.glob('*.yaml'), ids=lambda path: path.stem)
def test_every_parameter_file_fits(path):
    values = values_of(path)
    assert set(values) <= set(PARAMETERS)
    NodeParams.from_values(values)


@pytest.mark.parametrize('name', PRESETS)
def test_a_preset_says_why_it_changes_a_parameter(name):
    path = CONFIG / f'{name}.yaml'
    for parameter, value in values_of(path).items():
        assert value != PARAMETERS[parameter].default, f'{parameter} is the default'
    before = ''
    for line in path.read_text().partition('ros__parameters:\n')[2].splitlines():
        assert line.strip().startswith('#') or before.startswith('#'), f'no reason: {line}'
        before = line.strip()


def displays(*classes):
    return [d for d in VIEW['Displays'] if d['Class'] in classes]


def test_rviz_knows_every_display_and_property():
    for display in VIEW['Displays']:
        library, _, name = display['Class'].partition('/')
        assert library == 'rviz_default_plugins'
        assert set(display) - COMMON == set(PROPERTIES[name].split(','))
        if 'Topic' in display:
            assert set(display['Topic']) - {'Filter size'} == TOPIC


def qos_of(topic):
    return QoSProfile(
        depth=topic['Depth'],
        reliability=ReliabilityPolicy[topic['Reliability Policy'].upper().replace(' ', '_')],
        durability=DurabilityPolicy[topic['Durability Policy'].upper().replace(' ', '_')],
    )


def test_rviz_shows_what_the_node_publishes():
    from fake_engine import FakeEngine
    from lingbot_map_ros.node import LingbotMapNode

    rclpy.init()
    node = LingbotMapNode(FakeEngine, parameter_overrides=[Parameter('autostart', value=False)])
    try:
        node.trigger_configure()
        shown = displays(*TYPES)
        assert [d['Name'] for d in shown] == ['Map', 'Newest cloud', 'Path', 'Odometry']
        for display in shown:
            (publisher,) = node.get_publishers_info_by_topic('/' + display['Topic']['Value'])
            assert publisher.topic_type == TYPES[display['Class']]
            fits, reason = qos_check_compatible(publisher.qos_profile, qos_of(display['Topic']))
            assert fits != QoSCompatibility.ERROR, f'{display["Name"]}: {reason}'
            latched = publisher.qos_profile.durability == DurabilityPolicy.TRANSIENT_LOCAL
            assert latched == (display['Topic']['Durability Policy'] == 'Transient Local')
        frame = node.get_parameter('map_frame').value
        assert VIEW['Global Options']['Fixed Frame'] == frame
    finally:
        node.close(5.0)
        node.destroy_node()
        rclpy.shutdown()


def test_rviz_shows_images_of_either_transport():
    shown = {d['Topic']['Value']: d['Enabled'] for d in displays('rviz_default_plugins/Image')}
    assert shown == {'image': True, 'image/compressed': False}
