"""Folders to write to, which a user has named."""

import errno
from pathlib import Path
import tempfile


def writable_folder(name: str) -> Path:
    """
    Return the folder `name`, made if missing, ~ replaced and absolute.

    :raises OSError: nothing can be written there; a trial says so, since permissions do not tell.
    """
    try:
        folder = Path(name).expanduser().absolute()
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, 'there is no such user', name) from None
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return folder
