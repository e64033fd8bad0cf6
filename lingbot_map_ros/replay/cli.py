"""
Play a recording through the mapping node and save its trajectory and map.

Exit code 0: every image has a pose; 1: images were lost or damaged, or the node gave up; 2: bad
input, nothing was written.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
import signal
import sys
import tempfile
import threading
import time

from lingbot_map.cli import Parser
from lingbot_map.config import MODEL_PRESETS
from lingbot_map.errors import UserError
from lingbot_map.evaluation.folders import RUN_FILE
from lingbot_map.evaluation.metrics import MetricsError
from lingbot_map.mapping.points import POINT_DTYPE
from lingbot_map.recordings.open import find_truth, open_source
from lingbot_map.recordings.pose_files import PoseTrack
from lingbot_map.recordings.source import Source, SourceError
from lingbot_map_ros.node import LingbotMapNode
from lingbot_map_ros.parameters import PARAMETERS
from lingbot_map_ros.rclpy_fixes import NodeExecutor
from lingbot_map_ros.replay import results
from lingbot_map_ros.replay.player import Player, PlayerError
import numpy as np
import rclpy
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions
from rclpy.utilities import remove_ros_args
from tqdm import tqdm

PROGRAM = 'lingbot_map_replay'
IN_FLIGHT = 1
_CLOSE_S = 5.0
_DIAGNOSTICS_PERIOD_S = 0.1  # the replay ends when they report that no image waits
_LEAST_RATE, _MOST_RATE = 1e-3, 1e3


@dataclass(frozen=True)
class ReplayJob:
    """The checked input, ground truth and output of a replay."""

    source: Source
    name: str
    truth: PoseTrack | None
    out: Path
    rate: float  # 0: lossless


def main(argv: list[str] | None = None) -> int:
    """Run the program; return its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # also if the shell ignores them
        signal.signal(number, signal.default_int_handler)
    argv = sys.argv if argv is None else [PROGRAM, *argv]
    try:
        args = _parser().parse_args(_without_ros_args(argv)[1:])
        job = _check(args)
        _init_ros(args, argv)
        return _replay(job, args)
    except (PlayerError, OSError) as error:
        _say_error(str(error))
        return 1
    except UserError as error:
        _say_error(str(error))
        return 2
    except KeyboardInterrupt:
        _say_error('interrupted, nothing was written')
        return 1
    finally:
        rclpy.try_shutdown()


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='Defaults in brackets. After --ros-args: ROS arguments of the mapping node.',
    )
    add = parser.add_argument
    add('source', type=Path, metavar='SOURCE', help='folder of images, video, rosbag2, ROS 1 bag')
    add('--out', type=Path, metavar='DIR', help='output folder (results/NAME)')
    add('--checkpoint', metavar='C', help='parameter checkpoint of the node')
    add('--model', choices=MODEL_PRESETS, help='parameter model of the node')
    add('--params', type=Path, metavar='FILE', help='parameter file of the node')
    add('--image-topic', default='', metavar='T', help='image topic of the bag (the only one)')
    add(
        '--ground-truth',
        default='',
        metavar='T',
        help='ground truth to compare with: a pose topic of the bag, a TUM, KITTI or EuRoC file, '
        'or none (that of the recording, if any)',
    )
    add('--gt-frame', default='', metavar='F', help='child frame to use of a tf topic')
    add(
        '--frame-id',
        metavar='F',
        help='frame id of the images (that of the bag, else camera_optical_frame)',
    )
    add(
        '--fps',
        type=float,
        default=0.0,
        metavar='N',
        help='image rate of a folder [Hz] (10), or frames per second to use of a video (all)',
    )
    add(
        '--rate',
        type=float,
        default=0.0,
        metavar='R',
        help='play at R times real time with /clock and drop images as on a robot (lossless, as '
        'fast as possible)',
    )
    return parser


def _check(args: argparse.Namespace) -> ReplayJob:
    if args.rate and not _LEAST_RATE <= args.rate <= _MOST_RATE:
        raise UserError(f'--rate is {args.rate}: set it to {_LEAST_RATE:g} to {_MOST_RATE:g}')
    if args.params is not None and not args.params.is_file():
        raise UserError(f"--params: '{args.params}' is not a file")
    source = open_source(args.source, args.image_topic, args.fps)
    truth = find_truth(args.source, source, args.ground_truth, args.gt_frame)
    path = args.source.resolve()
    name = path.name if path.is_dir() else path.stem
    out = args.out or Path('results') / name
    if (out / RUN_FILE).exists():
        raise UserError(f"--out: '{out}' contains an evaluation: choose another folder")
    _check_writable(out)
    return ReplayJob(source, name, truth, out, args.rate)


def _check_writable(out: Path) -> None:
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing):  # permissions are not enough to know
            pass
    except OSError:
        raise UserError(f"--out: '{existing}' is not a writable folder") from None


def _without_ros_args(argv: list[str]) -> list[str]:
    try:
        return remove_ros_args(argv)
    except RuntimeError as error:  # raised by rclpy for invalid arguments
        raise UserError(_ros_reason(error)) from None


def _init_ros(args: argparse.Namespace, argv: list[str]) -> None:
    params = [] if args.params is None else ['--ros-args', '--params-file', str(args.params)]
    try:
        # Python handles signals, so that what was played before one is still written.
        rclpy.init(args=argv + params, signal_handler_options=SignalHandlerOptions.NO)
    except RuntimeError as error:
        raise UserError(_ros_reason(error)) from None


def _ros_reason(error: RuntimeError) -> str:
    """Return the text of an rclpy error in one line, without its source locations."""
    return ' '.join(str(error).split(', at ')[0].split())


def _replay(job: ReplayJob, args: argparse.Namespace) -> int:
    node = LingbotMapNode(
        parameter_overrides=_overrides(args), diagnostics_period_s=_DIAGNOSTICS_PERIOD_S
    )
    with _spinning(node):
        try:
            success = TransitionCallbackReturn.SUCCESS
            if node.trigger_configure() != success or node.trigger_activate() != success:
                return 2  # the node has logged why
            settings = {p.name: p.value for p in node.get_parameters(PARAMETERS)}
            player = Player(node, args.frame_id or job.source.frame_id)
            with _spinning(player):
                player.wait_for_node()
                player.check_alone()
                interrupted = _play(player, job)
                player.flush()
                player.check_alone()  # discovery may have taken until now
                points = (
                    player.read_map()
                    if settings['map.voxel_size'] and player.received
                    else (np.empty(0, POINT_DTYPE))
                )
        finally:
            node.close(_CLOSE_S)
    return _conclude(job, player, points, settings, interrupted)


def _overrides(args: argparse.Namespace) -> list[Parameter]:
    values = {
        'autostart': False,
        'motion_gate': False,  # every image gets a pose
        'image_transport': 'raw',  # sent by the player
        'queue': 'latest' if args.rate else 'lossless',
        'checkpoint': args.checkpoint,
        'model': args.model,
    }
    return [Parameter(name, value=value) for name, value in values.items() if value is not None]


@contextmanager
def _spinning(node: Node) -> Iterator[None]:
    """Spin a node in its own thread during the block, then destroy it."""
    executor = NodeExecutor()
    executor.add_node(node)
    thread = threading.Thread(target=executor.spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        executor.shutdown(_CLOSE_S)
        thread.join(_CLOSE_S)
        node.destroy_node()


def _play(player: Player, job: ReplayJob) -> bool:
    """Send all images; return whether Ctrl-C or damaged input ended it early."""
    first_ns, start_s = None, 0.0
    try:
        for stamp_ns, rgb in tqdm(job.source, desc='replay', unit='image'):
            if not job.rate:
                player.wait_for_processed(IN_FLIGHT)
            elif first_ns is not None:
                due_s = start_s + (stamp_ns - first_ns) * 1e-9 / job.rate
                time.sleep(max(0.0, due_s - time.monotonic()))
            player.send(stamp_ns, rgb)
            if job.rate and first_ns is None:
                player.wait_for_processed(0)  # the node warms up for the image size
                first_ns, start_s = stamp_ns, time.monotonic()
                player.start_clock(first_ns, job.rate)
    except KeyboardInterrupt:
        _say_error(
            f'interrupted after {len(player.sent)} of {len(job.source)} images: finishing them'
        )
        return True
    except SourceError as error:
        if not player.sent:
            raise
        _say_error(f'{error}: finishing the {len(player.sent)} images before it')
        return True
    return False


def _conclude(
    job: ReplayJob, player: Player, points: np.ndarray, settings: dict, interrupted: bool
) -> int:
    """Write and print the results; return the exit code."""
    stamps_ns, T_map_cam = player.trajectory()
    comparison = None
    if job.truth is not None:
        try:
            comparison = results.compare(stamps_ns, T_map_cam, job.truth)
        except MetricsError as error:
            _say_error(f'no comparison with {job.truth.name}: {error}')
    summary = results.summarize(player, job.source, comparison, settings | {'rate': job.rate})
    random = settings['checkpoint'] == 'random'
    title = f'{job.name}: {summary.frames_out} poses' + (', random weights' if random else '')
    results.write(
        job.out, title, summary, results.Drawing(stamps_ns, T_map_cam, points, comparison)
    )
    _say(summary.line())
    if comparison is not None:
        _say(comparison.line())
    if random:
        _say('The weights are random: path and map mean nothing.')
    _say(f'wrote {job.out}: trajectory.tum map.ply map.png summary.json')
    return 1 if summary.lost or interrupted else 0


def _say(line: str) -> None:
    sys.stdout.write(f'{line}\n')


def _say_error(line: str) -> None:
    sys.stderr.write(f'{PROGRAM}: {line}\n')


if __name__ == '__main__':
    sys.exit(main())
