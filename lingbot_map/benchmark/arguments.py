"""The command line of the benchmark, and the checks that come before minutes of loading."""

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
import os
from pathlib import Path
import tempfile

from lingbot_map.benchmark.setup import Setup
from lingbot_map.cli import Parser
from lingbot_map.config import (
    COMPILE_MODES,
)
from lingbot_map.errors import UserError
from lingbot_map.settings import add_flag, flag, NetworkSettings, specs_of, StreamConfig
import torch

SWEEP_FRAMES = (100, 300, 1000, 3000)
_FRAMES = {'accuracy': 100, 'sweep': SWEEP_FRAMES[-1]}  # else 500, as the usual profile of it
_MAX_KEYFRAMES = 1024  # of the original's cache
_SOAK_MAX_KEYFRAMES = 320  # the node's default
_PATCH = 14
_SPECS = specs_of(NetworkSettings) | specs_of(StreamConfig)
_SPECS['model'] = replace(_SPECS['model'], default='full')
_SETTINGS = (
    'model',
    'image_width',
    'num_scale_frames',
    'sliding_window',
    'keyframe_interval',
    'compile_mode',
    'attention_backend',
    'dtype',
    'heads_dtype',
    'compile_cache_dir',
)


def parse(arguments: Sequence[str] | None, description: str) -> argparse.Namespace:
    """Return the arguments, complete and checked; exit with 2 and one line if one is wrong."""
    parser = Parser(prog='python3 -m lingbot_map.benchmark', description=description)
    _add_kinds(parser)
    _add_settings(parser)
    args = parser.parse_args(arguments)
    _complete(args)
    problem = _problem(args)
    if problem:
        parser.error(problem)
    return args


def setup_of(args: argparse.Namespace) -> Setup:
    """Return the set-up that the arguments describe."""
    values = {item.name: getattr(args, item.name) for item in fields(Setup)}
    return Setup(**values)


def kept_frames(args: argparse.Namespace, frames: int) -> int:
    """Return how many of so many frames become keyframes."""
    return args.num_scale_frames - (args.num_scale_frames - frames) // args.keyframe_interval


def _add_kinds(parser: argparse.ArgumentParser) -> None:
    add = parser.add_mutually_exclusive_group().add_argument
    add(
        '--sweep',
        choices=('frames',),
        help=f'run {", ".join(map(str, SWEEP_FRAMES))} frames, as far as --frames goes, each with '
        'a memory for as many keyframes as they need',
    )
    add(
        '--accuracy',
        action='store_true',
        help='run a rendered room in float32 and off, then in these settings and in the same '
        'dtype off, and compare poses and depth',
    )
    add(
        '--soak',
        type=int,
        metavar='N',
        help='run N frames with roll-over and print time and memory on the way',
    )
    parser.add_argument(
        '--compare',
        type=_modes,
        metavar='MODE,MODE',
        help='several compile modes one after the other, as a table; also with --accuracy',
    )
    parser.add_argument('--json', type=Path, metavar='FILE', help='also write all figures there')


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the settings of the engine; some have defaults of their own here."""
    for name in _SETTINGS:
        add_flag(parser, name, _SPECS[name], choices=_SPECS[name].choices or None)
    add = parser.add_argument
    add(
        '--max-keyframes',
        type=int,
        metavar='N',
        help=f'keyframe capacity; {_MAX_KEYFRAMES}, or as many as the frames need; '
        f'with --on-limit roll_over {_SOAK_MAX_KEYFRAMES}',
    )
    add(
        '--on-limit',
        choices=('stop', 'roll_over'),
        help='at --max-keyframes; stop, with --soak roll_over',
    )
    add(
        '--image-height',
        type=int,
        default=378,
        metavar='N',
        help='of the images [px] (%(default)s)',
    )
    add(
        '--frames',
        type=int,
        metavar='N',
        help='including the scale batch; 500, with --accuracy 100, with --sweep 3000',
    )
    add(
        '--weights',
        default='random',
        help="random, recipe (the same on every machine), a file, or '' for packaged ones",
    )
    add(
        '--device',
        type=_device,
        default=_device('cuda' if torch.cuda.is_available() else 'cpu'),
        help='cpu, cuda or cuda:N; CUDA if there is one',
    )


def _complete(args: argparse.Namespace) -> None:
    """Fill in the defaults that depend on what is measured."""
    if args.frames is None:
        kind = 'accuracy' if args.accuracy else 'sweep' if args.sweep else ''
        args.frames = _FRAMES.get(kind, 500) if args.soak is None else args.soak
    args.on_limit = args.on_limit or ('stop' if args.soak is None else 'roll_over')
    args.given_max_keyframes = args.max_keyframes
    if args.max_keyframes is None and args.on_limit == 'roll_over':
        args.max_keyframes = _SOAK_MAX_KEYFRAMES
    elif args.max_keyframes is None and args.keyframe_interval > 0:
        args.max_keyframes = max(_MAX_KEYFRAMES, kept_frames(args, args.frames))


def _problem(args: argparse.Namespace) -> str:
    """Return what is wrong with arguments that are fine by themselves, or an empty text."""
    for name in ('image_width', 'image_height'):
        value = getattr(args, name)
        if value < _PATCH or value % _PATCH:
            return f'{flag(name)} is {value}: it must be a multiple of the patch size {_PATCH}'
    if args.image_height > args.image_width:
        return (
            f'--image-height is {args.image_height}: the network crops what is higher than '
            f'--image-width ({args.image_width})'
        )
    if args.num_scale_frames < 1 or args.keyframe_interval < 1:
        return '--num-scale-frames and --keyframe-interval must be at least 1'
    return _problem_of_kind(args) or _problem_of_frames(args) or _problem_of_stream(args)


def _problem_of_kind(args: argparse.Namespace) -> str:
    if args.compare and (args.sweep or args.soak is not None):
        return '--compare goes with --accuracy or alone, not with --sweep or --soak'
    if args.soak is not None and args.frames != args.soak:
        return f'--soak {args.soak} is the number of frames: leave out --frames'
    if args.sweep and args.given_max_keyframes is not None:
        return '--sweep gives each run the memory that it needs: leave out --max-keyframes'
    if args.sweep and args.frames < SWEEP_FRAMES[0]:
        return f'--frames is {args.frames}: --sweep needs at least {SWEEP_FRAMES[0]}'
    return '' if args.json is None else _problem_of_file(args.json)


def _problem_of_file(file: Path) -> str:
    """Return why the figures could not be written there in the end, or an empty text."""
    if not file.parent.is_dir():
        return f"--json '{file}': there is no folder '{file.parent}'"
    if file.is_dir():
        return f"--json '{file}' is a folder: add the name of a file"
    if file.exists() and not os.access(file, os.W_OK):
        return f"--json '{file}' cannot be overwritten: choose another file"
    try:
        if not file.exists():
            tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        return f"--json '{file}' cannot be written ({error.strerror}): choose another folder"
    return ''


def _problem_of_frames(args: argparse.Namespace) -> str:
    given = '--frames' if args.soak is None else '--soak'
    if args.frames <= args.num_scale_frames:
        return (
            f'{given} is {args.frames}: give more than the {args.num_scale_frames} '
            'of --num-scale-frames'
        )
    needed = kept_frames(args, args.frames)
    if args.on_limit == 'stop' and args.max_keyframes < needed:
        return (
            f'--max-keyframes is {args.max_keyframes}, but {args.frames} frames make {needed} '
            'keyframes: raise it, or set --on-limit roll_over'
        )
    return ''


def _problem_of_stream(args: argparse.Namespace) -> str:
    try:
        setup = setup_of(args)
        setup.stream_config()
        for mode in args.compare or [setup.compile_mode]:
            replace(setup, compile_mode=mode).execution()
    except UserError as error:
        return str(error)
    return ''


def _modes(text: str) -> list[str]:
    modes = text.split(',')
    for mode in modes:
        if mode not in COMPILE_MODES:
            raise argparse.ArgumentTypeError(
                f"'{mode}' is no compile mode: use {', '.join(COMPILE_MODES)}"
            )
    if len(set(modes)) < max(len(modes), 2):
        raise argparse.ArgumentTypeError(f"'{text}': give two or more different modes")
    return modes


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device('meta')
    if device.type not in ('cpu', 'cuda'):
        raise argparse.ArgumentTypeError(f"'{name}' is unknown: use cpu, cuda or cuda:N")
    if device.type == 'cuda' and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"'{name}': torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        )
    return device
