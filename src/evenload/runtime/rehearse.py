"""One rank of a pipeline on fake tensors: the real chunks and PyTorch's own schedule, in groups that send nothing.

What a rank holds follows from PyTorch's own code, which runs as it will run: the order of actions, what stages keep,
and which sends are held until when. So nothing about a schedule has to be modelled. The rank may be this process's own,
before its run begins, or one that does not exist (`evenload.runtime.world`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage

from evenload.ledger.ledger import Ledger
from evenload.plan.plan import Plan
from evenload.record.core import Core
from evenload.record.failures import explained
from evenload.record.rehearsal import Rehearsal
from evenload.record.targets import find_target
from evenload.runtime._torch_private import forget_meshes
from evenload.runtime.anatomy import Anatomy
from evenload.runtime.dry_exchange import exchanging_nothing
from evenload.runtime.materials import Shapes
from evenload.runtime.optimizer import make_optimizer
from evenload.runtime.pipeline import Loss, Pipeline, assemble
from evenload.runtime.ranks import Ranks, find_ranks
from evenload.runtime.settings import RunSettings
from evenload.runtime.stages import name_modules
from evenload.runtime.step import train_step
from evenload.runtime.world import DIMENSIONS

STEPS: Final = 2
"""The second step is what later ones are like: states of the optimizer and receive buffers are there."""

Optimizer = torch.optim.Optimizer


def rehearse_rank(
    whole: nn.Module,
    anatomy: Anatomy,
    plan: Plan,
    settings: RunSettings,
    *,
    loss: Loss,
    autocast: torch.dtype | None = None,
    device: str = "cpu",
) -> Ledger:
    """The ledger of this process's training steps, without their memory. Called on every rank: each has its own.

    Args:
        whole: the whole model, with or without values.
        anatomy: its parts.
        plan: how it is trained.
        settings: the optimizer, and how many steps of the schedule it waits for.
        loss: mean loss of a micro-batch.
        autocast: type in which forward runs under autocast.
        device: the device that the run is for.

    Raises:
        EvenloadError: the model cannot run on fake tensors.
    """
    batch = blank_batch(plan)
    numbers = iter(range(STEPS))

    def step(pipeline: Pipeline, optimizer: Optimizer | None) -> None:
        train_step(pipeline, cast("Optimizer", optimizer), settings, batch, next(numbers))

    with (
        among_nobody(plan) as here,
        Rehearsal(find_target(device), redirect=False, rank=here.rank, world=here.world) as place,
    ):
        return rehearse(
            place,
            whole,
            anatomy,
            plan,
            here,
            loss=loss,
            autocast=autocast,
            share=plan.setup.micro_batches * settings.accumulation,
            optimizer=lambda model: make_optimizer(model.parameters(), settings),
            step=step,
            steps=STEPS,
        )


def rehearse(
    place: Rehearsal,
    whole: nn.Module,
    anatomy: Anatomy,
    plan: Plan,
    ranks: Ranks,
    *,
    loss: Loss,
    autocast: torch.dtype | None,
    share: int,
    optimizer: Callable[[nn.Module], Optimizer | None],
    step: Callable[[Pipeline, Optimizer | None], None],
    steps: int,
) -> Ledger:
    """Run training steps of one rank in a place without memory.

    Args:
        place: where, already entered.
        whole: the whole model, with or without values.
        anatomy: its parts.
        plan: how it is trained.
        ranks: which rank, in groups that send nothing.
        loss: mean loss of a micro-batch.
        autocast: type in which forward runs under autocast.
        share: what the loss of a micro-batch is divided by.
        optimizer: makes that of the rank's chunks.
        step: runs one step.
        steps: how many.

    Raises:
        EvenloadError: the model cannot be divided so, or cannot run on fake tensors.
    """
    here = replace(ranks, device=torch.device("cpu"), stands_for=place.target.kind)
    with explained(place), exchanging_nothing(waits_release=place.target.accelerator), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of views that are changed in place
        materials = Shapes(whole, place.fake)
        pipeline = assemble(materials, anatomy, plan, here, loss=loss, autocast=autocast, share=share)
        pipeline.tie()
        for stage in pipeline.stages:
            _number_forwards(stage, place.core)
        model = nn.ModuleList(pipeline.chunks)
        name_modules(place.core.paths, model)
        chosen = optimizer(model)
        with place.recorded(model, chosen) as count:
            count.told = True
            for _ in range(steps):
                step(pipeline, chosen)
                count.end()
    return place.ledger


def blank_batch(plan: Plan) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets of any step, without values."""
    shape = (plan.setup.micro_batch * plan.setup.micro_batches, plan.setup.seq)

    def batch(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)

    return batch


@contextmanager
def among_nobody(plan: Plan) -> Generator[Ranks]:
    """This process's place in groups like those of the run that send nothing, for as long as the block lasts."""
    setup = plan.setup
    fake: Any = dict.fromkeys(DIMENSIONS, "fake")
    forget_meshes()
    mesh = init_device_mesh("cpu", (setup.pp, setup.dp, setup.tp), mesh_dim_names=DIMENSIONS, backend_override=fake)
    try:
        yield find_ranks(plan, mesh, "cpu")
    finally:
        for name in DIMENSIONS:
            distributed.destroy_process_group(mesh.get_group(name))
        forget_meshes()


def _number_forwards(stage: PipelineStage, core: Core) -> None:
    """Let a stage tell a recording which micro-batch forward works on."""
    phases, forward = core.phases, cast("Any", stage).forward_one_chunk

    def numbered(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        phases.fix_micro_batch(fwd_chunk_id)
        depth = phases.depth
        try:
            return forward(fwd_chunk_id, *args, **kwargs)
        finally:
            phases.unwind(depth)  # a chunk ends forward behind its last layer, inside the modules around it

    cast("Any", stage).forward_one_chunk = numbered
