"""One rank of a pipeline, rehearsed: the real schedule and the real stages on fake tensors, and nobody to talk to.

What a rank holds follows from PyTorch's own code, which runs as it will run: the order of actions, what stages keep,
and which sends are held until when. So nothing about a schedule has to be modelled. Work objects hold what they send,
as Gloo's do.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from evenload.ledger.ledger import Ledger
from evenload.plan.plan import Plan
from evenload.record.failures import explained
from evenload.record.rehearsal import Rehearsal
from evenload.record.targets import find_target
from evenload.runtime._torch_private import InferenceMode, PipelineSchedule, schedules
from evenload.runtime.anatomy import Anatomy
from evenload.runtime.optimizer import make_optimizer
from evenload.runtime.pipeline import Loss, assemble
from evenload.runtime.ranks import Ranks
from evenload.runtime.settings import RunSettings
from evenload.runtime.stages import Materials
from evenload.runtime.step import train_step

STEPS: Final = 2
"""The second step is what later ones are like: states of the optimizer and receive buffers are there."""


_WARM_UP: Final = "_warmup_p2p"
_MODE: Final = "_inference_mode"
_EXCHANGE: Final = "_batch_p2p"


class _Held:
    """What stands for a send or a receive under way."""

    def __init__(self, tensors: list[torch.Tensor], *, waits_release: bool) -> None:
        self._tensors = tensors
        self._waits_release = waits_release

    def wait(self) -> None:
        """Nothing to wait for."""
        if self._waits_release:
            self._tensors = []


class _Shapes(Materials):
    """Parameters and buffers as fake tensors."""

    def __init__(self, model: nn.Module, fake: Any) -> None:
        super().__init__(model, torch.device("cpu"), seed=0, init=None)
        self._fake = fake
        self._shapes: dict[int, nn.Parameter] = {}

    def real(self, parameter: nn.Parameter) -> nn.Parameter:
        """A fake parameter; chunks that share one get the same object."""
        if id(parameter) not in self._shapes:
            made = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            self._shapes[id(parameter)] = nn.Parameter(made, parameter.requires_grad)
        return self._shapes[id(parameter)]

    def buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """A fake buffer."""
        return self._fake.from_tensor(buffer)

    def fill(self, chunk: nn.Module, names: Mapping[str, str]) -> None:
        """Fake parameters have no values."""


def rehearse_rank(
    whole: nn.Module,
    anatomy: Anatomy,
    plan: Plan,
    ranks: Ranks,
    settings: RunSettings,
    *,
    loss: Loss,
    autocast: torch.dtype | None = None,
    device: str = "cpu",
) -> Ledger:
    """The ledger of this rank's training steps, without their memory.

    Args:
        whole: the whole model, with or without values.
        anatomy: its parts.
        plan: how it is trained.
        ranks: which rank; its groups are never talked to.
        settings: the optimizer, and how many steps of the schedule it waits for.
        loss: mean loss of a micro-batch.
        autocast: type in which forward runs under autocast.
        device: the device that the run is for.

    Raises:
        EvenloadError: the model cannot run on fake tensors.
    """
    setup = plan.setup
    here = replace(ranks, device=torch.device("cpu"), pp=1)  # with nobody to share losses and norms with
    rehearsal = Rehearsal(find_target(device), redirect=False, rank=ranks.rank, world=ranks.world)
    with rehearsal, _nobody(waits_release=ranks.device.type == "cuda"):
        share = setup.micro_batches * settings.accumulation
        shapes = _Shapes(whole, rehearsal.fake)
        pipeline = assemble(shapes, anatomy, plan, here, loss=loss, autocast=autocast, share=share)
        model = nn.ModuleList(pipeline.chunks)
        optimizer = make_optimizer(pipeline.parameters(), settings)
        rows = setup.micro_batch * setup.micro_batches

        def batch(_: int) -> tuple[torch.Tensor, torch.Tensor]:
            shape = (rows, setup.seq)
            return torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)

        with rehearsal.recorded(model, optimizer) as steps, explained(rehearsal):
            steps.told = True
            for number in range(STEPS):
                train_step(pipeline, optimizer, settings, batch, number)
                steps.end()
    return rehearsal.ledger


@contextmanager
def _nobody(*, waits_release: bool) -> Generator[None]:
    """PyTorch's schedules, without other ranks; see `evenload.runtime.dry_exchange` for what is held how long."""
    warm_up, exchange = getattr(PipelineSchedule, _WARM_UP), getattr(schedules, _EXCHANGE)

    def held(operations: list[Any], *_: Any, **__: Any) -> list[_Held]:
        return [_Held([operation.tensor], waits_release=waits_release) for operation in operations]

    def told(_schedule: Any, stages: list[Any], *_: Any, **__: Any) -> None:
        for stage in stages:
            setattr(stage, _MODE, InferenceMode.STATIC)

    setattr(PipelineSchedule, _WARM_UP, told)
    setattr(schedules, _EXCHANGE, held)
    try:
        yield
    finally:
        setattr(PipelineSchedule, _WARM_UP, warm_up)
        setattr(schedules, _EXCHANGE, exchange)
