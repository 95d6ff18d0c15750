"""What a run says of itself: a line every few steps, a progress bar, and a file with every step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from evenload.errors import EvenloadError
from evenload.units import human_bytes


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the optimizer."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the tokens of all replicas."""
    norm: float
    """Of all gradients together, before clipping."""
    learning_rate: float
    tokens_per_second: float
    memory: tuple[int, ...]
    """Most bytes of every rank so far: of its device's allocator, or of the process where that is the CPU."""

    def __str__(self) -> str:
        held = ", ".join(map(human_bytes, self.memory))
        return (
            f"step {self.step}  loss {self.loss:.4f}  norm {self.norm:.3f}  lr {self.learning_rate:.2e}  "
            f"{self.tokens_per_second:,.0f} tokens/s  {held}"
        )


class Log:
    """Writes the lines of a run. On one rank only: the others make one with `speaks=False`."""

    def __init__(
        self, *, speaks: bool, steps: int, done: int, every: int, path: str | None, say: Callable[[str], object]
    ) -> None:
        self._speaks = speaks
        self._every = every
        self._say = say
        self._steps = steps
        self._done = done
        self._path = path if speaks else None
        self._file: Any = None
        self._progress: Progress | None = None
        self._task: Any = None
        self._began = perf_counter()

    def __enter__(self) -> Self:
        if self._path is not None:
            try:
                Path(self._path).parent.mkdir(parents=True, exist_ok=True)
                self._file = Path(self._path).open("a", encoding="utf-8")  # until the run ends
            except OSError as error:
                raise EvenloadError(f"cannot write the log: {error.strerror or error}", where=self._path) from None
        if self._speaks and sys.stderr.isatty():
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.start()
            self._task = self._progress.add_task("training", total=self._steps, completed=self._done)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._file is not None:
            self._file.close()

    def due(self, step: int) -> bool:
        """Whether a step is told of: the first, the last, and every so many."""
        return step % self._every == 0 or step in {1, self._done + 1, self._steps}

    def tell(self, line: StepLine) -> None:
        """Write one step."""
        if not self._speaks:
            return
        if self._file is not None:
            self._file.write(msgspec.json.encode(line).decode() + "\n")
            self._file.flush()
        if self._progress is not None:
            self._progress.update(self._task, completed=line.step)
        if self.due(line.step):
            self._say(str(line))
