"""Records a real run: every allocation of the code inside a `with` block, as a ledger."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self, cast

import torch
from torch import nn

from evenload._version import __version__
from evenload.errors import EvenloadError, Notice
from evenload.ledger.ledger import Ledger, Mark, Metadata
from evenload.ledger.log import Log
from evenload.ledger.settings import alloc_conf_of
from evenload.ledger.words import MarkKind
from evenload.record.core import Core
from evenload.record.guard import Guard, told
from evenload.record.holders import held_parts
from evenload.record.second_look import SecondLook
from evenload.record.unreleased import Collections, Lookups


def record(
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    path: str | Path | None = None,
    force: bool = False,
    stacks: bool = False,
    synchronize: bool = False,
    owners: bool = False,
    command: tuple[str, ...] = (),
) -> Recorder:
    """Record what the code inside a `with` block allocates, on every device.

    Args:
        model: its parameters, buffers and gradients are counted from the start, and paths are those of its modules.
            Without it, the first module that is called is the model.
        optimizer: its states are counted from the start.
        path: file to write the ledger to while it is recorded; it is readable even when the process is killed. None
            keeps it in memory.
        force: replace a file that exists.
        stacks: note the Python line behind every allocation.
        synchronize: wait for the device after every operator, so that lines and order are true where operators run
            behind the program's back.
        owners: in the third step, look up who holds what is dead at the peak. Takes about a second, once.
        command: what is recorded, for the ledger's metadata.

    Raises:
        EvenloadError: an argument is of the wrong type, or the file exists or cannot be written.

    Examples:
        >>> import torch, evenload
        >>> model = torch.nn.Linear(4, 4)
        >>> with evenload.record(model=model) as recording:
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> len(recording.ledger.allocations) > 0
        True
    """
    for value, kind, name in (
        (cast("object", model), nn.Module, "model"),
        (cast("object", optimizer), torch.optim.Optimizer, "optimizer"),
    ):
        if value is not None and not isinstance(value, kind):
            raise EvenloadError(
                f"{name} is a {type(value).__name__}, not a {kind.__module__}.{kind.__name__}",
                fix=f"pass the {name} itself, or leave it out",
            )
    flags = {"force": force, "stacks": stacks, "synchronize": synchronize, "owners": owners}
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise EvenloadError(f"{name} is {flag!r}, not True or False", where=f"$.{name}", fix="pass True or False")
    return Recorder(
        model=model,
        optimizer=optimizer,
        path=path,
        force=force,
        stacks=stacks,
        synchronize=synchronize,
        owners=owners,
        command=command,
    )


class Recorder:
    """A recording. Made by `record`, used once, as a context manager.

    Only the thread that enters it is recorded, with the threads that run its backward.
    """

    strict: ClassVar[bool] = False
    """Whether failures of the recorder itself are raised, as its own tests want it; else they become notices."""

    def __init__(
        self,
        *,
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        path: str | Path | None,
        force: bool,
        stacks: bool,
        synchronize: bool,
        owners: bool,
        command: tuple[str, ...],
    ) -> None:
        rank, world = _rank()
        self._metadata = Metadata(
            evenload=__version__,
            torch=str(torch.__version__),
            rank=rank,
            world=world,
            started=time.time(),
            command=command,
            stacks=stacks,
            alloc_conf=alloc_conf_of(os.environ),
        )
        self._model = model
        self._optimizer = optimizer
        self._path = path
        self._force = force
        self._stacks = stacks
        self._synchronize = synchronize
        self._owners = owners
        self._log: Log | None = None
        self._ledger: Ledger | None = None
        self._running = False
        self.core: Core
        """What watches the run, once it has begun."""

    def __enter__(self) -> Self:
        if self._log is not None:
            raise EvenloadError("this recording has been used", fix="call evenload.record again for another one")
        self._log = Log(self._metadata, self._path, force=self._force)
        self._guard = Guard(strict=Recorder.strict)
        self.core = Core(
            self._log, model=self._model, stacks=self._stacks, synchronize=self._synchronize, guard=self._guard
        )
        self._lookups = Lookups(self._log, self.core.storages)
        looks = [self._lookups.step_began]
        if self._owners:
            looks.insert(0, SecondLook(self._log, self.core.storages, self._guard).step_began)
        self.core.steps.began += [partial(self._guard.tried, look) for look in looks]
        self.core.begin(self._model, self._optimizer)
        _RUNNING.add(self)
        self._running = True
        self._collections = Collections(self.core.storages)
        self._collections.watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._running:  # a forked child
            return
        self._running = False
        self.core.end()
        storages = self.core.storages
        if error is not None:
            self.ended_by(error)
        if not self._guard.broken:
            self._guard.tried(self.core.steps.host)
            self._guard.tried(self._last_look)
        self._collections.leave()
        self._guard.kept(self._close)()
        if self._ledger is None:  # what was recorded until it broke off
            self._ledger = self._logged().ledger(storages.clock)
        self._guard.tried(storages.stop)

    def _close(self) -> None:
        log, storages = self._logged(), self.core.storages
        log.close(storages.settle())
        self._ledger = log.ledger(storages.clock)

    def _last_look(self) -> None:
        self.core.storages.note_parts(held_parts())
        self._lookups.end(self.core.steps.begins)

    @property
    def ledger(self) -> Ledger:
        """What has been recorded so far."""
        return self._ledger or self._logged().ledger(self.core.storages.settle())

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What went wrong with the recording itself."""
        threads = Notice(
            fact="modules ran in another thread, which is not recorded",
            fix="enter evenload.record in the thread that trains",
        )
        unseen = threads if self.core.hooks.unseen else None
        return tuple(one for one in (self._logged().problem, self._guard.problem, unseen) if one is not None)

    def step(self) -> None:
        """Say that a training step has ended; without, steps end where an optimizer's do."""
        self._logged()
        self.core.steps.told_end()

    def ended_by(self, error: BaseException) -> None:
        """Note what ended the recorded code."""
        log = self._logged()
        text = f"ended by {told(error)}"
        log.mark(Mark(kind=MarkKind.NOTE, index=self.core.storages.settle(), time=log.now(), text=text))

    @contextmanager
    def micro_batch(self, number: int) -> Generator[None]:
        """Say which micro-batch forward works on inside the block; without, they are counted by backward calls."""
        if type(number) is not int or number < 0:
            raise EvenloadError(f"{number!r} is not the number of a micro-batch", fix="give an integer from 0 on")
        self._logged()
        self.core.phases.fix_micro_batch(number)
        try:
            yield
        finally:
            self.core.phases.fix_micro_batch(None)

    def _logged(self) -> Log:
        if self._log is None:
            raise EvenloadError("nothing has been recorded yet", fix="use the recording in a with statement")
        return self._log

    def abandon(self) -> None:
        """Stop without a trace, in a child of the process: the file belongs to the parent."""
        if self._running:
            self._running = False
            self._collections.leave()
            self.core.mode.paused += 1
            self.core.hooks.remove()


_RUNNING: weakref.WeakSet[Recorder] = weakref.WeakSet()
"""Recordings that a fork has to stop in the child: workers of data loaders inherit everything."""


def _stop_all() -> None:
    for recorder in list(_RUNNING):
        recorder.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_all)


def _rank() -> tuple[int, int]:
    """Rank and world size of this process, from torch.distributed or from what torchrun sets."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world)) if rank.isdecimal() and world.isdecimal() else (0, 1)
