"""Python lines: the call stack of the user's code, as frames of a log."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import torch

import evenload
from evenload.ledger.log import Log

_SKIPPED: Final = tuple(str(Path(str(package.__file__)).parent) + os.sep for package in (torch, evenload))
"""Code of PyTorch and of the recorder: nobody looks for his mistake there."""
_RUNNERS: Final = frozenset({"<frozen runpy>", "<frozen importlib._bootstrap>"})


def is_library(filename: str) -> bool:
    """Whether a file is code of PyTorch, of evenload or of the interpreter."""
    return filename.startswith(_SKIPPED) or filename in _RUNNERS


class Frames:
    """The current Python stack as a position in the frames of a log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._skipped: dict[CodeType, bool] = {}
        self._positions: dict[tuple[CodeType, int, int], int] = {}

    def here(self) -> int:
        """Position of the innermost line outside PyTorch that is running; -1: there is none."""
        lines: list[tuple[CodeType, int]] = []
        frame: FrameType | None = inspect.currentframe()
        while frame is not None:
            code = frame.f_code
            skipped = self._skipped.get(code)
            if skipped is None:
                skipped = self._skipped[code] = is_library(code.co_filename)
            if not skipped:
                lines.append((code, frame.f_lineno or 0))
            frame = frame.f_back
        position = -1
        for code, line in reversed(lines):
            key = (code, line, position)
            known = self._positions.get(key)
            if known is None:
                known = self._log.frame(f"{code.co_filename}:{line} {code.co_qualname}", position)
                self._positions[key] = known
            position = known
        return position
