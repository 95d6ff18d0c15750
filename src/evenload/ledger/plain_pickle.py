"""Pickles of plain data, read without running anything that they ask for.

A pickle is a program. This reader knows dictionaries, lists, tuples, text and numbers, and refuses every pickle that
names a class or a function, before that name is looked up.
"""

from __future__ import annotations

import gc
import pickle
from pathlib import Path
from typing import Any, BinaryIO, cast

from evenload.errors import EvenloadError


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it asks to run {module}.{name}")

    def persistent_load(self, _pid: Any, /) -> Any:
        raise pickle.UnpicklingError("it refers to data outside the file")


def as_dict(value: object) -> dict[str, Any] | None:
    """A dictionary out of plain data, or None."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def as_list(value: object) -> list[Any] | None:
    """A list or tuple out of plain data as a list, or None."""
    return list(cast("list[Any]", value)) if isinstance(value, list | tuple) else None


def is_pickle(path: str | Path) -> bool:
    """Whether a file begins as binary pickles do; False also where it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(2)
    except (OSError, ValueError):
        return False
    return len(head) == 2 and head[0] == 0x80 and 2 <= head[1] <= pickle.HIGHEST_PROTOCOL


def read_plain_pickle(path: str | Path) -> object:
    """The plain data in a pickle.

    Raises:
        EvenloadError: the file cannot be read, is damaged, or asks for anything but plain data.
    """
    place = str(path)
    try:
        with Path(path).open("rb") as file:
            return _load(file, place)
    except FileNotFoundError:
        raise EvenloadError("there is no such file", where=place, fix="check the path") from None
    except IsADirectoryError:
        raise EvenloadError("this is a directory", where=place, fix="name a file inside it") from None
    except OSError as error:
        raise EvenloadError(f"cannot read the file: {(error.strerror or str(error)).lower()}", where=place) from None


def _load(file: BinaryIO, place: str) -> object:
    collecting = gc.isenabled()
    gc.disable()  # millions of small objects that all stay: looking for cycles among them takes most of the time
    try:
        return _PlainUnpickler(file).load()
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        text = str(error)
        if text.startswith("it "):
            raise EvenloadError(
                f"the pickle is not plain data: {text}, which was refused",
                where=place,
                fix="give a file of torch.cuda.memory._dump_snapshot; do not load this one with anything else",
            ) from None
        raise EvenloadError(f"the pickle is damaged: {text}", where=place, fix="copy it again") from None
    except Exception as error:  # noqa: BLE001  # a damaged pickle fails in any way that its opcodes can
        raise EvenloadError(
            f"the pickle is damaged: {str(error) or type(error).__name__}", where=place, fix="copy it again"
        ) from None
    finally:
        if collecting:
            gc.enable()
