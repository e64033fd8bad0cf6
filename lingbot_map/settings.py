"""
Every setting of the engine, the images and the map, declared once.

The node's parameters and the flags of the evaluation, the benchmark and the memory budget are
derived from these dataclasses. Nothing here may import torch: the Python of `ros2 launch` may not
have it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from lingbot_map.config import (
    ATTENTION_BACKENDS,
    COMPILE_MODES,
    DTYPES,
    HEADS_DTYPES,
    KEYFRAME_POLICIES,
    LIMIT_POLICIES,
    MODEL_PRESETS,
    PRESET_IMAGE_WIDTH,
)
from lingbot_map.errors import UserError

Value = bool | int | float | str

_INTERVAL = (
    "set 'keyframe_interval' to (images - num_scale_frames) / (max_keyframes - num_scale_frames), "
    'rounded up; in lingbot_map_evaluate 0 does that'
)
# Removed settings ('name') and values ('name: value') with their replacements.
REMOVED = {
    'expected_frames': _INTERVAL,
    'keyframe_policy: auto': f"use 'interval' and {_INTERVAL}",
}


class ParameterError(UserError):
    """A setting has a wrong value; the message names both and the remedy in one line."""


@dataclass(frozen=True)
class Spec:
    """Default, meaning and range of one setting; `low` and `high` are inclusive."""

    default: Value
    description: str
    unit: str = ''
    low: float | None = None
    high: float | None = None
    multiple_of: int = 1
    choices: tuple[str, ...] = ()
    settable: bool = False  # while the node is configured or active

    @property
    def range_text(self) -> str:
        if self.choices:
            return ' | '.join(self.choices)
        if isinstance(self.default, bool):
            return 'true | false'
        if self.low is None:
            return 'text'
        multiples = f', multiple of {self.multiple_of}' if self.multiple_of > 1 else ''
        return f'{self.low:g} .. {self.high:g}{multiples}'

    @property
    def change_rule(self) -> str:
        return 'settable while running' if self.settable else 'fixed once configured'

    def check(self, name: str, value: Value) -> Value:
        """Return `value` in the type of the default; raise ParameterError if it does not fit."""
        if value is False and 'off' in self.choices:
            value = 'off'  # YAML 1.1 reads an unquoted off as false
        if isinstance(self.default, float) and type(value) is int:
            value = float(value)
        if not (type(value) is type(self.default) and self._allows(value)):
            wanted = type(self.default).__name__
            raise ParameterError(
                f"parameter '{name}' is {value!r}: it must be {wanted} ({self.range_text})"
            )
        return value

    def _allows(self, value: Value) -> bool:
        if self.choices:
            return value in self.choices
        if self.low is None:
            return True
        fits = self.multiple_of == 1 or value % self.multiple_of == 0
        return self.low <= value <= self.high and fits


def setting(default: Value, description: str, **limits):
    """Declare a field of a dataclass as a setting; `limits` are the other fields of its Spec."""
    return _field(Spec(default, description, **limits))


def setting_of(cls: type, name: str, **changes):
    """Declare a setting of `cls` in a subclass, with `changes` to its Spec."""
    return _field(replace(specs_of(cls)[name], **changes))


def _field(spec: Spec):
    return field(default=spec.default, metadata={'spec': spec})


def specs_of(cls: type) -> dict[str, Spec]:
    """Return {'model': Spec, ..., 'points.stride': Spec, ...} with groups last."""
    items = fields(cls)
    table = {item.name: item.metadata['spec'] for item in items if 'spec' in item.metadata}
    for item in items:
        if 'spec' not in item.metadata:
            group = specs_of(item.default_factory)
            table |= {f'{item.name}.{name}': spec for name, spec in group.items()}
    return table


def build(cls: type, values: Mapping[str, object], prefix: str = ''):
    """
    Return a `cls` with the values in {'points.stride': 2, ...}; unknown names are ignored.

    :raises ParameterError: a value does not fit its Spec, or values contradict each other.
    """
    arguments = {}
    for item in fields(cls):
        name = prefix + item.name
        if 'spec' not in item.metadata:
            arguments[item.name] = build(item.default_factory, values, name + '.')
        elif name in values:
            arguments[item.name] = item.metadata['spec'].check(name, values[name])
    return cls(**arguments)


def refuse_removed(name: str, value: object) -> None:
    """Raise ParameterError with the replacement if the setting or the value was removed."""
    for key in (name, f'{name}: {value}'):
        if key in REMOVED:
            raise ParameterError(f"parameter '{key}' was removed: {REMOVED[key]}")


def flag(name: str) -> str:
    """Return the command line flag of a setting."""
    return '--' + name.replace('_', '-')


def add_flag(parser: argparse.ArgumentParser, name: str, spec: Spec, **options) -> None:
    """Add the flag of a setting; `options` override the arguments derived from `spec`."""
    unit = f' [{spec.unit}]' if spec.unit else ''
    default = "''" if spec.default == '' else spec.default
    text = f'{spec.description}{unit} ({default})'.replace('%', '%%')
    arguments = {'dest': name, 'default': spec.default, 'help': text}
    if isinstance(spec.default, bool):
        arguments['action'] = 'store_true'
    else:
        kind = type(spec.default)
        metavar = '|'.join(spec.choices) or {int: 'N', float: 'X', str: 'TEXT'}[kind]
        arguments |= {'type': kind, 'metavar': metavar}
    parser.add_argument(flag(name), **arguments | options)


# fmt: off
@dataclass(frozen=True)
class NetworkSettings:
    """The network, its device and how it runs."""

    model: str = setting(
        'demo', 'Network architecture: full is the released network, demo and tiny run on a CPU.',
        choices=tuple(MODEL_PRESETS))
    checkpoint: str = setting(
        '', 'Weights: a .pt or .safetensors file, hf:owner/name/file[@revision], or random. '
        'Empty: the packaged weights of the demo model.')
    device: str = setting(
        'auto', 'Device of the network: auto (CUDA if there is one), cpu, cuda or cuda:N.')
    dtype: str = setting(
        'auto', 'Precision of the trunk. auto: bfloat16 on CUDA (float16 on GPUs without native '
        'bfloat16), float32 on a CPU.', choices=DTYPES)
    heads_dtype: str = setting(
        'tf32', 'Precision of the heads: float32 (fp32), float32 with TF32 products on CUDA '
        '(tf32), or bfloat16 except for their last layers (bf16).', choices=HEADS_DTYPES)
    compile_mode: str = setting(
        'auto', 'How the network runs. off: eagerly. default: parts of it compiled. '
        'reduce-overhead, max-autotune: also with one CUDA graph per part; max-autotune chooses '
        'kernels by timing them. cuda-graph: one CUDA graph per image. auto: the fastest mode '
        'that the device supports, except max-autotune; off on a CPU.', choices=COMPILE_MODES)
    attention_backend: str = setting(
        'auto', 'Kernel for attention over the cache. auto: chosen by GPU and precision. '
        'flashinfer needs the package flashinfer.', choices=ATTENTION_BACKENDS)
    compile_cache_dir: str = setting(
        '', 'Folder for compiled code, created if missing; makes the next start fast. Empty: the '
        'temporary folder of torch, which does not survive a reboot.')
    gpu_memory_limit: float = setting(
        0.0, 'Memory that the network may use, weights included. It is computed before the '
        'network is loaded. 0: what is free on the GPU; no limit on a CPU. Settings that need '
        'more are refused, and the message names settings that fit.',
        unit='GB', low=0.0, high=10000.0)
    fit_memory: bool = setting(
        False, 'Reduce settings that need too much memory instead of refusing them: first '
        'max_keyframes, down to what a full window or a roll-over needs; then sliding_window in '
        'steps of 8, down to 8; then image_width in steps of 14, down to half. max_keyframes '
        'gets what is left. The result is logged.')


@dataclass(frozen=True)
class StreamConfig:
    """Settings of a StreamEngine; raises ParameterError if they cannot work."""

    num_scale_frames: int = setting(
        8, 'Frames of the first batch, which are run together. They fix the scale and stay in '
        'memory as anchors.', unit='frames', low=1, high=64)
    sliding_window: int = setting(
        64, 'Newest keyframes whose patches are attended to, in addition to the anchors.',
        unit='keyframes', low=0, high=1024)
    max_keyframes: int = setting(
        320, 'Keyframe capacity; sets the memory size. See on_limit. The network was trained on '
        'up to 320 views.', unit='keyframes', low=1, high=100000)
    on_limit: str = setting(
        'roll_over', 'At max_keyframes: continue the map in a new memory window (roll_over), '
        'clear map and path and start a new map (reset), or refuse images until ~/reset (stop).',
        choices=LIMIT_POLICIES)
    overlap_keyframes: int = setting(
        8, 'For on_limit roll_over: newest keyframes that are run again to start the next window '
        'and align it. max_keyframes must be at least overlap_keyframes plus the larger of '
        'overlap_keyframes and num_scale_frames.', unit='keyframes', low=1, high=1024)
    keyframe_policy: str = setting(
        'interval', 'Which frames after the first batch become keyframes: every '
        'keyframe_interval-th (interval), or those for which the camera has moved enough (flow).',
        choices=KEYFRAME_POLICIES)
    keyframe_interval: int = setting(
        1, 'For keyframe_policy interval: every n-th frame becomes a keyframe.',
        unit='frames', low=1, high=1000, settable=True)
    flow_threshold: float = setting(
        20.0, 'For keyframe_policy flow: a frame becomes a keyframe when the scene has moved '
        'further than this since the last keyframe, on average over the input of the network '
        '(image_width wide).', unit='px', low=0.1, high=1000.0)
    max_non_keyframe_gap: int = setting(
        30, 'For keyframe_policy flow: a frame becomes a keyframe at the latest this many frames '
        'after the last one.', unit='frames', low=1, high=100000)
    motion_gate: bool = setting(
        False, 'Skip images without motion since the last image that had some. Before the map '
        'starts they are dropped; later they get poses but never become keyframes. A robot at '
        'rest fills no memory, and a map starts with views that differ. Off in replay and '
        'evaluation.')
    motion_threshold: float = setting(
        0.5, 'For motion_gate: how far the scene must move in the image, relative to the image '
        'width.', unit='%', low=0.05, high=3.0)
    image_width: int = setting(
        518, 'Width of the network input.', unit='px', low=14, high=2044, multiple_of=14)
    # fmt: on

    def __post_init__(self):
        for item in fields(self):
            if 'spec' in item.metadata:
                self._check(item.name, item.metadata['spec'])
        for name, unit in (('motion_threshold', '%'), ('flow_threshold', 'px')):
            value = getattr(self, name)
            if not value > 0:
                raise _error(name, value, f'it must be above 0 {unit}')
        self._check_capacity()

    def _check(self, name: str, spec: Spec):
        """Check lower limit and choices; upper limits are for users only (see `Spec.check`)."""
        value = getattr(self, name)
        if type(value) is int and value < spec.low:
            raise _error(name, value, f'it must be at least {spec.low}')
        if spec.choices and value not in spec.choices:
            raise _error(name, repr(value), f'use {", ".join(spec.choices)}')

    def _check_capacity(self):
        capacity, scale_frames = self.max_keyframes, self.num_scale_frames
        if capacity < scale_frames:
            raise ParameterError(
                f"parameter 'max_keyframes' is {capacity}, less than num_scale_frames "
                f'({scale_frames}); raise it'
            )
        # The frames of an overlap must be newer than those that started the window.
        needed = self.overlap_keyframes + max(self.overlap_keyframes, scale_frames)
        if self.on_limit == 'roll_over' and capacity < needed:
            raise ParameterError(
                f"parameter 'max_keyframes' is {capacity}; to roll over with 'overlap_keyframes' "
                f"{self.overlap_keyframes} and 'num_scale_frames' {scale_frames} it must be at "
                f"least {needed}: raise it, or set 'on_limit' to reset or stop"
            )


def _error(name: str, value: object, remedy: str) -> ParameterError:
    return ParameterError(f"parameter '{name}' is {value}; {remedy}")

# fmt: off
@dataclass(frozen=True)
class ImageSettings:
    """How images are prepared for the network."""

    image_rotation: int = setting(
        0, 'Clockwise rotation that turns the images of a sideways camera upright. Outputs stay '
        'in the frame of the camera as mounted.',
        unit='degrees', low=0, high=270, multiple_of=90)
    image_mask: str = setting(
        '', 'Pixels to ignore, such as the robot itself, an overlay or black bars: border widths '
        '[px] as left,top,right,bottom, or an image file of the same size that is black there. '
        'They never become points.')
    image_rectified: bool = setting(
        False, 'The images are already rectified: the intrinsics are those of P in camera_info, '
        'and nothing is undistorted.')
    use_camera_info: bool = setting(
        False, 'Use the intrinsics of camera_info instead of those that the network predicts.')


@dataclass(frozen=True)
class EngineSettings(ImageSettings, StreamConfig, NetworkSettings):
    """All settings of an engine."""

    image_width: int = setting_of(
        StreamConfig, 'image_width', default=0, low=0,
        description='Width of the network input. 0: the width that the model was made for.')


@dataclass(frozen=True)
class PointsSettings:
    """Which points of a frame enter clouds and the map."""

    min_confidence: float = setting(
        1.0, 'Drop points with a lower confidence of the network. 1 keeps all.',
        low=0.0, high=1e6, settable=True)
    max_depth: float = setting(
        0.0, 'Drop points that are further from the camera. 0 keeps all.',
        unit='map unit', low=0.0, high=1e6, settable=True)
    keep_percentile: float = setting(
        100.0, 'Of the remaining points of each frame, keep this share with the highest '
        'confidence.', unit='%', low=0.0, high=100.0, settable=True)
    edge_threshold: float = setting(
        0.0, 'Drop pixels whose depth differs from that of a neighbour by more than this fraction '
        'of their own depth: they float between foreground and background. 0 keeps all.',
        low=0.0, high=10.0, settable=True)
    stride: int = setting(
        2, 'Use every n-th row and column of the depth image.',
        unit='px', low=1, high=64, settable=True)


@dataclass(frozen=True)
class MapSettings:
    """The voxel map."""

    voxel_size: float = setting(
        0.02, 'Edge length of the voxels of the map; each holds one point. 0: no map.',
        unit='map unit', low=0.0, high=1000.0)
    max_points: int = setting(
        1000000, 'Point capacity of the map. When it is full, the points seen longest ago are '
        'removed.', unit='points', low=1000, high=50000000)


@dataclass(frozen=True)
class MappingSettings(EngineSettings):
    """All settings that affect a map, in the node and in an evaluation."""

    scale: float = setting(
        1.0, 'Factor on positions, depths and clouds that makes them metres. 1: unknown; the '
        'network alone has no metric scale.',
        unit='map unit per network unit', low=1e-6, high=1e6)
    points: PointsSettings = field(default_factory=PointsSettings)
    map: MapSettings = field(default_factory=MapSettings)


# fmt: on
def network_width(settings: EngineSettings) -> int:
    """Return the width of the network input [px]: the setting, or the model's default."""
    return settings.image_width or PRESET_IMAGE_WIDTH[settings.model]


def usual_image_size(settings: EngineSettings) -> tuple[int, int]:
    """Return (height, width) [px] of upright 4:3 images with the width of the network."""
    width, upright = network_width(settings), settings.image_rotation % 180 == 0
    return (width * 3 // 4 if upright else width * 4 // 3), width


def stream_config(settings: EngineSettings) -> StreamConfig:
    """Return the settings of the engine, with the width of the network input."""
    values = {item.name: getattr(settings, item.name) for item in fields(StreamConfig)}
    return StreamConfig(**values | {'image_width': network_width(settings)})
