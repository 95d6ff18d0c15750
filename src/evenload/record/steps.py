"""Where steps begin, and the host line at the end of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from evenload.ledger.ledger import HostLine, Mark
from evenload.ledger.log import Log
from evenload.ledger.words import MarkKind
from evenload.record.phases import Phases
from evenload.record.process import idle_bytes, resident_bytes
from evenload.record.storages import Storages


class Steps:
    """Counts training steps.

    The first step begins with the first forward. Each ends where the optimizer's step does: the first optimizer that
    steps is the clock when there are several. A script that says itself where its steps end is believed instead.
    """

    def __init__(self, log: Log, phases: Phases, storages: Storages, *, host: bool = True) -> None:
        """Count; `host`: what this process holds says something about the run, as in no dry run."""
        self.number = -1
        """The step that is running; -1: none yet."""
        self.told = False
        """Whether the script says where steps end."""
        self.begins: list[int] = []
        """Index at which every step began."""
        self.began: list[Callable[[Sequence[int]], None]] = []
        """Called with `begins` when a step begins."""
        self._host = host
        self._log = log
        self._phases = phases
        self._storages = storages
        self._clock: int | None = None
        self._due = False
        self._just_ended = False
        """Whether no forward has begun since an optimizer ended a step."""
        self._position = 0
        """Of the mark of the step that is running."""

    def forward_begins(self) -> None:
        """Forward begins, and with it the first step, or the next one if the optimizer stepped in backward."""
        self._just_ended = False
        if self.number < 0:
            self._begin()
        elif self._due:
            self.end()

    def optimizer_stepped(self, optimizer: object, *, in_backward: bool) -> None:
        """An optimizer's step ended; inside backward, the training step ends at the next forward."""
        if self._clock is None:
            self._clock = id(optimizer)
        if self.told or self._clock != id(optimizer):
            return
        if in_backward:
            self._due = True
        else:
            self.end()
            self._just_ended = True

    def told_end(self) -> None:
        """The script says that a step has ended; of the first, its optimizer may have said so too early."""
        ended, self._just_ended = self._just_ended, False
        first, self.told = not self.told, True
        if first and ended:
            self.begins[-1] = self._storages.settle()
            self._log.move(self._position, self.begins[-1])
        else:
            self.end()

    def end(self) -> None:
        """The step that is running ends, and the next one begins."""
        if self.number < 0:
            self._begin()
        self.host()
        self._begin()

    def host(self) -> None:
        """Write the host line of the step that is running."""
        if not self._host:
            return
        self._log.host(
            HostLine(
                step=max(self.number, 0),
                index=self._storages.settle(),
                time=self._log.now(),
                resident=resident_bytes(),
                pinned=self._storages.pinned,
                reserved=_reserved(),
                idle=idle_bytes(),
            )
        )

    def _begin(self) -> None:
        self.number += 1
        self._due = False
        self._phases.begin_step()
        self._storages.late = self.number > 0
        index = self._storages.settle()
        self.begins.append(index)
        for call in self.began:
            call(self.begins)
        self._position = self._log.mark(Mark(kind=MarkKind.STEP, index=index, time=self._log.now(), value=self.number))


def _reserved() -> int:
    """Most bytes that the device's allocator held since the last call; -1: there is no such device."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return -1
    device: Any = torch.cuda.current_device()
    reserved = torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return int(reserved)
