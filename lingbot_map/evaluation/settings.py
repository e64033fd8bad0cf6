"""
Settings of an evaluation: names, ranges, defaults, files.

The settings of the network and the map are declared in `lingbot_map.settings` and are the same as
for the node. Each setting is a flag `--like-this` and a line of run.yaml.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
import math
from pathlib import Path

from lingbot_map.errors import UserError
from lingbot_map.evaluation.exports import FORMS
from lingbot_map.settings import (
    add_flag,
    flag,
    MappingSettings,
    ParameterError,
    refuse_removed,
    Spec,
    specs_of,
    Value,
)
import yaml

_OF_THE_MAP = specs_of(MappingSettings)
# An evaluation gives every image a pose, and does not depend on the free memory.
_NOT_HERE = (
    'compile_cache_dir',
    'gpu_memory_limit',
    'fit_memory',
    'motion_gate',
    'motion_threshold',
)
# fmt: off
_OWN = {
    'keyframe_interval': Spec(
        0, 'For keyframe_policy interval: every n-th frame becomes a keyframe. 0: the smallest n '
        'with which the whole recording fits into max_keyframes; with a smaller n the memory '
        'rolls over.', low=0, high=1000),
    'image_topic': Spec('', 'Image topic of the bag. Empty: the only one.'),
    'camera_info': Spec(
        '', 'CameraInfo topic of the bag, used to undistort the images. Empty: the topic next to '
        'the image topic, if there is one. none: no CameraInfo.'),
    'fps': Spec(0.0, 'Frame rate of an image folder (0: 10 Hz; 7-Scenes: 30 Hz), or frames to '
                'use per second of a video (0: all).', unit='Hz', low=0.0, high=1000.0),
    'every': Spec(1, 'Use every n-th image.', low=1, high=100000),
    'start': Spec(0.0, 'Skip this much at the beginning.', unit='s', low=0.0, high=1e7),
    'duration': Spec(0.0, 'Use this much after the start. 0: all.', unit='s', low=0.0, high=1e7),
    'max_frames': Spec(0, 'Stop after this many images. 0: no limit.', low=0, high=10**8),
    'ground_truth': Spec(
        '', 'Pose topic of the bag, or TUM, KITTI or EuRoC file. Empty: what comes with the '
        'recording. none: no ground truth.'),
    'gt_frame': Spec('', 'Child frame of the pose, if the ground truth is a tf topic.'),
    'gt_offset': Spec(0.0, 'Added to the stamps of the ground truth.', unit='s',
                      low=-2e9, high=2e9),
    'tolerance': Spec(0.02, 'Largest difference between the stamps of an image and its true '
                      'pose.', unit='s', low=0.0, high=10.0),
    'depth': Spec('off', 'Also write the depth of every keyframe.', choices=FORMS),
    'colmap': Spec(False, 'Also write a COLMAP text model with the keyframes.'),
}
# fmt: on
SPECS: dict[str, Spec] = {
    name: spec for name, spec in _OF_THE_MAP.items() if name not in _NOT_HERE
} | _OWN
LISTS = {  # name -> (type, number of values, default, description)
    'body_to_camera': (
        float,
        7,
        [],
        "Pose of the camera's optical frame in the body frame of the ground truth.",
    ),
    'rpe_frames': (int, '+', [1, 10], 'Frame steps of the relative pose error.'),
    'rpe_metres': (float, '+', [1.0, 10.0, 100.0], 'Path lengths [m] of the relative pose error.'),
}
_REFUSED_MODES = ('max-autotune',)  # chooses kernels by timing them, so two runs may differ


class SettingsError(UserError):
    """A setting or file is wrong; the message names it and the remedy in one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting; flags that are not given are absent from the result."""
    for name, spec in SPECS.items():
        add_flag(parser, name, spec, default=argparse.SUPPRESS)
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


def complete(values: Mapping[str, object]) -> dict[str, Value | list]:
    """Return all settings, checked, with defaults where `values` has none; raise SettingsError."""
    unknown = sorted(map(str, values.keys() - SPECS.keys() - LISTS.keys()))
    if unknown:
        raise SettingsError(f"'{unknown[0]}' is not a setting of the evaluation")
    if values.get('compile_mode') in _REFUSED_MODES:
        raise SettingsError(
            f"compile_mode is '{values['compile_mode']}', which chooses kernels by timing "
            'them, so that two runs could differ: use another mode'
        )
    try:
        for name, value in values.items():
            refuse_removed(name, value)
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
    Return the settings in a parameter file of the node; ignore those that only the node has.

    :raises SettingsError: it is not a parameter file, or sets a removed setting.
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
    try:
        for name, value in found.items():
            refuse_removed(name, value)
    except ParameterError as error:
        raise SettingsError(f"'{path}': {error}") from None
    known = SPECS.keys() & _OF_THE_MAP.keys()
    return {name: value for name, value in found.items() if name in known}


def _flat(values: Mapping, prefix: str = '') -> dict[str, object]:
    """Flatten nested groups of parameters, with names joined by dots."""
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
        # The text of an OSError would repeat the file name.
        text = error.strerror.lower() if isinstance(error, OSError) else str(error)
        reason = ' '.join(text.split())
        raise SettingsError(f"'{path}' cannot be read: {reason}") from None


def read_config(path: Path) -> dict:
    """Return the content of a run.yaml; raise SettingsError if it is not one."""
    content = _load_yaml(path)
    wanted = {'input': dict, 'settings': dict, 'resolved': dict, 'versions': dict}
    if not isinstance(content, dict) or any(
        not isinstance(content.get(key), kind) for key, kind in wanted.items()
    ):
        raise SettingsError(f"'{path}' is not a run.yaml that an evaluation wrote")
    if content['settings'].get('keyframe_policy') == 'auto':  # old name of keyframe_interval 0
        content['settings'] |= {'keyframe_policy': 'interval', 'keyframe_interval': 0}
    return content
