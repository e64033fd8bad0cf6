"""The table of parameters and everything that is made from it."""

from dataclasses import fields
from pathlib import Path

from lingbot_map.config import PRESET_IMAGE_WIDTH
from lingbot_map.settings import ParameterError, stream_config, StreamConfig
from lingbot_map_ros.parameters import (
    as_markdown,
    as_yaml,
    check_overrides,
    declare_params,
    main,
    NodeParams,
    PARAMETERS,
    read_params,
    refusals,
)
import pytest
import rclpy
from rclpy.parameter import Parameter
import yaml

CONFIG = Path(__file__).parents[2] / 'config' / 'lingbot_map.yaml'


def flat(tree, prefix=''):
    """Return {'points.stride': 2, ...} of nested mappings."""
    values = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            values |= flat(value, f'{prefix}{name}.')
        else:
            values[prefix + name] = value
    return values


def test_the_parameter_file_is_up_to_date():
    assert CONFIG.read_text() == as_yaml(), (
        'run: python3 -m lingbot_map_ros.parameters --yaml > config/lingbot_map.yaml'
    )


def test_the_parameter_file_holds_every_default_with_its_type():
    values = flat(yaml.safe_load(CONFIG.read_text())['/**']['ros__parameters'])
    assert values == {name: spec.default for name, spec in PARAMETERS.items()}
    assert [type(v) for v in values.values()] == [type(s.default) for s in PARAMETERS.values()]


def test_the_commands_print_both_texts(capsys):
    assert main(['--yaml']) == 0
    assert capsys.readouterr().out == as_yaml()
    assert main(['--markdown']) == 0
    assert capsys.readouterr().out == as_markdown()


def test_the_table_has_a_row_of_six_cells_for_each_parameter():
    rows = as_markdown().splitlines()[2:]
    assert [row.split('`')[1] for row in rows] == list(PARAMETERS)
    for row in rows:
        assert row.replace(r'\|', '').count('|') == 7


def test_defaults_are_valid_and_reach_their_fields():
    params = NodeParams.from_values({name: spec.default for name, spec in PARAMETERS.items()})
    assert params == NodeParams()
    assert NodeParams.from_values({'points.stride': 3}).points.stride == 3


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('queue', 'fifo'),
        ('keyframe_interval', 0),
        ('keyframe_interval', 1.5),
        ('keyframe_interval', True),
        ('image_width', 500),
        ('scale', 0.0),
        ('scale', float('nan')),
        ('scale', float('inf')),
        ('scale', 'metres'),
        ('autostart', 1),
        ('points.min_confidence', -0.1),
        ('compile_mode', 'fastest'),
        ('map_frame', ''),
        ('checkpoint', None),
    ],
)
def test_a_wrong_value_is_named_with_its_parameter(name, value):
    with pytest.raises(ParameterError) as caught:
        NodeParams.from_values({name: value})
    text = str(caught.value)
    assert f"'{name}'" in text
    assert '\n' not in text
    if value != '':
        assert repr(value) in text


def test_values_that_only_look_wrong_are_taken():
    params = NodeParams.from_values({'scale': 2, 'tf_mode': False, 'compile_mode': False})
    assert (params.scale, type(params.scale)) == (2.0, float)
    assert (params.tf_mode, params.compile_mode) == ('off', 'off')  # unquoted in YAML


@pytest.mark.parametrize(
    ('values', 'told'),
    [
        ({'max_keyframes': 4, 'num_scale_frames': 5}, "'max_keyframes' is 4.*scale_frames .5.*r"),
        (
            {'max_keyframes': 19, 'overlap_keyframes': 8, 'num_scale_frames': 12},
            "'max_keyframes' is 19;.*'overlap_keyframes' 8 .* 12 .* at least 20: raise it, or set",
        ),
    ],
)
def test_settings_of_the_memory_must_go_together(values, told):
    with pytest.raises(ParameterError, match=told) as caught:
        NodeParams.from_values(values)
    assert str(caught.value).startswith("parameter '") and '\n' not in str(caught.value)


def test_only_rolling_over_needs_room_for_an_overlap():
    values = {'max_keyframes': 20, 'overlap_keyframes': 8, 'num_scale_frames': 12}
    assert NodeParams.from_values(values).on_limit == 'roll_over'
    values |= {'max_keyframes': 12, 'on_limit': 'stop'}
    assert NodeParams.from_values(values).max_keyframes == 12


def test_parameters_of_the_stream_reach_the_engine_and_have_the_defaults_of_the_library():
    names = {item.name for item in fields(StreamConfig)} - {'image_width'}  # 0: the model's own
    assert (StreamConfig().motion_gate, PARAMETERS['motion_gate'].default) == (False, True)
    for name in names - {'motion_gate'}:
        assert PARAMETERS[name].default == getattr(StreamConfig(), name), name
    values = {'num_scale_frames': 3, 'sliding_window': 5, 'max_keyframes': 31, 'model': 'tiny'} | {
        'on_limit': 'reset', 'overlap_keyframes': 6, 'keyframe_policy': 'flow',
        'keyframe_interval': 4, 'flow_threshold': 7.5, 'max_non_keyframe_gap': 11,
        'motion_gate': False, 'motion_threshold': 0.7}  # fmt: skip
    config = stream_config(NodeParams.from_values(values))
    assert {name: getattr(config, name) for name in names} | {'model': 'tiny'} == values
    assert config.image_width == PRESET_IMAGE_WIDTH['tiny']


def test_a_misspelt_name_is_reported_with_the_likely_one():
    warnings = check_overrides(
        {'keyframe_intervall': 2, 'use_sim_time': True, 'qos_overrides./image.x': 1, 'scale': 1}
    )
    assert len(warnings) == 1
    assert "'keyframe_intervall'" in warnings[0]
    assert "'keyframe_interval'" in warnings[0]


def test_a_wrong_value_given_at_start_is_found():
    with pytest.raises(ParameterError, match="'points.stride' is 0"):
        check_overrides({'points.stride': 0})


@pytest.mark.parametrize(
    ('name', 'value', 'told'),
    [
        ('expected_frames', 0, "'expected_frames' was removed: set 'keyframe_interval' to"),
        ('keyframe_policy', 'auto', "'keyframe_policy: auto' was removed: use 'interval' and set"),
    ],
)
def test_what_was_removed_is_refused_at_start_with_its_replacement(name, value, told):
    with pytest.raises(ParameterError, match=told) as caught:
        check_overrides({'scale': 1.0, name: value})
    assert '\n' not in str(caught.value)
    assert check_overrides({'keyframe_policy': 'interval'}) == []


def test_only_settable_parameters_may_change_while_running():
    settable = {
        'keyframe_interval',
        'points.min_confidence',
        'points.max_depth',
        'points.keep_percentile',
        'points.edge_threshold',
        'points.stride',
        'points.every_frame',
        'path.publish_rate',
        'tf_rate',
        'map.publish_rate',
    }
    assert {name for name in PARAMETERS if not refusals([name])} == settable
    assert 'cleanup' in refusals(['scale'])[0]


def test_a_node_declares_them_with_ranges_and_reads_them_back():
    context = rclpy.Context()
    rclpy.init(context=context)
    node = rclpy.create_node(
        'declares', context=context, parameter_overrides=[Parameter('scale', value=3)]
    )
    try:
        declare_params(node)
        assert read_params(node) == NodeParams(scale=3.0)
        stride = node.describe_parameter('points.stride')
        assert (stride.integer_range[0].from_value, stride.integer_range[0].to_value) == (1, 64)
        assert 'px' in stride.description
        assert 'lossless' in node.describe_parameter('queue').additional_constraints
    finally:
        node.destroy_node()
        rclpy.shutdown(context=context)
