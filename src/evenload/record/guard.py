"""Keeps the recorded program alive whatever goes wrong in the recorder.

A recording watches code that it does not know: objects that raise when they are looked at, threads, stacks that are
almost full. Nothing of that may end the program, which would have run without the recording. So a failure inside the
recorder stops the recording, or the one look that failed, and becomes a warning.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from evenload.errors import Notice


class Guard:
    """Calls parts of the recorder. Strict, as in dry runs and tests, it lets their failures through."""

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict
        self.broken = False
        """A part failed without which what is recorded afterwards would be wrong: nothing more is recorded."""
        self.problem: Notice | None = None
        """The first failure."""
        self.stop: Callable[[], object] = _nothing
        """Called once, when the recording breaks."""

    def caught(self, error: Exception) -> None:
        """A part failed without which nothing can be recorded: raise the failure if strict, else stop recording."""
        if self.strict:
            raise error
        if not self.broken:
            self.broken = True
            self._note(error, "the recording broke off, and the program went on", fix="please report this")
            with suppress(Exception):
                self.stop()

    def tried(self, part: Callable[..., object], *args: Any) -> None:
        """Call a part that can be done without."""
        try:
            part(*args)
        except Exception as error:
            if self.strict:
                raise
            self._note(error, "a look at who holds what failed, and is left out", fix=None)

    def kept(self, part: Callable[..., Any]) -> Callable[..., None]:
        """A part as a function that never raises, and does nothing once the recording is broken."""

        @wraps(part)
        def guarded(*args: Any, **kwargs: Any) -> None:
            if self.broken:
                return
            try:
                part(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  # whatever happens in the recorder
                self.caught(error)

        return guarded

    def _note(self, error: Exception, what: str, *, fix: str | None) -> None:
        if self.problem is not None:
            return
        lines = traceback.extract_tb(error.__traceback__)
        place = f" in {Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else ""
        self.problem = Notice(fact=f"{what}: {told(error)}{place}", fix=fix)


def told(error: BaseException) -> str:
    """Class and first line of an error, which may be one of the program's own that cannot be printed."""
    try:
        text = next(iter(str(error).splitlines()), "")
    except Exception:  # noqa: BLE001
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _nothing() -> None:
    """Nothing has to be stopped."""
