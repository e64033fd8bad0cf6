"""How the C library treats memory that large messages leave."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_KEPT_BYTES = 128 * 2**20
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # that glibc accepts


def keep_freed_memory() -> None:
    """
    Let glibc keep freed memory for the next message instead of giving it back.

    Otherwise every cloud and image faults its pages in anew, which takes several times as long as
    building and sending it. Other C libraries stay as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
