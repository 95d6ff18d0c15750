"""How a ledger lies in memory and on disk: one table of 64-byte cells, each of eight 64-bit words.

The first byte of a cell is its tag. Every cell is written words 1 to 7 first and word 0 last, into zeroed memory that
the operating system keeps when the process is killed. So the table is valid up to the first zero tag at any moment, and
a recording that ended by a signal can be read like any other. Words that change later (last use, free, roles) are
written in place.

    word        0                                              1..7
    HEADER      magic (2 words)                                2: version, 3: bytes per cell, 4: 1 (byte order)
    META        tag | length << 32                             text, continued in MORE cells: metadata as JSON
    STRING      tag | length << 32                             text, continued in MORE cells; numbered in order
    MORE        tag                                            text
    DEVICE      tag                                            1: string; numbered in order
    FRAME       tag                                            1: caller + 1, 2: string; numbered in order
    ALLOCATION  tag | phase << 8 | device << 16                1: bytes, 2: allocated, 3: time, 4: module + 1 |
                | category + 1 << 24 | micro-batch + 1 << 32   operator + 1 << 32, 5: last used, 6: freed,
                                                               7: frame + 1 | roles << 32
    MARK        tag | kind << 8 | micro-batch + 1 << 32        1: index, 2: time, 3: value, 4: string + 1
    HOST        tag                                            1: index, 2: time, 3: step, 4: resident, 5: pinned,
                                                               6: reserved, 7: idle + 1
    LINK        tag                                            1: cell of an allocation, 2: cell of the one it replaced
    REACH       tag                                            1: cell of an allocation, 2: bytes
    END         tag                                            1: index after the last event
    OWNER       tag | kind << 8                                1: cell of an allocation, 2: string, 3: string + 1
    MADE        tag                                            1: cell of an allocation, 2: index
"""

from __future__ import annotations

from typing import Final

MAGIC: Final = b"evenload-ledger\n"
VERSION: Final = 1
BYTE_ORDER: Final = 1

WORDS: Final = 8
"""Words of a cell."""
CELL: Final = 64
"""Bytes of a cell."""
TEXT: Final = CELL - 8
"""Bytes of text that one cell holds."""

META: Final = 1
STRING: Final = 2
MORE: Final = 3
DEVICE: Final = 4
FRAME: Final = 5
ALLOCATION: Final = 6
MARK: Final = 7
HOST: Final = 8
LINK: Final = 9
REACH: Final = 10
END: Final = 11
OWNER: Final = 12
MADE: Final = 13
TAGS: Final = frozenset(range(META, MADE + 1))

NBYTES: Final = 1
ALLOCATED: Final = 2
TIME: Final = 3
NAMES: Final = 4
LAST_USED: Final = 5
FREED: Final = 6
SOURCE_AND_ROLES: Final = 7

PHASE_SHIFT: Final = 8
DEVICE_SHIFT: Final = 16
CATEGORY_SHIFT: Final = 24
UPPER: Final = 32
"""Shift of the upper half of a word."""
HALF: Final = 0xFFFF_FFFF
"""Mask of the lower half of a word."""


def text_cells(length: int) -> int:
    """Cells that a text of `length` bytes takes, at least one."""
    return max(1, -(-length // TEXT))
