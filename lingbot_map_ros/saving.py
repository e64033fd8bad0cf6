"""Files that the services write."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path


def save(directory: str, name: str, write: Callable[[Path], None]) -> Path:
    """
    Have `write` make a file in `directory` (made if missing); return where: the name and the time.

    OSError: the directory or the file cannot be written.
    """
    folder = Path(directory).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    stem, _, suffix = name.rpartition('.')
    path = folder / f'{stem}_{datetime.now():%Y%m%d_%H%M%S_%f}.{suffix}'
    write(path)
    return path
