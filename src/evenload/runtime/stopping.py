"""A run that is told to stop ends its step, on all ranks at the same one."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Final, Self, cast

import torch
from torch import distributed

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Stopping:
    """Notes SIGTERM and Ctrl-C while the block lasts; a second one ends the process as ever."""

    def __init__(self, device: torch.device) -> None:
        self.told: int | None = None
        """The signal, when one has come."""
        self._device = device
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def agreed(self) -> int | None:
        """The signal that any rank has got; asked on all ranks at the end of a step."""
        value = torch.tensor(self.told or 0, device=self._device)
        cast("Any", distributed).all_reduce(value, op=distributed.ReduceOp.MAX)
        return int(value.item()) or None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.told = number
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
