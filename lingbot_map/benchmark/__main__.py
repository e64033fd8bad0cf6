"""
Measure speed, accuracy and memory of the network: python3 -m lingbot_map.benchmark.

Frame times start with the frame on the device and end with the pose in host memory. The frame rate
includes the scale batch and all later frames. Progress is printed to stderr.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
import json
from pathlib import Path
import shlex
import sys

from lingbot_map.benchmark.accuracy import accuracy_lines, accuracy_values, deviations
from lingbot_map.benchmark.arguments import kept_frames, parse, setup_of, SWEEP_FRAMES
from lingbot_map.benchmark.report import (
    comparison_lines,
    memory_line,
    origin,
    origin_lines,
    run_lines,
    run_values,
    setup_line,
)
from lingbot_map.benchmark.setup import host_weights, Setup
from lingbot_map.benchmark.soak import soak, soak_lines, soak_values
from lingbot_map.benchmark.speed import measure
from lingbot_map.errors import UserError
from lingbot_map.streaming.compiling import use_compile_cache
import torch
from torch import Tensor

_INTERRUPTED = 130  # exit status of a shell after SIGINT

Found = tuple[list[str], dict[str, object]]  # lines to print, values for JSON
Measurement = Callable[[argparse.Namespace, Setup, dict[str, Tensor]], Found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 0, 2 if the measurement is not possible, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = parse(arguments, __doc__)
    command = shlex.join(['python3', '-m', 'lingbot_map.benchmark', *arguments])
    try:
        use_compile_cache(args.compile_cache_dir)
        with torch.inference_mode():  # as in the node; changing the mode would recompile
            setup = setup_of(args)
            if setup.model == 'full' and setup.device.type == 'cpu':
                _log(
                    'the full network takes long on a CPU; try --model demo --image-width 168 '
                    '--image-height 126 --frames 100'
                )
            lines, values = _measurement(args)(args, setup, host_weights(setup))
    except UserError as error:
        return _refuse(str(error))
    except torch.OutOfMemoryError:
        return _refuse(
            'out of device memory: lower --max-keyframes, --sliding-window or --image-width'
        )
    except KeyboardInterrupt:
        sys.stderr.write('interrupted: nothing was written\n')
        return _INTERRUPTED
    made = origin(command, setup.device)
    sys.stdout.write('\n'.join([*origin_lines(made), setup_line(setup), *lines]) + '\n')
    if args.json is not None:
        return _write(args.json, made | values)
    return 0


def _write(file: Path, values: dict[str, object]) -> int:
    try:
        file.write_text(json.dumps(values, indent=1) + '\n')
    except OSError as error:  # e.g. the disk is full
        return _refuse(f"--json '{file}' cannot be written ({error.strerror})")
    return 0


def _measurement(args: argparse.Namespace) -> Measurement:
    if args.accuracy:
        return _accuracy
    if args.soak is not None:
        return _soak
    if args.sweep:
        return _sweep
    return _compare if args.compare else _run


def _run(args: argparse.Namespace, setup: Setup, weights: dict[str, Tensor]) -> Found:
    run = measure(setup, weights, args.frames, _log, outside=True)
    return [memory_line(setup), *run_lines(run)], {'runs': [run_values(run)]}


def _compare(args: argparse.Namespace, setup: Setup, weights: dict[str, Tensor]) -> Found:
    runs = [
        measure(replace(setup, compile_mode=mode), weights, args.frames, _log)
        for mode in args.compare
    ]
    lines = [memory_line(setup), '', *comparison_lines(runs, [run.label for run in runs])]
    return lines, {'runs': [run_values(run) for run in runs]}


def _sweep(args: argparse.Namespace, setup: Setup, weights: dict[str, Tensor]) -> Found:
    counts = [count for count in SWEEP_FRAMES if count <= args.frames]
    runs = [
        measure(replace(setup, max_keyframes=kept_frames(args, count)), weights, count, _log)
        for count in counts
    ]
    labels = [f'{count} frames, memory for {kept_frames(args, count)}' for count in counts]
    return ['', *comparison_lines(runs, labels)], {'runs': [run_values(run) for run in runs]}


def _accuracy(args: argparse.Namespace, setup: Setup, weights: dict[str, Tensor]) -> Found:
    modes = args.compare or [setup.compile_mode]
    found = deviations(setup, modes, weights, args.frames, _log)
    return [memory_line(setup), '', *accuracy_lines(found)], {'deviations': accuracy_values(found)}


def _soak(args: argparse.Namespace, setup: Setup, weights: dict[str, Tensor]) -> Found:
    found = soak(setup, weights, args.frames, _log)
    return [memory_line(setup), '', *soak_lines(found)], {'soak': soak_values(found)}


def _log(text: str) -> None:
    sys.stderr.write(f'benchmark: {text}\n')


def _refuse(reason: str) -> int:
    sys.stderr.write(f'error: {reason}\n')
    return 2


if __name__ == '__main__':
    sys.exit(main())
