"""One rank of a pipeline on fake tensors: its chunks, and PyTorch's own schedule that runs them.

PyTorch's stages are used as they are, so what they keep is seen: a receive buffer for each micro-batch, in both
directions, results that wait to be sent, and the outputs of every micro-batch in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor.parallel import loss_parallel

from evenload.plan.plan import Plan
from evenload.recompute import apply
from evenload.record.core import Core
from evenload.runtime.anatomy import Anatomy, Passed
from evenload.runtime.dry_exchange import exchanging_nothing
from evenload.runtime.examine import examine
from evenload.runtime.parallel import apply_tensor_parallel
from evenload.runtime.parts import Parts, find_parts
from evenload.runtime.pipeline import next_token_loss
from evenload.runtime.placement import Place, local_policy, places, recomputes
from evenload.runtime.schedules import TorchSchedule, torch_schedule
from evenload.runtime.sharding import apply_data_parallel
from evenload.runtime.skeleton import without_parameters
from evenload.runtime.stages import Chunk, Materials, Skipped, make_chunk


def schedule_of(plan: Plan) -> TorchSchedule:
    """PyTorch's schedule of a plan.

    Raises:
        EvenloadError: it has none of that name, or the sizes break one of its rules.
    """
    setup = plan.setup
    return torch_schedule(plan.schedule, pp=setup.pp, interleave=setup.interleave, micro_batches=setup.micro_batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class DryPipeline:
    """The chunks of one rank, without memory, and how they are run."""

    chunks: nn.ModuleList
    plan: Plan
    kind: TorchSchedule
    anatomy: Anatomy
    mesh: DeviceMesh
    places: tuple[Place, ...]
    """Every chunk of the pipeline."""

    def materialize(self) -> None:
        """Give everything the memory that it would take. Chunks of one rank share the buffers outside their layers."""
        self.chunks.to_empty(device="cpu")
        known: dict[str, torch.Tensor] = {}
        for chunk in cast("list[Chunk]", list(self.chunks)):
            for name, buffer in list(chunk.model.named_buffers()):
                if not name.startswith(f"{self.anatomy.container}."):
                    path, _, own = name.rpartition(".")
                    setattr(chunk.model.get_submodule(path), own, known.setdefault(name, buffer))

    def name_modules(self, core: Core) -> None:
        """Tell a recording the paths that modules have in the whole model."""
        core.paths.put(self.chunks, "")
        for chunk in cast("list[Chunk]", list(self.chunks)):
            core.paths.put(chunk, "")
            container = self.anatomy.container
            own = {f"{container}.{position}": self.anatomy.layers[n] for position, n in enumerate(chunk.place.layers)}
            for path, module in cast("Any", chunk.model).named_modules():
                layer = next((local for local in own if path == local or path.startswith(f"{local}.")), None)
                core.paths.put(module, path if layer is None else own[layer] + path.removeprefix(layer))

    def stages(self, core: Core) -> list[PipelineStage]:
        """PyTorch's stages, which tell a recording the micro-batch that they work on."""
        hidden = _local(self.anatomy.hidden, self.plan)
        made: list[PipelineStage] = []
        for chunk in cast("list[Chunk]", list(self.chunks)):
            place = chunk.place
            given: tuple[torch.Tensor, ...] = () if place.first else (hidden.like(),)
            stage = _NumberedStage(
                chunk,
                place.index,
                len(self.places),
                torch.device("cpu"),
                input_args=given,
                output_args=(self.anatomy.result.like() if place.last else hidden.like(),),
                group=self.mesh.get_group("pp"),
            )
            stage.core = core
            made.append(stage)
        return made

    def run(
        self,
        core: Core,
        optimizer: torch.optim.Optimizer | None,
        *,
        steps: int,
        ended: Callable[[], None],
        waits_release: bool,
    ) -> None:
        """Run training steps under the schedule.

        Args:
            core: what records them.
            optimizer: of the parameters of all chunks.
            steps: how many.
            ended: called after each.
            waits_release: see `exchanging_nothing`.
        """
        setup = self.plan.setup
        stages = self.stages(core)
        holds_last = any(stage.is_last for stage in stages)

        def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return next_token_loss(logits, target) / setup.micro_batches

        schedule: Any = cast("Any", get_schedule_class(self.kind.torch_name))(
            stages if self.kind.several else stages[0],
            n_microbatches=setup.micro_batches,
            loss_fn=loss,
            scale_grads=False,
        )
        with exchanging_nothing(waits_release=waits_release), loss_parallel() if setup.tp > 1 else nullcontext():
            for _ in range(steps):
                tokens = torch.empty((setup.micro_batch * setup.micro_batches, setup.seq), dtype=torch.int64)
                losses: list[torch.Tensor] = []
                schedule.step(
                    tokens=tokens,
                    target=tokens if holds_last else None,
                    losses=losses if holds_last else None,
                    return_outputs=False,
                )
                losses.clear()
                if optimizer is not None:
                    optimizer.step()
                self.chunks.zero_grad()
                ended()


def make_pipeline(build: Callable[[], nn.Module], plan: Plan, mesh: DeviceMesh, stage: int) -> DryPipeline:
    """The chunks of one rank, on the meta device, divided as a plan says.

    Args:
        build: makes the whole model.
        plan: who holds which layer, and how it is divided further.
        mesh: the mesh of the run, [pp, dp, tp].
        stage: the rank's place in the pipeline.

    Raises:
        EvenloadError: the model cannot be cut, or a chunk cannot be divided.
    """
    setup, kind = plan.setup, schedule_of(plan)
    with without_parameters():
        whole = build()
    anatomy = examine(whole, (torch.zeros((setup.micro_batch, setup.seq), dtype=torch.int64),))
    every = places(plan.layout, kind.style)
    materials = Materials(whole, torch.device("meta"), seed=0, init=_leave_empty)
    chunks: list[Chunk] = []
    for place in every:
        if place.rank == stage:
            chunk = make_chunk(materials, place, anatomy)
            _recompute(chunk, plan, kind)
            parts = _parts(chunk)
            if setup.tp > 1:
                apply_tensor_parallel(parts, mesh["tp"], sequence_parallel=setup.sequence_parallel)
            if setup.dp > 1:
                apply_data_parallel(chunk, parts, mesh["dp"], setup, gather_again=plan.policy.optimizer_comm)
            chunk.arm()
            chunks.append(chunk)
    return DryPipeline(chunks=nn.ModuleList(chunks), plan=plan, kind=kind, anatomy=anatomy, mesh=mesh, places=every)


def _parts(chunk: Chunk) -> Parts:
    """The parts of a chunk; those of other stages are not there."""
    found = find_parts(chunk.model, chunk.container)

    def own(module: nn.Module | None) -> nn.Module | None:
        return None if module is None or isinstance(module, Skipped) else module

    return Parts(
        layers=found.layers if chunk.place.layers else (),
        embedding=own(found.embedding) if chunk.place.first else None,
        norm=own(found.norm) if chunk.place.last else None,
        head=own(found.head) if chunk.place.last else None,
    )


def _recompute(chunk: Chunk, plan: Plan, kind: TorchSchedule) -> None:
    policy = local_policy(plan.policy, chunk.place.layers)
    if chunk.place.layers and recomputes(policy):
        apply(chunk.model, policy, layers=chunk.container, whole="engine" if kind.parts else "auto")


def _local(hidden: Passed, plan: Plan) -> Passed:
    """What one rank sends of the hidden states."""
    if not plan.setup.sequence_parallel:
        return hidden
    batch, tokens, *rest = hidden.shape
    return Passed(shape=(batch, tokens // plan.setup.tp, *rest), dtype=hidden.dtype)


def _leave_empty(_module: nn.Module) -> None:
    """Parameters of a dry run have no values."""


class _NumberedStage(PipelineStage):
    """Tells a recording which micro-batch forward works on."""

    core: Core

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        phases = self.core.phases
        phases.fix_micro_batch(fwd_chunk_id)
        depth = phases.depth
        try:
            return cast("Any", super()).forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        finally:
            phases.unwind(depth)  # a chunk ends forward behind its last layer, inside the modules around it
