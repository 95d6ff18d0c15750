"""What the operating system and the C library say about the memory of this process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_STATM: Final = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Resident set of this process; -1 where the system does not tell."""
    import resource  # noqa: PLC0415  # not on every system

    try:
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return -1


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def _mallinfo() -> Callable[[], Any] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):  # another C library, or one before glibc 2.33
        return None
    function.restype = _Mallinfo
    function.argtypes = ()
    return function


_ASK: Final = _mallinfo()


def idle_bytes() -> int:
    """Bytes that the C allocator has for this process, and nobody uses now; -1 where it does not tell.

    The gaps that tensors on the host leave behind are in it: the resident set grows by them, and nothing leaks.
    """
    return -1 if _ASK is None else int(_ASK().fordblks)
