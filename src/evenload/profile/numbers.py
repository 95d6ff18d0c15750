"""Read numbers out of parsed JSON or YAML: every mistake is an error with the `$.path` of the value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from evenload.dialects.yaml_source import read_yaml
from evenload.errors import EvenloadError
from evenload.files import read_json

MOST: Final = 1e18
"""No time, size or rate of a real run is above this, in any unit that people use."""


def read_data(path: str | Path) -> object:
    """The value in a JSON file, or in a YAML file by its suffix.

    Raises:
        EvenloadError: the file cannot be read or is malformed, with line and column.
    """
    return read_yaml(path).data if Path(path).suffix.lower() in {".yaml", ".yml"} else read_json(path)


def entry(value: object, path: str) -> dict[str, Any]:
    """The value, which must be an object (a mapping with string keys)."""
    if not isinstance(value, Mapping):
        raise EvenloadError(f"this should be an object, not {_named(value)}", where=path)
    return {str(key): item for key, item in cast("Mapping[object, object]", value).items()}


def listed(value: object, path: str) -> list[object]:
    """The value, which must be a list."""
    if not isinstance(value, list):
        raise EvenloadError(f"this should be a list, not {_named(value)}", where=path)
    return list(cast("list[object]", value))


def number(
    item: Mapping[str, Any], keys: Sequence[str], path: str, *, default: float | None = None, most: float = MOST
) -> float:
    """The number under the first of `keys` that is there; `null` counts as not there.

    Raises:
        EvenloadError: no such key and no default, no number, negative, not finite, or above `most`.
    """
    for key in keys:
        if (value := item.get(key)) is not None:
            return as_number(value, key, f"{path}.{key}", most=most)
    if default is None:
        raise EvenloadError(f"{keys[0]!r} is missing", where=path, fix=f"add a number {keys[0]!r}")
    return default


def as_number(value: object, name: str, where: str, *, most: float = MOST) -> float:
    """The value, which must be a number; `name` is what errors call it.

    Raises:
        EvenloadError: no number, negative, not finite, or above `most`.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EvenloadError(f"{name} should be a number, not {_named(value)}", where=where)
    if value != value or abs(value) == math.inf:  # noqa: PLR0124  # NaN
        raise EvenloadError(f"{name} is {value}", where=where, fix="give a finite number")
    if value < 0:
        raise EvenloadError(f"{name} is negative: {value}", where=where, fix="give a number of at least 0")
    if value > most:
        raise EvenloadError(f"{name} is above {most:.3g}", where=where, fix="check the number and its unit")
    return float(value)


def count(
    item: Mapping[str, Any], keys: Sequence[str], path: str, *, default: int | None = None, most: int = 2**31
) -> int:
    """As `number`, but whole."""
    value = number(item, keys, path, default=default, most=most)
    if value != int(value):
        key = next(key for key in keys if item.get(key) is not None)
        raise EvenloadError(f"{key} is {value}, not a whole number", where=f"{path}.{key}")
    return int(value)


def _named(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    return "a list" if isinstance(value, list) else f"a {type(value).__name__}"
