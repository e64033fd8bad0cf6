"""
All parameters of the node.

Those of the engine, the images and the map are declared in `lingbot_map.settings`, those that only
the node has are declared here. The ROS declarations, config/lingbot_map.yaml
(`python3 -m lingbot_map_ros.parameters --yaml`) and the README table (`--markdown`) are derived
from them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
import difflib
import sys
import textwrap

from lingbot_map.settings import (
    build,
    MappingSettings,
    MapSettings,
    ParameterError,
    PointsSettings,
    refuse_removed,
    setting,
    setting_of,
    Spec,
    specs_of,
    Value,
)
from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor

_FRAMES = {  # those that a tf_mode needs
    'off': ('map_frame',),
    'map_to_camera': ('map_frame',),
    'map_to_base': ('map_frame', 'base_frame'),
    'map_to_odom': ('map_frame', 'odom_frame', 'base_frame'),
}


# fmt: off
@dataclass(frozen=True)
class PointsParams(PointsSettings):
    """Parameters of ~/points; they also decide what enters ~/map."""

    every_frame: bool = setting(
        False, 'Publish ~/points for every frame, not only for keyframes.', settable=True)


@dataclass(frozen=True)
class PathParams:
    """Parameters of ~/path."""

    max_size: int = setting(
        2000, 'Newest poses that ~/path contains. A saved trajectory always contains all poses.',
        unit='poses', low=1, high=1000000)
    publish_rate: float = setting(
        1.0, 'Publishing rate of ~/path while it grows and has a subscriber.',
        unit='Hz', low=0.01, high=100.0, settable=True)


@dataclass(frozen=True)
class MapParams(MapSettings):
    """Parameters of ~/map."""

    publish_rate: float = setting(
        0.5, 'Publishing rate of ~/map while it grows and has a subscriber.',
        unit='Hz', low=0.01, high=100.0, settable=True)


@dataclass(frozen=True)
class NodeParams(MappingSettings):
    """Values of all parameters; ParameterError: some do not go together."""

    motion_gate: bool = setting_of(MappingSettings, 'motion_gate', default=True)

    scale_source: str = setting(
        'fixed', 'Source of the scale: the parameter scale (fixed) or the motion on topic odom '
        '(odometry). odometry: estimated once per map, after about one metre of motion; then map, '
        'path and poses are rescaled. No TF is sent before.', choices=('fixed', 'odometry'))

    image_transport: str = setting(
        'raw', 'Subscribe to image (raw), or to JPEG and PNG images on image/compressed '
        '(compressed).', choices=('raw', 'compressed'))
    camera_info_timeout: float = setting(
        1.0, 'How long the first image waits for camera_info, if the topic has a publisher or '
        'use_camera_info is set. A later camera_info is used from the next map on.',
        unit='s', low=0.0, high=60.0)
    queue: str = setting(
        'latest', 'latest: process the newest image and drop older ones (robots). lossless: '
        'process every image, with a reliable subscription (replay).',
        choices=('latest', 'lossless'))
    queue_size: int = setting(
        16, 'For queue lossless: images that may wait. Further images are dropped with a warning.',
        unit='images', low=1, high=1000)
    zero_stamp: str = setting(
        'arrival', "Images without a stamp: stamp them with the node's clock (arrival) or drop "
        'them (reject).', choices=('arrival', 'reject'))
    time_jump_threshold: float = setting(
        1.0, 'An image older than the newest one by more than this is a jump back in time (a bag '
        'that starts again). An image older by less is late and dropped.',
        unit='s', low=0.0, high=3600.0)
    on_time_jump: str = setting(
        'reset', 'After a jump back in time: start a new map (reset), or drop images until their '
        'stamps have caught up (ignore).', choices=('reset', 'ignore'))

    camera_frame: str = setting(
        '', 'Frame id for images that have none. Empty: such images are dropped.')
    map_frame: str = setting('map', 'Frame id of the map and of everything that is placed in it.')
    odom_frame: str = setting(
        'odom', 'Odometry frame of the robot. For tf_mode map_to_odom: another node publishes '
        'odom_frame -> base_frame.')
    base_frame: str = setting(
        'base_link', 'Robot frame (x forward, z up) on which the camera is mounted. If /tf_static '
        'has the camera extrinsics, the map is level with this frame and starts at it.')
    tf_mode: str = setting(
        'map_to_camera', 'Transform on /tf: none (off), or map_frame to the frame of the images '
        '(map_to_camera), to base_frame (map_to_base) or to odom_frame (map_to_odom; another node '
        'publishes odom_frame -> base_frame). The last two need metres and static camera '
        'extrinsics; odometry and pose are then those of base_frame.',
        choices=tuple(_FRAMES))
    tf_rate: float = setting(
        20.0, 'For tf_mode map_to_odom: rate at which map_frame -> odom_frame is sent.',
        unit='Hz', low=0.1, high=1000.0, settable=True)
    transform_tolerance: float = setting(
        0.2, 'For tf_mode map_to_odom: how far in the future map_frame -> odom_frame is stamped.',
        unit='s', low=0.0, high=10.0)

    autostart: bool = setting(
        True, 'Configure and activate at start. If that fails, the process exits with code 1.')
    watchdog_timeout: float = setting(
        60.0, 'The process exits with code 1 if one image takes longer, so that it can be '
        'restarted. 0: never. On a CPU an image may always take four times as long as the '
        'warm-up.', unit='s', low=0.0, high=86400.0)
    save_directory: str = setting(
        '~/.ros/lingbot_map',
        'Folder for the files of ~/save_map and ~/save_trajectory, created if missing.')
    autosave: str = setting(
        '', 'Folder for the map and the trajectory when the node ends or is cleaned up, created '
        'if missing. Empty: nothing is saved.')

    points: PointsParams = field(default_factory=PointsParams)
    path: PathParams = field(default_factory=PathParams)
    map: MapParams = field(default_factory=MapParams)

    # fmt: on
    @classmethod
    def from_values(cls, values: Mapping[str, Value]) -> NodeParams:
        """Build from {'points.stride': 2, ...}; raise ParameterError on the first wrong value."""
        return build(cls, values)

    def __post_init__(self):
        super().__post_init__()
        self._check_frames()
        self._check_scale()

    def _check_frames(self):
        """Raise ParameterError if a frame that tf_mode needs has no name of its own."""
        names = {name: getattr(self, name) for name in _FRAMES[self.tf_mode]}
        for name, frame in names.items():
            if not frame.strip('/'):
                raise ParameterError(
                    f"parameter '{name}' is empty: tf_mode '{self.tf_mode}' needs it"
                )
            if frame.startswith('/'):
                raise ParameterError(
                    f"parameter '{name}' is '{frame}': frame ids do not begin with a slash"
                )
        if len(set(names.values())) < len(names):
            same = ', '.join(f"'{name}' ({frame})" for name, frame in names.items())
            raise ParameterError(f'parameters {same}: two of them are the same frame')

    def _check_scale(self):
        """Raise ParameterError if a robot would be placed in a map without metres."""
        needs_metres = self.tf_mode in ('map_to_base', 'map_to_odom')
        if needs_metres and self.scale_source == 'fixed' and self.scale == 1.0:
            raise ParameterError(
                f"parameter 'tf_mode' is '{self.tf_mode}', which needs metres, but 'scale' is 1.0 "
                "(unknown): set 'scale' to metres per network unit, or 'scale_source' to "
                "'odometry'"
            )


PARAMETERS: dict[str, Spec] = specs_of(NodeParams)


def declare_params(node) -> None:
    """Declare all parameters on a node; raise ParameterError on a wrong value given at start."""
    for name, spec in PARAMETERS.items():
        # Typed here and not by rclpy: 2 is a valid 2.0, and an unquoted off is 'off'.
        descriptor = ParameterDescriptor(
            description=f'{spec.description} [{spec.unit}]' if spec.unit else spec.description,
            additional_constraints=f'{spec.range_text}; {spec.change_rule}',
            dynamic_typing=True,
        )
        if spec.low is not None and isinstance(spec.default, int):
            descriptor.integer_range = [
                IntegerRange(
                    from_value=int(spec.low), to_value=int(spec.high), step=spec.multiple_of
                )
            ]
        elif spec.low is not None:
            descriptor.floating_point_range = [
                FloatingPointRange(from_value=float(spec.low), to_value=float(spec.high))
            ]
        node.declare_parameter(name, spec.default, descriptor)


def check_overrides(overrides: Mapping[str, Value]) -> list[str]:
    """
    Check values given at start, before rclpy sees them.

    Return a warning for each name that is not a parameter.

    :raises ParameterError: a value is wrong, or a parameter or value was removed.
    """
    warnings = []
    for name, value in overrides.items():
        refuse_removed(name, value)
        if name in PARAMETERS:
            PARAMETERS[name].check(name, value)
        elif name != 'use_sim_time' and not name.startswith('qos_overrides.'):
            close = difflib.get_close_matches(name, PARAMETERS, n=1)
            hint = f", did you mean '{close[0]}'?" if close else ''
            warnings.append(f"'{name}' is not a parameter of this node and is ignored{hint}")
    return warnings


def read_params(node) -> NodeParams:
    """Return the node's present values; raise ParameterError if one does not fit."""
    return NodeParams.from_values({p.name: p.value for p in node.get_parameters(PARAMETERS)})


def refusals(names: Iterable[str]) -> list[str]:
    """Return why parameters cannot be set on a configured node, one line each."""
    return [
        f"parameter '{name}' cannot change while the node is configured: set it in the parameter "
        'file and start again, or run the transitions deactivate and cleanup first'
        for name in names
        if name in PARAMETERS and not PARAMETERS[name].settable
    ]


def as_yaml() -> str:
    """Return the parameter file with every default, its meaning, unit and range as comments."""
    lines = [
        '# Every parameter of lingbot_map_node with its default.',
        '# Generated by: python3 -m lingbot_map_ros.parameters --yaml',
        '/**:',
        '  ros__parameters:',
    ]
    group = ''
    for name, spec in PARAMETERS.items():
        head, _, leaf = name.rpartition('.')
        if head != group:
            lines.append(f'    {head}:')
            group = head
        indent = ' ' * (6 if head else 4)
        unit = f' [{spec.unit}]' if spec.unit else ''
        comment = f'{spec.description}{unit} ({spec.range_text}; {spec.change_rule})'
        prefix = f'{indent}# '
        lines += textwrap.wrap(
            comment,
            99,
            initial_indent=prefix,
            subsequent_indent=prefix,
            break_on_hyphens=False,
        )
        lines.append(f'{indent}{leaf}: {_yaml_scalar(spec.default)}')
    return '\n'.join(lines) + '\n'


def as_markdown() -> str:
    """Return the table of all parameters for the README."""
    lines = [
        '| parameter | default | unit | range | while running | meaning |',
        '|---|---|---|---|---|---|',
    ]
    for name, spec in PARAMETERS.items():
        limits = spec.range_text.replace('|', r'\|')
        settable = 'yes' if spec.settable else ''
        lines.append(
            f'| `{name}` | `{_yaml_scalar(spec.default)}` | {spec.unit} | {limits} '
            f'| {settable} | {spec.description} |'
        )
    return '\n'.join(lines) + '\n'


def _yaml_scalar(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)  # 'text' in single quotes: an unquoted off would be a truth value


def main(argv=None) -> int:
    """Print the parameter file or the README table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument('--yaml', action='store_true', help='config/lingbot_map.yaml')
    form.add_argument('--markdown', action='store_true', help='table for the README')
    sys.stdout.write(as_yaml() if parser.parse_args(argv).yaml else as_markdown())
    return 0


if __name__ == '__main__':
    sys.exit(main())
