"""Reads any file that holds allocations: ledgers, CUDA snapshots, MindSpore's memory_block.csv."""

from __future__ import annotations

from pathlib import Path

from evenload.errors import EvenloadError
from evenload.ledger.files import is_ledger, read_ledger
from evenload.ledger.ledger import Ledger
from evenload.ledger.mindspore_csv import is_memory_block, read_memory_block
from evenload.ledger.plain_pickle import is_pickle
from evenload.ledger.snapshot import read_snapshot

KINDS = "a ledger, a CUDA memory snapshot (.pickle) or a memory_block.csv"


def read_allocations(path: str | Path, *, device: int | None = None) -> Ledger:
    """The ledger in a file of any kind that holds allocations.

    Args:
        path: a ledger, a snapshot, or a memory_block.csv.
        device: of a snapshot, the device to read; None: the one that held most.

    Raises:
        EvenloadError: there is no such file, it is none of these, or it is damaged.
    """
    place = str(path)
    try:
        if Path(path).is_dir():
            raise EvenloadError("this is a directory", where=place, fix=_inside(Path(path)))
        with Path(path).open("rb") as file:
            head = file.read(4096)
    except FileNotFoundError:
        raise EvenloadError("there is no such file", where=place, fix="check the path") from None
    except (OSError, ValueError) as error:
        if isinstance(error, EvenloadError):
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise EvenloadError(f"cannot read the file: {reason.lower()}", where=place) from None
    if not head:
        raise EvenloadError("the file is empty", where=place, fix=f"give {KINDS}")
    if device is not None and not is_pickle(path):
        raise EvenloadError(
            "--device chooses among the devices of a snapshot, and this file is of one",
            where="--device",
            fix="leave --device out",
        )
    if is_ledger(path):
        return read_ledger(path)
    if is_pickle(path):
        return read_snapshot(path, device=device)
    if is_memory_block(head.decode("utf-8", errors="replace")):
        return read_memory_block(path)
    raise EvenloadError("the file holds no allocations that evenload can read", where=place, fix=f"give {KINDS}")


def _inside(folder: Path) -> str:
    """What to give instead of a folder: the files in it that can be read."""
    names = sorted(
        str(file.relative_to(folder))
        for pattern in ("*.ledger", "*.pickle", "memory_block.csv", "*/memory_block.csv")
        for file in folder.glob(pattern)
    )
    return f"name a file in it: {', '.join(names[:5])}" if names else f"name a file inside it: {KINDS}"
