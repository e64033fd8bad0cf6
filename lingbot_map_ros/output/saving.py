"""Save map and trajectory to files, for the services and autosave."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from lingbot_map.cli import writable_folder
from lingbot_map.errors import UserError
from lingbot_map.mapping.export import write_pcd, write_ply, write_tum
from lingbot_map.settings import ParameterError
from lingbot_map_ros.output.publishing import PublishedMap


class NothingToSave(UserError):
    """There is nothing to save; no file was written."""


def save_map(published: PublishedMap, directory: str) -> list[Path]:
    """
    Write the map as PLY and as PCD into `directory`, created if missing; return both files.

    :raises NothingToSave: the map has no points.
    :raises OSError: the directory or a file cannot be written.
    """
    with published.lock:
        points = published.points.snapshot()
    if not len(points):
        raise NothingToSave('the map is empty, nothing was written')
    ply = _new_path(directory, 'map', 'ply')
    pcd = ply.with_suffix('.pcd')
    write_ply(ply, points)
    write_pcd(pcd, points)
    return [ply, pcd]


def save_trajectory(published: PublishedMap, directory: str) -> list[Path]:
    """Write all poses of the map as TUM into `directory`, as `save_map` does."""
    with published.lock:
        stamps_ns, poses = published.trajectory.export()
    if not poses:
        raise NothingToSave('there are no poses yet, nothing was written')
    path = _new_path(directory, 'trajectory', 'tum')
    write_tum(path, stamps_ns, poses)
    return [path]


def autosave(published: PublishedMap, directory: str, logger) -> None:
    """Write trajectory and map unless empty; log the files, or why there is none."""
    for save in (save_trajectory, save_map):
        try:
            files = save(published, directory)
        except NothingToSave as error:
            logger.info(f'autosave: {error}')
        except OSError as error:
            logger.error(f'{save.__name__} failed: {unwritable("autosave", directory, error)}')
        else:
            logger.info(f'autosave wrote {", ".join(map(str, files))}')


def check_autosave(directory: str) -> None:
    """Create `directory`; raise ParameterError if it is not writable. Empty: do nothing."""
    if not directory:
        return
    try:
        writable_folder(directory)
    except OSError as error:
        raise ParameterError(unwritable('autosave', directory, error)) from error


def unwritable(name: str, directory: str, error: OSError) -> str:
    """Return an error line: the folder in the parameter `name` is not writable."""
    return (
        f"parameter '{name}' is '{directory}', which cannot be written "
        f'({error.strerror or error}): make room there, or choose another folder'
    )


def _new_path(directory: str, stem: str, suffix: str) -> Path:
    folder = writable_folder(directory)
    return folder / f'{stem}_{datetime.now():%Y%m%d_%H%M%S_%f}.{suffix}'
