"""The command line of lingbot_map_evaluate: recordings, files, settings."""

from __future__ import annotations

import argparse
from pathlib import Path
import sys

from lingbot_map.cli import Parser
from lingbot_map.evaluation.engine import versions
from lingbot_map.evaluation.settings import (
    add_arguments,
    complete,
    read_config,
    read_node_params,
    SettingsError,
)
from lingbot_map.recordings.pose_files import NO_TRUTH

PROGRAM = 'lingbot_map_evaluate'


def make_parser(description: str) -> Parser:
    """Return the parser of the program's command line."""
    parser = Parser(
        prog=PROGRAM,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='Defaults in brackets.',
    )
    add = parser.add_argument
    add(
        'recordings',
        nargs='*',
        type=Path,
        metavar='RECORDING',
        help='rosbag2, ROS 1 bag, folder of images or of a data set (TUM RGB-D, EuRoC, KITTI, '
        '7-Scenes), video',
    )
    add(
        '--out',
        type=Path,
        metavar='DIR',
        default=Path('results/evaluation'),
        help='where to write (results/evaluation)',
    )
    files = parser.add_mutually_exclusive_group()
    files.add_argument(
        '--config',
        type=Path,
        metavar='run.yaml',
        help='take settings, and the recording if none is given, from an earlier evaluation',
    )
    files.add_argument(
        '--params',
        type=Path,
        metavar='FILE',
        help="take the settings of the network and the map from the node's parameter file",
    )
    add('--overwrite', action='store_true', help='evaluate finished recordings again')
    add(
        '--rerun',
        type=Path,
        metavar='FILE.rrd',
        help='also write a Rerun recording of the one recording (needs the package rerun-sdk)',
    )
    add_arguments(parser)
    return parser


def inputs_and_settings(given: dict) -> tuple[list[Path], dict]:
    """Return the recordings and the settings: what is given goes before what a file says."""
    paths, config, params = (given.pop(name) for name in ('recordings', 'config', 'params'))
    values = {} if params is None else read_node_params(params)
    if config is not None:
        content = read_config(config)
        values = content['settings'] | content['resolved']
        paths = paths or [Path(str(content['input'].get('path')))]
        _warn_of_versions(config, content['versions'])
    settings = complete(values | given)
    if not paths:
        raise SettingsError('name a recording, or an earlier run.yaml with --config')
    truth = settings['ground_truth']
    if len(paths) > 1 and truth not in ('', NO_TRUTH) and Path(truth).is_file():
        raise SettingsError(
            f"ground_truth is the file '{truth}', which cannot belong to {len(paths)} recordings"
        )
    return paths, settings


def _warn_of_versions(config: Path, recorded: dict) -> None:
    present = versions()
    changed = [
        f'{name} {then} (now {present.get(name)})'
        for name, then in recorded.items()
        if present.get(name) != then
    ]
    if changed:
        say_error(f"'{config}' was made with {', '.join(changed)}: figures may differ")


def say_error(text: str) -> None:
    """Print a line on stderr with the name of the program before it."""
    sys.stderr.write(f'{PROGRAM}: {text}\n')
