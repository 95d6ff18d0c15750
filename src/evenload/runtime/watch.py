"""Watches the memory of a run: rehearses its step before it begins, and measures the first steps beside that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final, Self, cast

import msgspec
import torch
from torch import distributed, nn

from evenload.errors import EvenloadError
from evenload.plan.plan import Plan
from evenload.record.recorder import Recorder, record
from evenload.runtime.exhausted import Exhausted, explained, from_ledger, from_parts, held_layers, message_of
from evenload.runtime.launch import agreed
from evenload.runtime.memory import RankMemory, free_name, of_ledger, step_peaks, table, write_memory
from evenload.runtime.pace import StepTime
from evenload.runtime.pipeline import Pipeline, made, next_token_loss
from evenload.runtime.rehearse import rehearse_rank
from evenload.runtime.settings import RunSettings
from evenload.runtime.stages import name_modules

MEASURED: Final = 3
"""Steps after which a run has shown what its steps hold."""


class Watch:
    """Predicted and measured peak of one rank."""

    def __init__(self, plan: Plan, settings: RunSettings, pipeline: Pipeline, make: Callable[[], nn.Module]) -> None:
        self._settings = settings
        self._pipeline = pipeline
        self._steps = 0
        self._recorder: Recorder | None = None
        self._stack = ExitStack()
        self._say: Callable[[str], object] = print
        self._step_time: StepTime | None = None
        self._file: str | None = None
        """On rank 0, what gets the peaks."""
        self.own = RankMemory(rank=distributed.get_rank())
        if settings.predict:
            self.own = self._predicted(plan, make)

    def begun(self, optimizer: torch.optim.Optimizer, say: Callable[[str], object]) -> Self:
        """Be ready for the run: to be used as a context manager."""
        self._say = say
        self._optimizer = optimizer
        return self

    def __enter__(self) -> Self:
        if not self._settings.predict:
            return self
        with agreed():
            if distributed.get_rank() == 0:
                self._find_file()
        self._tell(last=False)
        if self._file is not None:
            self._say(f"predicted peaks are in {self._file}")
        if self._pipeline.ranks.device.type == "cpu":
            model = nn.ModuleList(self._pipeline.chunks)
            self._recorder = self._stack.enter_context(record(model=model, optimizer=self._optimizer))
            self._recorder.core.steps.told = True  # steps end where `step` says, not where the optimizer does
            name_modules(self._recorder.core.paths, model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        message = message_of(error)
        self._stack.close()
        if message is not None:
            raise explained(self._exhausted(message), self.own, self._where()) from error

    def step(self) -> None:
        """A step has ended, on all ranks."""
        self._steps += 1
        if not self._settings.predict or self._steps > MEASURED:
            return
        if self._recorder is not None:
            self._recorder.step()
        elif self._steps < MEASURED:
            torch.cuda.reset_peak_memory_stats(self._pipeline.ranks.device)
        if self._steps == MEASURED:
            self.own = msgspec.structs.replace(self.own, measured=self._measured())
            self._tell(last=True)

    def tell_pace(self, found: StepTime) -> None:
        """Write and print how long steps took, at the end of a run."""
        self._step_time = found
        if self._settings.predict:
            self._tell(last=False)
        if found.predicted is not None:
            self._say(str(found))

    def _measured(self) -> int:
        if self._recorder is None:
            return int(torch.cuda.max_memory_allocated(self._pipeline.ranks.device))
        self._stack.close()
        return step_peaks(self._recorder.ledger)[MEASURED - 1]

    def _predicted(self, plan: Plan, make: Callable[[], nn.Module]) -> RankMemory:
        pipeline = self._pipeline
        try:
            ledger = rehearse_rank(
                made(make),
                pipeline.anatomy,
                plan,
                self._settings,
                loss=next_token_loss,
                autocast=pipeline.autocast,
                device=pipeline.ranks.device.type,
            )
        except EvenloadError as error:
            return RankMemory(rank=pipeline.ranks.rank, why=error.fact)
        return of_ledger(pipeline.ranks.rank, ledger)

    def _tell(self, *, last: bool) -> None:
        """Write what is known, and print it when all is."""
        found: list[Any] = [None] * distributed.get_world_size()
        cast("Any", distributed).all_gather_object(found, msgspec.to_builtins(self.own))
        ranks = [msgspec.convert(one, RankMemory) for one in found]
        with agreed():
            if self._file is not None:
                write_memory(self._file, ranks, self._step_time)
        if last:
            self._say(table(ranks))

    def _find_file(self) -> None:
        """Where peaks are written: where the user says, else beside the checkpoints or here, over nothing."""
        settings = self._settings
        if settings.memory_file is not None:
            self._file = settings.memory_file
            return
        name = free_name(settings.checkpoints or ".")
        try:
            write_memory(name, [self.own])
        except EvenloadError as error:  # nobody asked for it, so the run goes on
            self._say(f"predicted peaks cannot be written: {error}")
        else:
            self._file = name

    def _exhausted(self, message: str) -> Exhausted:
        if self._recorder is not None and self._steps < MEASURED:
            return from_ledger(message, self._recorder.ledger)
        device = self._pipeline.ranks.device
        allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
        return from_parts(message, self._pipeline, self._optimizer, allocated)

    def _where(self) -> str:
        """This rank and its step, in words."""
        return f"rank {self.own.rank} ({held_layers(self._pipeline)}) in step {self._steps + 1}"
