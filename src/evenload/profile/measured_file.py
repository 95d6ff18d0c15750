"""Measured profiles as files: JSON with a version, decoded into types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from evenload.errors import EvenloadError, shown
from evenload.files import read_json, write_text
from evenload.profile.measured import Measured

VERSION: Final = 2
_KEY: Final = "evenload_profile"
_PATH: Final = re.compile(r"(.*?) - at `(\$.*)`", re.DOTALL)


def is_measured(data: object) -> bool:
    """Whether parsed JSON is a measured profile, of whatever version."""
    return isinstance(data, Mapping) and _KEY in data


def write_measured(path: str | Path, measured: Measured, *, force: bool = False) -> None:
    """Write a profile.

    Raises:
        EvenloadError: the file exists and `force` is off, or it cannot be written.
    """
    data = {_KEY: VERSION, **msgspec.to_builtins(measured)}
    write_text(path, msgspec.json.format(msgspec.json.encode(data), indent=1).decode() + "\n", force=force)


def load_measured(path: str | Path) -> Measured:
    """The profile in a file.

    Raises:
        EvenloadError: no such file, no profile, one of a newer version, or one that is broken; with the path.
    """
    return read_measured(read_json(path), str(path))


def read_measured(data: object, where: str) -> Measured:
    """The profile in parsed JSON.

    Args:
        data: the parsed file; it is not changed.
        where: name of the file, put before the `$.path` of an error.

    Raises:
        EvenloadError: as `load_measured`.
    """
    if not is_measured(data):
        raise EvenloadError(
            "this is no measured profile", where=where, fix="make one: evenload profile MODEL --out measured.json"
        )
    said = dict(cast("Mapping[str, Any]", data))
    version = said.pop(_KEY)
    if isinstance(version, bool) or version != VERSION:
        raise EvenloadError(
            f"this is version {shown(version)} of the profile format, evenload reads {VERSION}",
            where=f"{where}: $.{_KEY}",
            fix="measure again with this version of evenload",
        )
    try:
        return msgspec.convert(said, Measured)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, EvenloadError):
            raise cause.at(f"{where}: {cause.where or '$'}") from None
        match = _PATH.fullmatch(str(error))
        fact, place = (match[1], match[2]) if match else (str(error), "$")
        plain = fact.replace("`", "").replace("Object", "the object")
        raise EvenloadError(
            f"{plain[:1].lower()}{plain[1:]}", where=f"{where}: {place}", fix="measure again: the file is broken"
        ) from None
