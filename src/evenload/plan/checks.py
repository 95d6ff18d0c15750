"""What settings files get wrong in one entry: the type, the size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from reprlib import Repr
from typing import Any, Final, TypeGuard

from evenload.errors import EvenloadError

MOST: Final = 100_000
"""Layers, stages or chunks beyond which a number is a slip and not a model."""

_SHORT: Final = Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def shown(value: Any) -> str:
    """A value as an error message shows it: short, whatever the caller passed."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python refuses to spell out very long integers
        return "a very long number"


def whole(value: Any, where: str, *, least: int | None = None, fix: str = "write a whole number such as 1") -> int:
    """A whole number that is neither true nor false.

    Raises:
        EvenloadError: another type, below `least`, or absurdly large.
    """
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:  # also an array with several numbers, which has an __index__ all the same
        number = None
    if number is None:
        raise EvenloadError(f"{shown(value)} is not a whole number", where=where, fix=fix)
    if abs(number) > MOST:
        raise EvenloadError(f"{shown(number)} is beyond {MOST}", where=where, fix="check the number")
    if least is not None and number < least:
        raise EvenloadError(f"{number} is below {least}", where=where, fix=f"give at least {least}")
    return number


def plain(value: Any) -> Any:
    """A NumPy array as lists, anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def listed(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether the value is a list or a tuple."""
    return isinstance(value, list | tuple)


def named(value: Any) -> TypeGuard[Sequence[str]]:
    """Whether the value is a list or a tuple of text and nothing else; an empty one is."""
    return listed(value) and all(isinstance(entry, str) for entry in value)


def mapped(value: Any) -> TypeGuard[Mapping[Any, Any]]:
    """Whether the value is a mapping."""
    return isinstance(value, Mapping)


def flag(value: Any, where: str) -> bool:
    """True or false and nothing that only behaves so.

    Raises:
        EvenloadError: another type.
    """
    if isinstance(value, bool):
        return value
    raise EvenloadError(f"{shown(value)} is neither true nor false", where=where, fix="write true or false")
