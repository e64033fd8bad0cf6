"""
Evaluate recordings: every image in order through the node's engine, without ROS.

Each recording gets a folder DIR/NAME with trajectory, map, figures, pictures and report.html;
several also a table. Finished ones are skipped when the same command runs again. Exit code 0:
all are evaluated; 1: some are not; 2: none is, because of bad input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import functools
import json
from pathlib import Path
import signal
import sys

from lingbot_map.evaluation.arguments import inputs_and_settings, make_parser, say_error
from lingbot_map.evaluation.engine import load, Loaded, versions
from lingbot_map.evaluation.folders import is_finished, only_writer, Recording, unique_names
from lingbot_map.evaluation.metrics import MetricsError
from lingbot_map.evaluation.recording import evaluate, Plan, plan
from lingbot_map.evaluation.rerun_log import require_rerun
from lingbot_map.evaluation.results import line
from lingbot_map.evaluation.run import deterministic_kernels
from lingbot_map.evaluation.settings import SettingsError
from lingbot_map.evaluation.tables import table_row, write_tables
from lingbot_map.images.mask import MaskError
from lingbot_map.recordings.source import open_source, SourceError
from lingbot_map.streaming.checkpoint import CheckpointError
from lingbot_map.streaming.memory_fit import MemoryLimitError
from lingbot_map_ros.parameter_spec import ParameterError
import torch

_BAD_INPUT = (
    SourceError,
    MetricsError,
    MaskError,
    SettingsError,
    ParameterError,
    CheckpointError,
    MemoryLimitError,
)


@dataclass(frozen=True)
class Job:
    """What all recordings of one call share."""

    settings: dict
    kernels: dict  # what deterministic_kernels chose
    out: Path
    rerun: Path | None


def main(argv: list[str] | None = None) -> int:
    """Run the program; return its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has them ignored
        signal.signal(number, signal.default_int_handler)
    args = vars(make_parser(__doc__).parse_args(argv))
    out, overwrite, rerun = args.pop('out'), args.pop('overwrite'), args.pop('rerun')
    try:
        paths, settings = inputs_and_settings(args)
        recordings = _open(paths, settings)
        _check_rerun(rerun, len(recordings))
        with only_writer(out), deterministic_kernels() as kernels:
            todo = [r for r in recordings if overwrite or not is_finished(out, r, settings)]
            if rerun is not None and not todo:
                raise SettingsError('it is finished already: add --overwrite for a --rerun file')
            job = Job(settings, kernels, out, rerun)
            return _evaluate_all(recordings, todo, job)
    except _BAD_INPUT as error:
        say_error(str(error))
        return 2
    except OSError as error:
        say_error(str(error))
        return 1
    except KeyboardInterrupt:
        say_error('interrupted')
        return 1


def _open(paths: list[Path], settings: dict) -> list[Recording]:
    """Open all recordings, so that a wrong name shows before the first one runs."""
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


def _evaluate_all(recordings: list[Recording], todo: list[Recording], job: Job) -> int:
    load_once = functools.cache(lambda: load(job.settings))  # once the first input is checked
    done = [recording for recording in recordings if recording not in todo]
    stopped = False
    for recording in done:
        _say(f'{recording.name}: finished before, skipped')
    for recording in todo:
        try:
            _evaluate_one(plan(recording, job.settings, job.rerun), load_once, job)
        except (*_BAD_INPUT, torch.OutOfMemoryError) as error:
            say_error(f'{recording.name}: {_reason(error)}')
            continue
        except KeyboardInterrupt:
            say_error(f'{recording.name}: interrupted, it starts again next time')
            stopped = True
            break
        except OSError as error:  # the disk is full, and would be for the next ones
            reason = error.strerror or error
            say_error(
                f"{recording.name}: '{job.out}' cannot be written ({reason}): make room, then run "
                'the command again'
            )
            stopped = True
            break
        done.append(recording)
        _write_tables([r for r in recordings if r in done], job.out)
    if len(done) < len(recordings) > 1:
        kept = f"{len(done)} of {len(recordings)} recordings are finished and kept in '{job.out}'"
        say_error(kept if done else 'nothing was written')
    return 0 if len(done) == len(recordings) else 1 if done or stopped else 2


def _evaluate_one(planned: Plan, load_once: Callable[[], Loaded], job: Job) -> None:
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


def _figures(folder: Path) -> tuple[dict, dict]:
    """Return metrics.json and timing.json of a finished evaluation."""
    try:
        return tuple(json.loads((folder / f'{n}.json').read_text()) for n in ('metrics', 'timing'))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"'{folder}' is damaged, add --overwrite to evaluate it again: {error}"
        ) from None


def _write_tables(done: list[Recording], out: Path) -> None:
    if len(done) > 1:
        rows = {recording.name: table_row(*_figures(out / recording.name)) for recording in done}
        write_tables(out, rows)


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
