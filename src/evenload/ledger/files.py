"""Ledger files at the edge: every way that one can be wrong becomes one clear error."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from evenload.errors import EvenloadError
from evenload.ledger.cells import MAGIC
from evenload.ledger.ledger import Ledger
from evenload.ledger.log import encode
from evenload.ledger.reading import decode


def is_ledger(path: str | Path) -> bool:
    """Whether a file begins as ledgers do; False also where it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def read_ledger(path: str | Path) -> Ledger:
    """The ledger in a file.

    A recording that was ended by a signal is read up to there, and a notice in it says so.

    Raises:
        EvenloadError: the file cannot be read, is no ledger, a newer version wrote it, or it is truncated or damaged.
    """
    place = str(path)
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        raise EvenloadError("there is no such file", where=place, fix="check the path") from None
    except IsADirectoryError:
        raise EvenloadError("this is a directory", where=place, fix="name a ledger inside it") from None
    except (OSError, ValueError) as error:
        raise EvenloadError(f"cannot read the file: {_reason(error)}", where=place) from None
    return decode(raw, place=place)


def write_ledger(path: str | Path, ledger: Ledger, *, force: bool = False) -> None:
    """Write a ledger to a file, whole or not at all.

    Raises:
        EvenloadError: the file exists and `force` is off, or it cannot be written.
    """
    place = str(path)
    target = Path(path)
    if target.exists() and not force:
        raise EvenloadError(
            "the file exists and would be overwritten", where=place, fix="add --force, or name another file"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name[:64]}.", delete=False) as file:
            file.write(encode(ledger))
        Path(file.name).chmod(0o666 & ~_umask())
        Path(file.name).replace(target)
    except (OSError, ValueError) as error:
        raise EvenloadError(f"cannot write the file: {_reason(error)}", where=place) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
