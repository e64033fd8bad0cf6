"""Command lines that are refused in one line."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage, which hides it; exits with 2."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2 after one line on stderr."""
        self.exit(2, f'error: {message}\n')
