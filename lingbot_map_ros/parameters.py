"""
Every parameter of the node, declared once.

The dataclasses below are the only list: the ROS declarations, the checks, config/lingbot_map.yaml
(`python3 -m lingbot_map_ros.parameters --yaml`) and the README table (`--markdown`) follow it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
import difflib
import sys

from lingbot_map.config import ATTENTION_BACKENDS, COMPILE_MODES, HEADS_DTYPES
from lingbot_map_ros.parameter_checks import check_frames, check_scale, check_stream
from lingbot_map_ros.parameter_spec import Spec, Value


def _of(spec: Spec):
    return field(default=spec.default, metadata={'spec': spec})


# fmt: off
@dataclass(frozen=True)
class PointsParams:
    """Parameters of ~/points; they also decide what enters ~/map."""

    min_confidence: float = _of(Spec(
        1.0, 'Points below this confidence of the network are dropped; 1 keeps all.',
        low=0.0, high=1e6, settable=True))
    max_depth: float = _of(Spec(
        0.0, 'Points further from the camera are dropped; 0 keeps all.',
        unit='map unit', low=0.0, high=1e6, settable=True))
    keep_percentile: float = _of(Spec(
        100.0, 'Of the points that are left, the most confident percent of each frame are kept.',
        unit='%', low=0.0, high=100.0, settable=True))
    edge_threshold: float = _of(Spec(
        0.0, 'Pixels whose neighbours differ in depth by more than this part of their own depth '
        'are dropped, since they hang between foreground and background; 0 keeps all.',
        low=0.0, high=10.0, settable=True))
    stride: int = _of(Spec(
        2, 'Take every n-th row and column of the depth image.',
        unit='px', low=1, high=64, settable=True))
    every_frame: bool = _of(Spec(
        False, 'Publish ~/points for every frame instead of keyframes only.', settable=True))


@dataclass(frozen=True)
class PathParams:
    """Parameters of ~/path."""

    max_size: int = _of(Spec(
        2000, 'Newest poses that ~/path holds; saving a trajectory always writes all.',
        unit='poses', low=1, high=1000000))
    publish_rate: float = _of(Spec(
        1.0, 'How often ~/path is published while it grows and has a subscriber.',
        unit='Hz', low=0.01, high=100.0, settable=True))


@dataclass(frozen=True)
class MapParams:
    """Parameters of ~/map."""

    voxel_size: float = _of(Spec(
        0.02, 'Edge of the voxels of ~/map, which hold one point each; 0 keeps no map.',
        unit='map unit', low=0.0, high=1000.0))
    max_points: int = _of(Spec(
        1000000, 'Points that the map holds; beyond it the ones seen longest ago leave.',
        unit='points', low=1000, high=50000000))
    publish_rate: float = _of(Spec(
        0.5, 'How often ~/map is published while it grows and has a subscriber.',
        unit='Hz', low=0.01, high=100.0, settable=True))


@dataclass(frozen=True)
class NodeParams:
    """Values of all parameters, checked; made by `from_values`."""

    autostart: bool = _of(Spec(
        True, 'Configure and activate by itself; when that fails the process exits with 1.'))
    model: str = _of(Spec(
        'demo', 'Architecture: full is the released network, demo and tiny run on a CPU.',
        choices=('full', 'demo', 'tiny')))
    checkpoint: str = _of(Spec(
        '', 'Weights: a .pt or .safetensors file, hf:owner/name/file[@revision], or random. '
        'Empty takes the packaged weights of the demo model.'))
    device: str = _of(Spec(
        'auto', 'Where the network runs: auto (CUDA if there is one), cpu, cuda or cuda:N.'))
    dtype: str = _of(Spec(
        'auto', 'Precision of the trunk; auto is bfloat16 on CUDA (float16 where that is not '
        'native) and float32 on the CPU.',
        choices=('auto', 'bfloat16', 'float16', 'float32')))
    heads_dtype: str = _of(Spec(
        'tf32', 'Precision of the heads: float32 in full (fp32), float32 multiplied with shorter '
        'factors on CUDA (tf32), or bfloat16 up to their last layers (bf16).',
        choices=HEADS_DTYPES))
    compile_mode: str = _of(Spec(
        'auto', 'How the network runs: eagerly (off), its parts compiled (default; '
        'reduce-overhead and max-autotune with a CUDA graph each, the latter chooses kernels by '
        'timing), or as one CUDA graph per image (cuda-graph); auto is the fastest that the '
        'device can do without choosing by timing, off on a CPU.',
        choices=COMPILE_MODES))
    attention_backend: str = _of(Spec(
        'auto', 'Kernel of the attention over the cache; auto follows from the GPU and the '
        'precision. flashinfer needs the package of that name.',
        choices=ATTENTION_BACKENDS))
    compile_cache_dir: str = _of(Spec(
        '', 'Folder that keeps compiled code, made if missing, so that the next start is fast; '
        "empty takes torch's temporary one, which is lost when the machine starts again."))
    image_width: int = _of(Spec(
        0, "Width of the network's input; 0 takes the width that the model was made for.",
        unit='px', low=0, high=2044, multiple_of=14))
    image_transport: str = _of(Spec(
        'raw', 'Subscribe image (raw), or jpeg and png pictures on image/compressed (compressed).',
        choices=('raw', 'compressed')))
    image_rotation: int = _of(Spec(
        0, 'Turn that makes the pictures of a camera mounted sideways upright, clockwise. Outputs '
        'stay in the frame of the camera as it is mounted.',
        unit='degrees', low=0, high=270, multiple_of=90))
    image_mask: str = _of(Spec(
        '', 'Pixels to ignore, such as the robot itself, an overlay or black bars: the widths of '
        'borders [px] as left,top,right,bottom, or a picture of the size of the images that is '
        'black there. They never become points.'))
    image_rectified: bool = _of(Spec(
        False, 'The images are rectified already: camera_info is taken from its P, and nothing is '
        'undistorted.'))
    use_camera_info: bool = _of(Spec(
        False, 'Take the intrinsics from camera_info instead of those that the network predicts.'))
    camera_info_timeout: float = _of(Spec(
        1.0, 'The first image waits so long for camera_info, if it is published by anybody or '
        'use_camera_info is set; what comes later is used from the next map on.',
        unit='s', low=0.0, high=60.0))
    num_scale_frames: int = _of(Spec(
        8, 'Frames that are run together at the start; they fix the scale and stay as anchors.',
        unit='frames', low=1, high=64))
    sliding_window: int = _of(Spec(
        64, 'Newest keyframes whose patches are attended to, beside the anchors.',
        unit='keyframes', low=0, high=1024))
    max_keyframes: int = _of(Spec(
        320, 'Keyframes that the memory can hold, whose size this fixes; what happens then says '
        'on_limit. The network was trained on up to 320 views.',
        unit='keyframes', low=1, high=100000))
    on_limit: str = _of(Spec(
        'roll_over', 'When max_keyframes are held: go on in the same map, in a new window of '
        'memory (roll_over); forget map and path and start a new map (reset); or refuse images '
        'until ~/reset (stop).', choices=('roll_over', 'reset', 'stop')))
    overlap_keyframes: int = _of(Spec(
        8, 'Newest keyframes with which the next window begins, so that both can be aligned; each '
        'of them costs an extra run of the network. max_keyframes must be at least this plus the '
        'larger of this and num_scale_frames. For on_limit roll_over.',
        unit='keyframes', low=1, high=1024))
    gpu_memory_limit: float = _of(Spec(
        0.0, 'Memory that the network may take, weights and all, computed before it is loaded; 0 '
        'takes what is free on the GPU, and any amount on a CPU. What needs more is refused with '
        'the settings that would fit.', unit='GB', low=0.0, high=10000.0))
    fit_memory: bool = _of(Spec(
        False, 'Instead of a refusal, shrink: max_keyframes to what fills the window or a '
        'roll-over needs, then sliding_window in steps of 8 down to 8, then image_width in steps '
        'of 14 down to its half; what is left goes to max_keyframes. The log says what came out.'))
    keyframe_policy: str = _of(Spec(
        'interval', 'Which frames after the scale frames are kept as keyframes: every '
        'keyframe_interval-th (interval), those for which the camera has moved enough (flow), or '
        'every n-th so that expected_frames fit into max_keyframes (auto).',
        choices=('interval', 'flow', 'auto')))
    keyframe_interval: int = _of(Spec(
        1, 'Every n-th frame after the scale frames is kept. For keyframe_policy interval.',
        unit='frames', low=1, high=1000, settable=True))
    flow_threshold: float = _of(Spec(
        20.0, 'A frame is kept when the scene has moved so far, on average, in the input of the '
        'network (image_width wide) since the last keyframe. For keyframe_policy flow.',
        unit='px', low=0.1, high=1000.0))
    max_non_keyframe_gap: int = _of(Spec(
        30, 'A frame is kept at the latest so many frames after the last keyframe. For '
        'keyframe_policy flow.', unit='frames', low=1, high=100000))
    expected_frames: int = _of(Spec(
        0, 'Images that will come, about. For keyframe_policy auto, which needs it.',
        unit='frames', low=0, high=100000000))
    motion_gate: bool = _of(Spec(
        True, 'Leave out images that show no motion since the last one that did: before the map '
        'begins they are dropped, later they get poses but become no keyframes, whatever '
        'keyframe_policy says. A robot that stands fills no memory then, and a map begins with '
        'views that differ. Off in replay and evaluation.'))
    motion_threshold: float = _of(Spec(
        0.5, "How far the scene has to move in the image, as a part of the image's width. For "
        'motion_gate.', unit='%', low=0.05, high=3.0))
    queue: str = _of(Spec(
        'latest', 'latest: the newest image wins and older ones are dropped (robots). '
        'lossless: every image is run, subscribed reliably (replay).',
        choices=('latest', 'lossless')))
    queue_size: int = _of(Spec(
        16, 'Images that may wait when queue is lossless; more are dropped with a warning.',
        unit='images', low=1, high=1000))
    camera_frame: str = _of(Spec(
        '', 'Frame id used for images that carry none; empty refuses such images.'))
    map_frame: str = _of(Spec('map', 'Frame id of everything that is placed in the map.'))
    odom_frame: str = _of(Spec(
        'odom', "Origin of the robot's odometry: others place base_frame in it (map_to_odom)."))
    base_frame: str = _of(Spec(
        'base_link', 'Frame of the robot (x forward, z up) on which the camera is mounted. If '
        '/tf_static knows the mount, the map is level with it and begins at it.'))
    tf_mode: str = _of(Spec(
        'map_to_camera', "Transform on /tf: none, or from map_frame to the image's frame, to "
        'base_frame, or to odom_frame (others publish odom_frame -> base_frame). The last two '
        'need metres and a static mount; odometry and pose are then those of base_frame.',
        choices=('off', 'map_to_camera', 'map_to_base', 'map_to_odom')))
    tf_rate: float = _of(Spec(
        20.0, 'How often map_frame -> odom_frame is sent in map_to_odom.',
        unit='Hz', low=0.1, high=1000.0, settable=True))
    transform_tolerance: float = _of(Spec(
        0.2, 'How far ahead of now map_frame -> odom_frame is stamped in map_to_odom.',
        unit='s', low=0.0, high=10.0))
    scale: float = _of(Spec(
        1.0, 'Factor on positions, depths and clouds, to make them metres. 1 says that none is '
        'known, since the network alone knows no metres.',
        unit='map unit per network unit', low=1e-6, high=1e6))
    scale_source: str = _of(Spec(
        'fixed', 'Where the scale comes from: the parameter scale (fixed), or the motion that the '
        'topic odom reports (odometry): found once per map, after a metre or so of motion; map, '
        'path and poses are rescaled then, and no TF is sent before.',
        choices=('fixed', 'odometry')))
    zero_stamp: str = _of(Spec(
        'arrival', "Images without a stamp: stamped with the node's clock, or rejected.",
        choices=('arrival', 'reject')))
    time_jump_threshold: float = _of(Spec(
        1.0, 'An image older than the newest by more than this is a jump in time (a bag that '
        'starts again); by less it is late and dropped.', unit='s', low=0.0, high=3600.0))
    on_time_jump: str = _of(Spec(
        'reset', 'After a jump back in time: start a new map, or drop images until the stamps '
        'have caught up.', choices=('reset', 'ignore')))
    watchdog_timeout: float = _of(Spec(
        60.0, 'A single image that takes longer makes the process exit with 1, so that it is '
        'started again; 0 switches this off. On a CPU an image may always take four times as long '
        'as the warm-up.', unit='s', low=0.0, high=86400.0))
    save_directory: str = _of(Spec(
        '~/.ros/lingbot_map', 'Where ~/save_map and ~/save_trajectory write; made if missing.'))
    autosave: str = _of(Spec(
        '', 'Folder for the map and the trajectory when the node ends or is cleaned up, made if '
        'missing; empty saves nothing.'))
    points: PointsParams = field(default_factory=PointsParams)
    path: PathParams = field(default_factory=PathParams)
    map: MapParams = field(default_factory=MapParams)

    # fmt: on
    @classmethod
    def from_values(cls, values: Mapping[str, Value]) -> NodeParams:
        """Build from {'points.stride': 2, ...}; raise ParameterError on the first wrong value."""
        params = _build(cls, values, '')
        check_frames(params)
        check_scale(params)
        check_stream(params)
        return params


def _build(cls, values, prefix):
    arguments = {}
    for item in fields(cls):
        name = prefix + item.name
        if 'spec' not in item.metadata:
            arguments[item.name] = _build(item.default_factory, values, name + '.')
        elif name in values:
            arguments[item.name] = item.metadata['spec'].check(name, values[name])
    return cls(**arguments)


def _specs(cls, prefix='') -> dict[str, Spec]:
    table = {}
    for item in fields(cls):
        name = prefix + item.name
        if 'spec' in item.metadata:
            table[name] = item.metadata['spec']
        else:
            table.update(_specs(item.default_factory, name + '.'))
    return table


PARAMETERS: dict[str, Spec] = _specs(NodeParams)


def declare_params(node) -> None:
    """Declare all parameters on a node; raise ParameterError on a wrong value given at start."""
    # Imported here: evaluation reads this table where there is no ROS.
    from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor

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

    Raise ParameterError on a wrong one; return a warning for each name that is not a parameter.
    """
    warnings = []
    for name, value in overrides.items():
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


def main(argv=None) -> int:
    """Print the parameter file or the README table."""
    from lingbot_map_ros.parameter_texts import as_markdown, as_yaml  # which imports this module

    parser = argparse.ArgumentParser(description=main.__doc__)
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument('--yaml', action='store_true', help='config/lingbot_map.yaml')
    form.add_argument('--markdown', action='store_true', help='table for the README')
    sys.stdout.write(as_yaml() if parser.parse_args(argv).yaml else as_markdown())
    return 0


if __name__ == '__main__':
    sys.exit(main())
