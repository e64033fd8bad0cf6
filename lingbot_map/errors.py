"""Error messages of one line, for errors of the user and unexpected ones."""

from __future__ import annotations

import os


class UserError(ValueError):
    """An error that the user can correct; the message names it and the remedy in one line."""


def describe(error: BaseException) -> str:
    """Return type, message and source line of an error, in one line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    text = f'{type(error).__name__}: {str(error).strip()}'
    if trace is None:
        return text
    return f'{text} ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})'
