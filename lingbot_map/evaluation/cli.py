"""
Evaluate recordings: run every image in order through the node's engine, without ROS.

Each recording gets a folder DIR/NAME with trajectory, map, metrics, plots and report.html; several
recordings also get a table. Finished recordings are skipped when the same command runs again. Exit
code 0: all were evaluated; 1: some were not; 2: none was, because of bad input.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
import functools
import json
from pathlib import Path
import signal
import sys

from lingbot_map.cli import Parser
from lingbot_map.errors import UserError
from lingbot_map.evaluation.engine import load, Loaded, versions
from lingbot_map.evaluation.exports import require_rerun
from lingbot_map.evaluation.folders import (
    is_finished,
    Recording,
    size_of,
    unique_names,
    whole_folder,
    writable_folder,
)
from lingbot_map.evaluation.outputs import EvaluationFiles, line
from lingbot_map.evaluation.recording import Plan, plan
from lingbot_map.evaluation.report import table_row, write_table
from lingbot_map.evaluation.run import deterministic_kernels, run_recording, timing_values
from lingbot_map.evaluation.settings import (
    add_arguments,
    complete,
    read_config,
    read_node_params,
    SettingsError,
)
from lingbot_map.recordings.open import NO_TRUTH, open_source
from lingbot_map.recordings.source import SourceError
from lingbot_map.streaming.engine import StreamEngine
import torch
from tqdm import tqdm

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
    """Return recordings and settings; given values take precedence over those of a file."""
    paths, config, params = (given.pop(name) for name in ('recordings', 'config', 'params'))
    values = {} if params is None else read_node_params(params)
    if config is not None:
        content = read_config(config)
        values = content['settings'] | content['resolved']
        paths = paths or [Path(str(content['input'].get('path')))]
        _warn_of_versions(config, content['versions'])
    settings = complete(values | given)
    if not paths:
        raise SettingsError('name a recording, or pass an earlier run.yaml with --config')
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
        say_error(f"'{config}' was made with {', '.join(changed)}: results may differ")


def say_error(text: str) -> None:
    """Print a line on stderr, prefixed with the name of the program."""
    sys.stderr.write(f'{PROGRAM}: {text}\n')


@dataclass(frozen=True)
class EvaluationJob:
    """What all recordings of one call have in common."""

    settings: dict
    kernels: dict  # chosen by deterministic_kernels
    out: Path
    rerun: Path | None


def main(argv: list[str] | None = None) -> int:
    """Run the program; return its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # even if the shell ignores them
        signal.signal(number, signal.default_int_handler)
    args = vars(make_parser(__doc__).parse_args(argv))
    out, overwrite, rerun = args.pop('out'), args.pop('overwrite'), args.pop('rerun')
    try:
        paths, settings = inputs_and_settings(args)
        recordings = _open(paths, settings)
        _check_rerun(rerun, len(recordings))
        with writable_folder(out), deterministic_kernels() as kernels:
            todo = [r for r in recordings if overwrite or not is_finished(out, r, settings)]
            if rerun is not None and not todo:
                raise SettingsError('it is finished already: add --overwrite for a --rerun file')
            job = EvaluationJob(settings, kernels, out, rerun)
            return _evaluate_all(recordings, todo, job)
    except UserError as error:
        say_error(str(error))
        return 2
    except OSError as error:
        say_error(str(error))
        return 1
    except KeyboardInterrupt:
        say_error('interrupted')
        return 1


def _open(paths: list[Path], settings: dict) -> list[Recording]:
    """Open all recordings, so that a wrong name is an error before the first one runs."""
    topic, fps = settings['image_topic'], settings['fps']
    sources = [open_source(path, topic, fps) for path in paths]
    paths = [path.resolve() for path in paths]
    names = unique_names(paths)
    return [Recording(*parts) for parts in zip(paths, names, sources, strict=True)]


def _check_rerun(rerun: Path | None, recordings: int) -> None:
    if rerun is None:
        return
    if recordings > 1:
        raise SettingsError(f"--rerun '{rerun}' is one file: evaluate one recording with it")
    if rerun.is_dir():
        raise SettingsError(f"--rerun '{rerun}' is a folder: add the name of a file")
    require_rerun()


def _evaluate_all(recordings: list[Recording], todo: list[Recording], job: EvaluationJob) -> int:
    load_once = functools.cache(lambda: load(job.settings))  # after the first input is checked
    done = [recording for recording in recordings if recording not in todo]
    stopped = False
    for recording in done:
        _say(f'{recording.name}: finished before, skipped')
    for recording in todo:
        try:
            _evaluate_one(plan(recording, job.settings, job.rerun), load_once, job)
        except (UserError, torch.OutOfMemoryError) as error:
            say_error(f'{recording.name}: {_reason(error)}')
            continue
        except KeyboardInterrupt:
            say_error(f'{recording.name}: interrupted, the next call starts it again')
            stopped = True
            break
        except OSError as error:  # probably a full disk, so the next ones would fail too
            reason = error.strerror or error
            say_error(
                f"{recording.name}: '{job.out}' cannot be written ({reason}): make room, then run "
                'the command again'
            )
            stopped = True
            break
        done.append(recording)
        _write_table([r for r in recordings if r in done], job.out)
    if len(done) < len(recordings) > 1:
        kept = f"{len(done)} of {len(recordings)} recordings are finished and kept in '{job.out}'"
        say_error(kept if done else 'nothing was written')
    return 0 if len(done) == len(recordings) else 1 if done or stopped else 2


def _evaluate_one(planned: Plan, load_once: Callable[[], Loaded], job: EvaluationJob) -> None:
    source, folder = planned.recording.source, job.out / planned.recording.name
    for topic, kind, count in getattr(source, 'topics', ()):
        mark = '*' if topic == source.image_topic else ' '
        _say(f'  {mark} {topic} ({kind}, {count} messages)')
    loaded = load_once()
    record = {
        'settings': planned.settings,
        'resolved': loaded.resolved,
        'kernels': job.kernels,
        'weights_sha256': loaded.weights_sha256,
        'versions': versions(),
    }
    evaluate(planned, loaded.engine, loaded.device, folder, record)
    metrics, times = _figures(folder)
    _say(line(planned.recording.name, metrics, times))
    for note in metrics['notes']:
        _say(f'  {note}')
    _say(f'wrote {folder}: report.html and {len(list(folder.iterdir())) - 1} more')


def evaluate(
    planned: Plan, engine: StreamEngine, device: torch.device, out: Path, record: dict
) -> None:
    """
    Evaluate a recording and write all files into the folder `out`.

    `record` is the part of run.yaml that all recordings have in common. The folder is only created
    once all files are complete.
    """
    settings, images = planned.settings, planned.images
    engine.keyframe_interval = planned.keyframe_interval
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
    with whole_folder(out) as folder, EvaluationFiles(folder, planned) as files:
        estimate, timing = run_recording(
            engine,
            tqdm(images, desc=planned.recording.name, unit='image'),
            settings['scale'],
            planned.view_settings,
            files.consumers,
        )
        if not len(estimate.stamps_ns):
            raise SourceError('the network gave no finite pose: nothing to write')
        times = timing_values(timing, estimate, device)
        files.write(estimate, times, _complete_record(planned, engine, record, out.parent))


def _complete_record(planned: Plan, engine: StreamEngine, record: dict, out: Path) -> dict:
    """Return the content of run.yaml, with absolute paths, so that it works from any folder."""
    path, source = planned.recording.path, planned.recording.source
    described = {
        'path': str(path),
        'bytes': size_of(path, out),
        'images': len(planned.images.stamps_ns),
        'skipped': source.skipped,
    }
    resolved = {
        'image_topic': getattr(source, 'image_topic', ''),
        'compile_mode': engine.compile_mode,
        'attention_backend': engine.attention_backend,
    }
    if planned.settings['keyframe_policy'] != 'flow':
        resolved['keyframe_interval'] = planned.keyframe_interval
    truth = Path(planned.settings['ground_truth'])
    if truth.is_file():
        resolved['ground_truth'] = str(truth.resolve())
    return {'input': described} | record | {'resolved': record['resolved'] | resolved}


def _figures(folder: Path) -> tuple[dict, dict]:
    """Return metrics.json and timing.json of a finished evaluation."""
    try:
        return tuple(json.loads((folder / f'{n}.json').read_text()) for n in ('metrics', 'timing'))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"'{folder}' is damaged, add --overwrite to evaluate it again: {error}"
        ) from None


def _write_table(done: list[Recording], out: Path) -> None:
    if len(done) > 1:
        rows = {recording.name: table_row(*_figures(out / recording.name)) for recording in done}
        write_table(out, rows)


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return (
            'the memory of the device is full: lower --sliding-window, --max-keyframes or '
            '--image-width'
        )
    return str(error)


def _say(text: str) -> None:
    sys.stdout.write(f'{text}\n')


if __name__ == '__main__':
    sys.exit(main())
