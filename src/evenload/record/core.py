"""Everything that watches a run, put together: the same for a recorder and a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from evenload.ledger.ledger import Mark
from evenload.ledger.log import Log
from evenload.ledger.words import MarkKind, Phase
from evenload.record.frames import Frames
from evenload.record.guard import Guard
from evenload.record.hooks import Hooks
from evenload.record.mode import LedgerMode
from evenload.record.modules import ModulePaths
from evenload.record.phases import Phases
from evenload.record.roles import Roles
from evenload.record.steps import Steps
from evenload.record.storages import Storages
from evenload.record.where import Where


class Core:
    """Writes a log from `begin` to `end`.

    It reads no data. For a dry run, enter the `FakeTensorMode` first, then `begin` with `fake=True`.
    """

    def __init__(
        self,
        log: Log,
        *,
        model: nn.Module | None = None,
        fake: bool = False,
        devices: Mapping[str, str] = MappingProxyType({}),
        stacks: bool = False,
        synchronize: bool = False,
        guard: Guard | None = None,
    ) -> None:
        """Put it together.

        Args:
            log: where events go.
            model: whose modules paths are told by; None: the first module that is called.
            fake: follow fake and meta tensors as if they were memory, and wait for no collective.
            devices: names that devices get in the ledger, such as `{"cpu": "cuda"}`.
            stacks: note Python lines.
            synchronize: wait for the device after every operator.
            guard: what a failure of the recorder comes to; None: it is raised.
        """
        self.log = log
        self.guard = Guard() if guard is None else guard
        self.guard.stop = self._broke
        self.where = Where()
        self.storages = Storages(log, self.where, fake=fake, devices=devices)
        self.phases = Phases(log, self.storages, self.where)
        self.paths = ModulePaths(log, model)
        self.roles = Roles(self.storages, self.phases, self.paths)
        self.steps = Steps(log, self.phases, self.storages, host=not fake)
        self.mode = LedgerMode(
            log,
            self.phases,
            self.storages,
            fake=fake,
            locate=self._locate if stacks else None,
            ended=torch.accelerator.synchronize if synchronize and torch.accelerator.is_available() else None,
            guard=self.guard,
        )
        self.hooks = Hooks(
            mode=self.mode,
            storages=self.storages,
            phases=self.phases,
            steps=self.steps,
            roles=self.roles,
            paths=self.paths,
            guard=self.guard,
        )
        self._frames = Frames(log)

    def begin(self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Watch from here on; what a model and an optimizer hold already is counted as being there before."""
        if model is not None:
            self.roles.model(model)
        if optimizer is not None:
            self.roles.optimizer(optimizer)
        self.hooks.install()
        self.mode.__enter__()

    def end(self) -> None:
        """Watch no more, and leave PyTorch as it was."""
        self.mode.__exit__(None, None, None)
        self.hooks.remove()

    def _broke(self) -> None:
        self.mode.paused += 1
        text = None if self.guard.problem is None else self.guard.problem.fact
        self.log.mark(Mark(kind=MarkKind.NOTE, index=self.storages.clock, time=self.log.now(), text=text))

    def _locate(self) -> None:
        """Note the Python line that runs; in backward that is the line of forward, unless the user wrote backward."""
        if self.where.phase != Phase.BACKWARD.code:
            self.phases.line(self._frames.here())
        elif not self.phases.in_kernel_of_backward:
            self.where.frame = self._frames.here()
