"""Reading and writing files at the edge: every way that a file can be wrong becomes one clear error."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Final, NoReturn

from evenload.errors import EvenloadError

MAX_BYTES: Final = 64 * 2**20
"""Settings, plans and tables are small; a larger file is a mistake (a checkpoint, a device)."""
_BINARY: Final = "this is a binary file, not text"
_TEXT_WANTED: Final = "name the settings, the plan or the table"


def exists(path: str | Path) -> bool:
    """Whether there is such a file or directory; a name that no file can have is none."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # a name too long, or with a null byte
        return False


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, byte order mark removed.

    Raises:
        EvenloadError: no such file, a directory, not readable, empty, larger than `MAX_BYTES`, binary or not UTF-8.
    """
    place = str(path)
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise EvenloadError("there is no such file", where=place, fix="check the path") from None
    except IsADirectoryError:
        raise EvenloadError("this is a directory", where=place, fix="name a file inside it") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise EvenloadError(f"cannot read the file: {_reason(error)}", where=place) from None
    if len(raw) > MAX_BYTES:
        raise EvenloadError(
            f"the file is larger than {MAX_BYTES // 2**20} MiB, which no settings file is",
            where=place,
            fix=_TEXT_WANTED,
        )
    text = _decode(raw, place)
    if not text.strip():
        raise EvenloadError("the file is empty", where=place, fix="name the file that was meant")
    return text


def read_json(path: str | Path) -> object:
    """The value in a JSON file, read strictly.

    Raises:
        EvenloadError: with line and column; also for duplicate keys, NaN, infinities and numbers beyond a float.
    """
    return parse_json(read_text(path), name=str(path))


def parse_json(text: str, *, name: str = "JSON") -> object:
    """The value of a JSON text, read strictly; `name` is what errors call it.

    Raises:
        EvenloadError: as `read_json`.
    """

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        value = dict(items)
        if len(value) != len(items):
            keys = [key for key, _ in items]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise EvenloadError(f"the key {twice!r} is given twice in one object", where=name, fix="keep one of them")
        return value

    def number(literal: str) -> float:
        value = float(literal)
        return value if math.isfinite(value) else constant(literal)

    def constant(literal: str) -> NoReturn:
        raise EvenloadError(f"{literal} is not a number that JSON knows", where=name, fix="give a finite number")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_float=number, parse_constant=constant)
    except json.JSONDecodeError as error:
        place = f"{name}:{error.lineno}:{error.colno}"
        raise EvenloadError(f"this is not valid JSON: {error.msg}", where=place, fix="correct the text there") from None
    except RecursionError:
        raise EvenloadError("the values are nested too deeply", where=name, fix="flatten them") from None
    except EvenloadError:
        raise
    except ValueError:  # Python refuses to read it, and no size needs it
        raise EvenloadError("a number has thousands of digits", where=name, fix="correct the number") from None


def refuse_existing(path: str | Path, *, force: bool) -> None:
    """Make sure, before long work, that its result may be written.

    Raises:
        EvenloadError: the file exists and `force` is off, it is a directory, or its place takes no files.
    """
    try:
        target = Path(path).resolve()
        problem = _obstacle(target, str(path), force=force) or _closed(target, str(path))
    except (OSError, ValueError) as error:
        raise EvenloadError(f"cannot write the file: {_reason(error)}", where=str(path)) from None
    if problem is not None:
        raise problem


def write_text(path: str | Path, text: str, *, force: bool = False) -> None:
    """Write a file whole or not at all, making the directories above it.

    Args:
        path: where to write.
        text: what to write, as UTF-8.
        force: replace a file that is there.

    Raises:
        EvenloadError: the file exists and `force` is off, or it cannot be written.
    """
    place = str(path)
    try:
        target = Path(path).resolve()  # a link keeps pointing at the file that is written
        exists = target.exists()
        problem = _obstacle(target, place, force=force)
        if problem is None and exists and not target.is_file():  # a pipe or a terminal, such as /dev/stdout
            target.write_text(text, encoding="utf-8")
        elif problem is None:
            target.parent.mkdir(parents=True, exist_ok=True)
            _replace(target, text)
    except (OSError, ValueError) as error:
        raise EvenloadError(f"cannot write the file: {_reason(error)}", where=place) from None
    if problem is not None:
        raise problem


def _obstacle(target: Path, place: str, *, force: bool) -> EvenloadError | None:
    if target.is_dir():
        return EvenloadError("this is a directory", where=place, fix="name a file inside it")
    if target.is_file() and not force:
        return EvenloadError(
            "the file exists and would be overwritten", where=place, fix="add --force, or name another file"
        )
    return None


def _closed(target: Path, place: str) -> EvenloadError | None:
    """What is wrong with the place of a file that is not there yet."""
    if target.exists():
        return None
    above = next(path for path in target.parents if path.exists())
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
        return None
    why = "is closed for writing" if above.is_dir() else "is a file, not a directory"
    return EvenloadError(f"cannot write the file: {above} {why}", where=place, fix="name another place")


def _replace(target: Path, text: str) -> None:
    """Write beside the target and rename over it, so that a full disk or Ctrl-C leaves the old file whole."""
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:64]}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        Path(temporary).chmod(mode)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _decode(raw: bytes, place: str) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise EvenloadError("the file is UTF-16, not UTF-8", where=place, fix="save it as UTF-8")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if b"\0" in raw[:4096]:
            raise EvenloadError(_BINARY, where=place, fix=_TEXT_WANTED) from None
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise EvenloadError(
            f"the file is not UTF-8: byte 0x{raw[error.start]:02x} cannot be read",
            where=f"{place}:{line}:{column}",
            fix="save it as UTF-8",
        ) from None
    if "\0" in text:
        raise EvenloadError(_BINARY, where=place, fix=_TEXT_WANTED)
    return text


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
