"""Command lines that are refused in one line."""

import argparse
import re
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
