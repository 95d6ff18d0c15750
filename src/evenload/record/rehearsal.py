"""A recording of a run that needs neither the device nor the memory: fake tensors, and the ledger's dispatch mode."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import torch
from torch import nn

from evenload._version import __version__
from evenload.errors import EvenloadError
from evenload.ledger.ledger import Ledger, Metadata
from evenload.ledger.log import Log
from evenload.record._torch_private import FakeTensorMode
from evenload.record.core import Core
from evenload.record.kernels import Kernels
from evenload.record.redirect import Redirect
from evenload.record.steps import Steps
from evenload.record.substitutes import substituted, substituted_in_libraries
from evenload.record.targets import Target

Engine = Literal["fake", "meta"]
"""`fake`: FakeTensorMode on `cpu`, for anything; `meta`: twice as fast, for code that makes its tensors there."""


class Place(Protocol):
    """Where a model is built and trained."""

    @property
    def fake(self) -> Any:
        """The mode that fake tensors belong to; None where there are none."""
        ...

    def module(self) -> str | None:
        """Path of the module that runs now; None: none does, or nobody knows."""
        ...


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
        stand_in = "cpu" if engine == "fake" else "meta"
        self.core = Core(Log(metadata), fake=True, devices={stand_in: target.name})
        self.core.storages.host_apart = target.accelerator
        self._ledger: Ledger | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self.fake is not None:
            self._stack.enter_context(self.fake)
            self._stack.enter_context(Kernels(cpu=not self.target.accelerator))
        self._stack.enter_context(substituted(self.target, fake=self.fake is not None))
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
        self.core.paths.add(model)
        with substituted_in_libraries(self.target):
            self.core.begin(model, optimizer)
            try:
                yield self.core.steps
            finally:
                self.core.end()
                self._ledger = self.core.log.ledger(self.core.storages.settle())
                self.core.storages.stop()

    def module(self) -> str | None:
        """Path of the module that runs now; None: none does."""
        position = self.core.where.module
        return self.core.log.text(position) if position >= 0 else None

    @property
    def ledger(self) -> Ledger:
        """What has been recorded.

        Raises:
            EvenloadError: nothing has.
        """
        if self._ledger is None:
            raise EvenloadError("nothing has been recorded yet", fix="run steps inside `recorded`")
        return self._ledger
