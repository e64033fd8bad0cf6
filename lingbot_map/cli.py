"""Command lines that are refused in one line, and folders that a user has named."""

import argparse
import errno
from pathlib import Path
import re
import tempfile
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """
    Says what is wrong in one line, without the usage, which hides it; exits with 2.

    Negative numbers with an exponent, -1e-3, are values as in Python 3.14, and no flags.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._negative_number_matcher = re.compile(r'-\.?\d')

    def error(self, message: str) -> NoReturn:
        """Exit with 2 after one line on stderr."""
        self.exit(2, f'error: {message}\n')


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
