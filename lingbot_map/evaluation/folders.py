"""Result folders of evaluations: their names, and which ones are finished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
import os
from pathlib import Path
import shutil
import tempfile

from lingbot_map.evaluation.settings import read_config, SettingsError
from lingbot_map.recordings.source import Source

RUN_FILE = 'run.yaml'


@dataclass(frozen=True)
class Recording:
    """An opened input."""

    path: Path
    name: str  # of its result folder
    source: Source


def unique_names(paths: list[Path]) -> list[str]:
    """Return names of result folders: the file names, with parent folders where ambiguous."""
    if len(set(paths)) < len(paths):
        raise SettingsError('a recording is given twice')
    stems = [path.parent / (path.name if path.is_dir() else path.stem) for path in paths]
    for depth in range(1, max(len(stem.parts) for stem in stems) + 1):
        names = ['_'.join(stem.parts[-depth:]).strip('/_') or 'recording' for stem in stems]
        if len(set(names)) == len(names):
            return names
    raise SettingsError(f"two recordings are both named '{stems[0]}', except for their suffix")


@contextmanager
def writable_folder(out: Path) -> Iterator[None]:
    """
    Make the folder if it is missing, and remove it at the end if it was made and stays empty.

    Raises SettingsError if it cannot be written.
    """
    if out.exists() and not out.is_dir():
        raise SettingsError(f"--out: '{out}' is not a folder")
    made = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()  # permissions alone do not tell
    except OSError as error:
        raise SettingsError(f"--out: '{out}' cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        if made and not any(out.iterdir()):
            out.rmdir()


def is_finished(out: Path, recording: Recording, settings: dict) -> bool:
    """Return whether this evaluation exists; raise SettingsError if another one does."""
    folder = out / recording.name
    if not folder.exists():
        return False
    if not (folder / RUN_FILE).is_file():
        raise SettingsError(f"'{folder}' exists and is not an evaluation: choose another --out")
    content = read_config(folder / RUN_FILE)
    now = {'path': str(recording.path), 'bytes': size_of(recording.path, out)}
    changed = [
        f'{name} {before.get(name)!r} -> {value!r}'
        for before, after in ((content['input'], now), (content['settings'], settings))
        for name, value in after.items()
        if before.get(name) != value
    ]
    if changed:
        raise SettingsError(
            f"'{folder}' was made with other settings ({', '.join(changed)}): choose "
            'another --out, or add --overwrite'
        )
    return True


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that replaces it if the block succeeds."""
    part, old = (target.with_name(f'.{target.name}.{word}') for word in ('part', 'old'))
    for leftover in (part, old):
        shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        if target.exists():
            os.rename(target, old)
        os.rename(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def size_of(path: Path, out: Path) -> int:
    """Return the size [bytes] of a file, or of a folder without the results in `out`."""
    if path.is_file():
        return path.stat().st_size
    results = out.resolve()
    files = (file for file in path.rglob('*') if results not in file.parents and file.is_file())
    return sum(file.stat().st_size for file in files)
