"""What goes wrong in a dry run, said in the words of the user's code."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from evenload.errors import EvenloadError, behind
from evenload.record._torch_private import NEEDS_DATA
from evenload.record.frames import is_library
from evenload.record.rehearsal import Place

_ON_META: Final = re.compile(
    r"(\S+?):? (?:attempted to run this operator|cannot be called) (?:with|on) meta", re.IGNORECASE
)
_STANDARD: Final = str(Path(os.__file__).parent) + os.sep


@contextmanager
def explained(rehearsal: Place) -> Generator[None]:
    """Turn what the user's code raises inside the block into one clear error.

    Raises:
        EvenloadError: an operator needs data that a dry run does not have, or the code failed.
    """
    try:
        yield
    except EvenloadError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise _told(error, rehearsal) from error


def _told(error: Exception, rehearsal: Place) -> EvenloadError:
    place = _place(error)
    module = rehearsal.module()
    at = f" in {module}" if module else ""
    operator = _needing(error)
    if operator is not None:
        return EvenloadError(
            f"{operator}{at} needs the data of a tensor, and a dry run has shapes only",
            where=place,
            fix="run few layers for real: evenload dryrun --real --layers 4, or all under evenload track; or take the "
            "data out of the decision (experts: grouped_mm)",
        )
    text = str(error).strip().splitlines()
    return EvenloadError(
        f"the code{at} raised {type(error).__name__}: {text[0] if text else 'no message'}",
        where=place,
        fix="see whether it runs by itself, with inputs of these shapes",
    )


def _needing(error: BaseException | None) -> str | None:
    """The operator that needs data, if that is what an error or one behind it says."""
    for one in behind(error):
        if isinstance(one, NEEDS_DATA):
            return str(getattr(one, "func", one)).removesuffix(".default")
        if found := _ON_META.search(str(one)):
            return found[1]
    return None


def _is_library(filename: str) -> bool:
    """Whether a file is a library's, so that nobody looks for his mistake there."""
    return is_library(filename) or (filename.startswith(_STANDARD) and "site-packages" not in filename)


def _place(error: BaseException) -> str | None:
    """The innermost line outside the libraries."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None
