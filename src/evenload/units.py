"""Bytes, seconds and counts: parsed and formatted at the edge, plain numbers inside.

Decimal (kB, MB, GB, TB) and binary (KiB, MiB, GiB, TiB) units are both understood and never mixed: every table of
evenload prints GiB = 2**30 bytes.
"""

from __future__ import annotations

import math
import re
from typing import Final

from evenload.errors import EvenloadError

_FACTORS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_QUANTITY: Final = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*")

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30


def parse_bytes(text: str | int, *, where: str | None = None) -> int:
    """Bytes from `64GiB`, `58 GB`, `53000MB` or a plain number of bytes.

    Raises:
        EvenloadError: the text is no size, the unit is unknown, or the size is not positive and finite.

    Examples:
        >>> parse_bytes("2KiB"), parse_bytes("2kB"), parse_bytes(7)
        (2048, 2000, 7)
    """
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        raise EvenloadError(f"{text!r} is not a size", where=where, fix="write a number and a unit, such as 64GiB")
    number, unit = match.groups()
    factor = _FACTORS.get(unit.upper())
    if factor is None:
        raise EvenloadError(
            f"{text!r} has the unknown unit {unit!r}",
            where=where,
            fix="use B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)",
        )
    size = float(number) * factor
    if not math.isfinite(size) or size < 1:
        raise EvenloadError(f"{text!r} is not a positive size", where=where, fix="give a size above zero")
    return round(size)


def gib(nbytes: float) -> str:
    """Bytes as GiB with two decimals, unit included: `12.34 GiB`."""
    return f"{nbytes / GIB:.2f} GiB"


def human_bytes(nbytes: float) -> str:
    """Bytes in the largest binary unit that leaves a number of at least 1: `1.50 MiB`.

    Examples:
        >>> human_bytes(512), human_bytes(1536), human_bytes(-3 * 2**30)
        ('512 B', '1.50 KiB', '-3.00 GiB')
    """
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def human_count(count: int) -> str:
    """A number of things in words where it is long: `8.03 billion`, `270.88 million`, `12,345`.

    Examples:
        >>> human_count(8_030_261_248), human_count(999_999), human_count(1_500_000)
        ('8.03 billion', '999,999', '1.50 million')
    """
    for word, size in (("billion", 10**9), ("million", 10**6)):
        if count >= size:
            return f"{count / size:.2f} {word}"
    return f"{count:,}"


def plural(count: int, one: str, many: str | None = None) -> str:
    """A number and its noun: `1 rank`, `4 ranks`; `many` where it does not just add an s.

    Examples:
        >>> plural(1, "rank"), plural(4, "rank"), plural(2, "micro-batch", "micro-batches")
        ('1 rank', '4 ranks', '2 micro-batches')
    """
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def human_seconds(seconds: float) -> str:
    """Seconds in s, ms or us with three significant digits: `1.23 s`, `45.6 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def printable(text: str) -> str:
    r"""A text from somewhere else as it can be printed in one line: what is not printable is escaped.

    Examples:
        >>> print(printable("train.py"), printable("a\tb"))
        train.py a\tb
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)
