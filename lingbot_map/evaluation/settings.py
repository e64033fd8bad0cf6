"""
Everything that decides what an evaluation gives: names, ranges, defaults, files.

Settings of the network and of the map are the node's parameters of the same names. A setting is a
flag `--like-this` on the command line and a line of run.yaml.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
import math
from pathlib import Path

from lingbot_map.errors import UserError
from lingbot_map.evaluation.exports import FORMS
from lingbot_map_ros.parameter_spec import ParameterError, Spec, Value
from lingbot_map_ros.parameters import PARAMETERS
import yaml

_OF_THE_NODE = (
    'model',
    'checkpoint',
    'device',
    'dtype',
    'heads_dtype',
    'compile_mode',
    'attention_backend',
    'image_width',
    'image_rotation',
    'image_mask',
    'image_rectified',
    'use_camera_info',
    'num_scale_frames',
    'sliding_window',
    'max_keyframes',
    'on_limit',
    'overlap_keyframes',
    'keyframe_policy',
    'flow_threshold',
    'max_non_keyframe_gap',
    'scale',
    'points.min_confidence',
    'points.max_depth',
    'points.keep_percentile',
    'points.edge_threshold',
    'points.stride',
    'map.voxel_size',
    'map.max_points',
)
# fmt: off
_OWN = {
    'keyframe_interval': Spec(
        0, 'Every n-th frame after the scale frames is kept; 0 takes the smallest n with which '
        'the whole recording fits into max_keyframes, as with keyframe_policy auto; with a '
        'smaller one the memory rolls over. For keyframe_policy interval.', low=0, high=1000),
    'image_topic': Spec('', 'Image topic of the bag; empty takes the only one.'),
    'camera_info': Spec(
        '', 'CameraInfo topic of the bag, whose distortion is removed; empty takes the one beside '
        'the image topic, if any; none.'),
    'fps': Spec(0.0, "Rate of an image folder's stamps (0: 10 Hz; 7-Scenes: 30 Hz), or frames to "
                'take per second of a video (0: all).', unit='Hz', low=0.0, high=1000.0),
    'every': Spec(1, 'Take every n-th image.', low=1, high=100000),
    'start': Spec(0.0, 'Leave out so much at the beginning.', unit='s', low=0.0, high=1e7),
    'duration': Spec(0.0, 'Take so much after that; 0 takes all.', unit='s', low=0.0, high=1e7),
    'max_frames': Spec(0, 'Stop after so many images; 0 takes all.', low=0, high=10**8),
    'ground_truth': Spec(
        '', 'Pose topic of the bag, or TUM, KITTI or EuRoC file; none; empty takes what comes '
        'with the recording.'),
    'gt_frame': Spec('', 'Child frame of the pose to take, when ground truth is a tf topic.'),
    'gt_offset': Spec(0.0, 'Added to the stamps of the ground truth.', unit='s',
                      low=-2e9, high=2e9),
    'tolerance': Spec(0.02, 'Greatest difference between the stamps of an image and its true '
                      'pose.', unit='s', low=0.0, high=10.0),
    'depth': Spec('off', 'Also write the depth of every keyframe.', choices=FORMS),
    'colmap': Spec(False, 'Also write a COLMAP text model with the keyframes.'),
}
# fmt: on
SPECS: dict[str, Spec] = {name: PARAMETERS[name] for name in _OF_THE_NODE} | _OWN
LISTS = {  # name -> (type, number of values, default, description)
    'body_to_camera': (
        float,
        7,
        [],
        "Where the camera's optical frame is on the body that the ground truth tells about.",
    ),
    'rpe_frames': (int, '+', [1, 10], 'Steps in frames for the relative error.'),
    'rpe_metres': (float, '+', [1.0, 10.0, 100.0], 'Lengths for the relative error.'),
}
_REFUSED_MODES = ('max-autotune',)  # picks kernels by their speed, so two runs may differ


class SettingsError(UserError):
    """Say in one line which setting or file is wrong, and what would be right."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting; one that is not given is absent from the result."""
    for name, spec in SPECS.items():
        unit = f' [{spec.unit}]' if spec.unit else ''
        options = {'default': argparse.SUPPRESS, 'dest': name}
        options['help'] = f'{spec.description}{unit} ({_shown(spec.default)})'.replace('%', '%%')
        if isinstance(spec.default, bool):
            options['action'] = 'store_true'
        else:
            options |= {'type': type(spec.default), 'metavar': _metavar(spec)}
        parser.add_argument(flag(name), **options)
    for name, (kind, count, default, description) in LISTS.items():
        shown = ' '.join(map(str, default)) or 'the same frame'
        metavar = ('X', 'Y', 'Z', 'QX', 'QY', 'QZ', 'QW') if count == 7 else 'N'
        parser.add_argument(
            flag(name),
            dest=name,
            type=kind,
            nargs=count,
            metavar=metavar,
            default=argparse.SUPPRESS,
            help=f'{description} ({shown})',
        )


def flag(name: str) -> str:
    """Return the command line's name of a setting."""
    return '--' + name.replace('_', '-')


def complete(values: Mapping[str, object]) -> dict[str, Value | list]:
    """Return all settings, checked, with defaults where `values` has none; raise SettingsError."""
    unknown = sorted(map(str, values.keys() - SPECS.keys() - LISTS.keys()))
    if unknown:
        raise SettingsError(f"'{unknown[0]}' is not a setting of the evaluation")
    if values.get('compile_mode') in _REFUSED_MODES:
        raise SettingsError(
            f"compile_mode is '{values['compile_mode']}', which chooses kernels by timing "
            'them, so that two runs could differ: use another one'
        )
    try:
        settings = {
            name: spec.check(name, values.get(name, spec.default)) for name, spec in SPECS.items()
        }
    except ParameterError as error:
        raise SettingsError(str(error)) from None
    for name, (kind, count, default, _) in LISTS.items():
        settings[name] = _checked_list(name, values.get(name, default), kind, count)
    return settings


def _checked_list(name: str, values: object, kind: type, count: int | str) -> list:
    if not isinstance(values, list) or not all(type(v) in (int, kind) for v in values):
        raise SettingsError(f"'{name}' is {values!r}: it must be a list of numbers")
    if not all(map(math.isfinite, values)):
        raise SettingsError(f"'{name}' is {values}: its numbers must be finite")
    if count == '+' and not (values and all(value > 0 for value in values)):
        raise SettingsError(f"'{name}' is {values}: it needs one or more positive numbers")
    if count == 7 and values and (len(values) != 7 or not 0.5 < _length(values[3:]) < 2):
        raise SettingsError(
            f"'{name}' is {values}: it needs x y z [m] and a unit quaternion qx qy qz qw"
        )
    return [kind(value) for value in values]


def _length(values: list[float]) -> float:
    return sum(value * value for value in values) ** 0.5


def read_node_params(path: Path) -> dict[str, object]:
    """
    Return the settings in a parameter file of the node; what else it sets has no meaning here.

    Raises SettingsError if it is no such file.
    """
    content, found = _load_yaml(path), {}
    if not isinstance(content, dict) or not all(isinstance(v, dict) for v in content.values()):
        raise SettingsError(f"'{path}' is not a ROS parameter file")
    ours = [node for node in content if str(node).rpartition('/')[2] in ('**', 'lingbot_map')]
    if not ours:
        raise SettingsError(
            f"'{path}' sets nothing for the node lingbot_map: its nodes are "
            f'{", ".join(map(str, content)) or "none"}'
        )
    for node in ours:
        values = content[node].get('ros__parameters') or {}
        if not isinstance(values, dict):
            raise SettingsError(f"'{path}' is not a ROS parameter file: {node} has no parameters")
        found |= _flat(values)
    return {name: value for name, value in found.items() if name in PARAMETERS and name in SPECS}


def _flat(values: Mapping, prefix: str = '') -> dict[str, object]:
    """Return nested groups of parameters as one, with names joined by dots."""
    found = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f'{prefix}{name}.')
        else:
            found[f'{prefix}{name}'] = value
    return found


def _load_yaml(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        # An OSError's own text names the file once more.
        text = error.strerror.lower() if isinstance(error, OSError) else str(error)
        reason = ' '.join(text.split())
        raise SettingsError(f"'{path}' cannot be read: {reason}") from None


def read_config(path: Path) -> dict:
    """Return the content of a run.yaml; raise SettingsError if it is none."""
    content = _load_yaml(path)
    wanted = {'input': dict, 'settings': dict, 'resolved': dict, 'versions': dict}
    if not isinstance(content, dict) or any(
        not isinstance(content.get(key), kind) for key, kind in wanted.items()
    ):
        raise SettingsError(f"'{path}' is not a run.yaml that an evaluation wrote")
    return content


def _metavar(spec: Spec) -> str:
    return '|'.join(spec.choices) or {int: 'N', float: 'X', str: 'TEXT'}[type(spec.default)]


def _shown(value: Value) -> str:
    return "''" if value == '' else str(value)
