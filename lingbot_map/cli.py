"""Command line helpers: a parser with errors of one line, and writable folders."""

import argparse
import errno
from pathlib import Path
import re
import tempfile
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """
    Prints errors in one line without the usage, and exits with 2.

    Negative numbers with an exponent (-1e-3) are values, not flags, as in Python 3.14.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._negative_number_matcher = re.compile(r'-\.?\d')

    def error(self, message: str) -> NoReturn:
        """Exit with 2 after one line on stderr."""
        self.exit(2, f'error: {message}\n')


def writable_folder(name: str) -> Path:
    """
    Create the folder `name` if missing; return its absolute path, with ~ replaced.

    :raises OSError: no file can be created there. Tested with a file, since permissions are not
        enough to know.
    """
    try:
        folder = Path(name).expanduser().absolute()
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, 'there is no such user', name) from None
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return folder
