"""A recording of a run that needs neither the device nor the memory: fake tensors, and the ledger's dispatch mode."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from evenload._version import __version__
from evenload.ledger.ledger import Ledger, Metadata
from evenload.ledger.log import Log
from evenload.record._torch_private import FakeTensorMode
from evenload.record.hooks import Hooks
from evenload.record.mode import LedgerMode
from evenload.record.modules import ModulePaths
from evenload.record.phases import Phases
from evenload.record.redirect import Redirect
from evenload.record.roles import Roles
from evenload.record.steps import Steps
from evenload.record.storages import Storages
from evenload.record.substitutes import substituted
from evenload.record.targets import Target
from evenload.record.where import Where

Engine = Literal["fake", "meta"]
"""`fake`: FakeTensorMode on `cpu`, for anything; `meta`: twice as fast, for code that makes its tensors there."""


class _Steps(Steps):
    """Steps of a run that says nothing about this process."""

    def host(self) -> None:
        """Nothing: the resident set of a dry run is not that of the run."""


class Rehearsal:
    """A place to build and train a model without memory. Used once, as a context manager.

    Fake `cuda` tensors are never made: on a host without a GPU they end the process in backward. Code that asks for the
    target gets fake CPU tensors instead.
    """

    def __init__(
        self, target: Target, *, engine: Engine = "fake", redirect: bool = True, rank: int = 0, world: int = 1
    ) -> None:
        """Prepare a place.

        Args:
            target: the device that it stands for.
            engine: what tensors are.
            redirect: whether code may name the target as a device; costs a little for every operator.
            rank: rank that is simulated.
            world: ranks of the run.
        """
        self.target = target
        self.engine: Engine = engine
        self.fake: Any = FakeTensorMode(allow_non_fake_inputs=True) if engine == "fake" else None
        """The mode that fake tensors belong to; None on `meta`."""
        self._redirect = redirect and engine == "fake" and target.accelerator
        metadata = Metadata(
            evenload=__version__,
            origin="dry run",
            torch=str(torch.__version__),
            device=target.name,
            rank=rank,
            world=world,
            started=time.time(),
        )
        self._log = Log(metadata)
        self.where = Where()
        stand_in = "cpu" if engine == "fake" else "meta"
        self._storages = Storages(self._log, self.where, fake=True, devices={stand_in: target.name})
        self._storages.numbers_on_host = target.accelerator
        self._phases = Phases(self._log, self._storages, self.where)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self.fake is not None:
            self._stack.enter_context(self.fake)
        self._stack.enter_context(substituted(self.target))
        if self._redirect:
            self._stack.enter_context(Redirect(self.target.kind))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @contextmanager
    def recorded(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Generator[Steps]:
        """Record what happens inside the block; what the model and the optimizer hold is there from the start."""
        storages, phases = self._storages, self._phases
        paths = ModulePaths(self._log, model)
        roles = Roles(storages, phases, paths)
        steps = _Steps(self._log, phases, storages)
        mode = LedgerMode(self._log, phases, storages, fake=True)
        hooks = Hooks(mode=mode, storages=storages, phases=phases, steps=steps, roles=roles, paths=paths)
        roles.model(model)
        if optimizer is not None:
            roles.optimizer(optimizer)
        hooks.install()
        try:
            with mode:
                yield steps
        finally:
            hooks.remove()

    def module(self) -> str | None:
        """Path of the module that runs now; None: none does."""
        position = self.where.module
        return self._log.text(position) if position >= 0 else None

    @property
    def ledger(self) -> Ledger:
        """What has been recorded so far."""
        return self._log.ledger(self._storages.settle())
