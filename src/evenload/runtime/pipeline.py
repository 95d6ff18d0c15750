"""`parallelize`: from a model and a plan to the stages of this rank and a schedule that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from traceback import extract_tb
from typing import Any, Final, cast

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from evenload.errors import EvenloadError, shown
from evenload.plan.plan import Plan
from evenload.recompute.handle import Handle, apply
from evenload.record.frames import is_library
from evenload.runtime.anatomy import Anatomy
from evenload.runtime.divide import divide, local_hidden, replicated
from evenload.runtime.examine import examine
from evenload.runtime.launch import agreed
from evenload.runtime.materials import Materials
from evenload.runtime.placement import Place, local_policy, places, recomputes
from evenload.runtime.ranks import Ranks, find_ranks
from evenload.runtime.schedules import TorchSchedule, torch_schedule
from evenload.runtime.sharding import check_sharding
from evenload.runtime.skeleton import Init, without_parameters
from evenload.runtime.stages import Chunk, make_chunk
from evenload.runtime.tied import Tied

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits of a micro-batch, its targets) -> the mean loss."""


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in fp32; a target of -100 does not count.

    Args:
        logits: [sequences, tokens, vocabulary].
        targets: [sequences, tokens], the token that follows each.
    """
    return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=-100)


class Pipeline:
    """Runs the steps of one rank. Made by `parallelize`."""

    def __init__(
        self,
        schedule: Any,
        stages: Sequence[PipelineStage],
        *,
        ranks: Ranks,
        handles: Sequence[Handle],
        autocast: torch.dtype | None,
        anatomy: Anatomy,
        kind: TorchSchedule,
        places: Sequence[Place],
        micro_batches: int,
    ) -> None:
        self.schedule = schedule
        """PyTorch's own schedule."""
        self.stages = tuple(stages)
        """PyTorch's stages of this rank, in the order of their layers."""
        self.ranks = ranks
        self.handles = tuple(handles)
        """Recomputation on the chunks of this rank."""
        self.anatomy = anatomy
        self.kind = kind
        self.places = tuple(places)
        """Every chunk of the pipeline, and who holds it."""
        self.micro_batches = micro_batches
        self._tied: Tied | None = None
        self.autocast = autocast
        self._losses: list[torch.Tensor] = []

    @property
    def chunks(self) -> list[Chunk]:
        """The modules of this rank's stages."""
        return [cast("Chunk", getattr(stage.submod, "module", stage.submod)) for stage in self.stages]

    @property
    def holds_last(self) -> bool:
        """Whether this rank computes the loss."""
        return any(chunk.place.last for chunk in self.chunks)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank, each once."""
        found = {id(one): one for chunk in self.chunks for one in chunk.parameters()}
        return list(found.values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank by their names in the whole model."""
        return {
            chunk.full_names[name.removeprefix("model.")]: parameter
            for chunk in self.chunks
            for name, parameter in chunk.named_parameters(remove_duplicate=False)
        }

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of this rank that belong to the model's state, by their names in the whole model."""
        return {
            full: chunk.model.get_buffer(local) for chunk in self.chunks for local, full in chunk.full_buffers.items()
        }

    def copies(self) -> frozenset[int]:
        """Identities of parameters of this rank that are copies of tied ones of another rank."""
        if self._tied is None or not self._tied.copy:
            return frozenset()
        return frozenset(map(id, self._tied.parameters))

    def step(
        self, tokens: torch.Tensor, target: torch.Tensor, *, accumulate: bool = False, **more: Any
    ) -> torch.Tensor | None:
        """Forward and backward of all micro-batches; called alike on every rank of a pipeline, with the same batch.

        Gradients are those of the mean over micro-batches, and add to those that are there.

        Args:
            tokens: [micro_batches * micro_batch, ...], what the model is called with.
            target: [micro_batches * micro_batch, ...], what the loss is computed with.
            accumulate: more steps follow before the optimizer's.
            more: keywords that the model is called with; tensors are divided into micro-batches.

        Returns:
            The mean loss on the rank that holds the last chunk, None on all others.

        Raises:
            EvenloadError: the batch is not one of the plan, whose ranks know what to wait for.
        """
        self._check_batch(tokens, target)
        self._losses.clear()
        last = self.holds_last
        with self._computing(), loss_parallel() if self.ranks.tp_mesh is not None else nullcontext():
            self.schedule.step(
                tokens=tokens,
                target=target if last else None,
                losses=self._losses if last else None,
                return_outputs=False,
                **more,
            )
        if self._tied is not None and not accumulate:
            self._tied.add_gradients()
        return torch.stack([whole(loss.detach()) for loss in self._losses]).sum() if last else None

    def share(self, loss: torch.Tensor | None) -> torch.Tensor:
        """The loss of a step on every rank of the pipeline."""
        holder = next(place.rank for place in self.places if place.last)
        value = torch.zeros((), device=self.ranks.device) if loss is None else loss.float()
        if self.ranks.pp > 1:
            cast("Any", distributed).broadcast(value, group=self.ranks.pp_group, group_src=holder)
        return value

    def tie(self) -> None:
        """Give tied parameters of two ranks the same values, and add up their gradients from now on."""
        first, last, own = self.places[0].rank, self.places[-1].rank, self.ranks.stage
        if not self.anatomy.tied or first == last or own not in {first, last}:
            return
        chunk = self.chunks[0] if own == first else self.chunks[-1]
        self._tied = Tied(chunk, self.anatomy.tied, self.ranks, other=last if own == first else first)

    def remove(self) -> None:
        """End recomputation; the stages stay."""
        for handle in self.handles:
            handle.remove()

    def _check_batch(self, tokens: torch.Tensor, target: torch.Tensor) -> None:
        one, *rest = self.anatomy.given
        wanted = (one * self.micro_batches, *rest)
        if tuple(tokens.shape) != wanted or tuple(target.shape[:1]) != wanted[:1]:
            raise EvenloadError(
                f"tokens are {tuple(tokens.shape)}, target {tuple(target.shape)}; a step of this plan takes {wanted}: "
                f"{self.micro_batches} micro-batches of {self.anatomy.given}",
                where="tokens",
                fix="give every step such a batch, or parallelize with another plan or example",
            )

    def _computing(self) -> Any:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.ranks.stands_for or self.ranks.device.type, self.autocast)


def parallelize(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan,
    mesh: DeviceMesh | None = None,
    *,
    loss: Loss = next_token_loss,
    layers: str | None = None,
    example: tuple[torch.Tensor, ...] | None = None,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    accumulation: int = 1,
    seed: int = 0,
    init: Init | None = None,
) -> tuple[Pipeline, tuple[PipelineStage, ...]]:
    """Divide a decoder over the ranks of a pipeline as a plan says.

    Args:
        model: a function that makes the decoder, of which only this rank's parameters are ever there; or a decoder.
            One with values is taken over: its parameters are trained, and stay its own.
        plan: who holds which layer, what is recomputed, and the schedule.
        mesh: a mesh with a dimension `pp`; None: all processes are one pipeline.
        loss: mean loss of a micro-batch, from what the model returns and the target.
        layers: path of what holds the repeated layers, where it is not obvious.
        example: what the model is called with for one micro-batch; None: tokens, as many as the plan says.
        device: where parameters are; None: this rank's GPU where the backend is for GPUs, else the CPU.
        autocast: type in which forward runs under autocast.
        accumulation: steps of the schedule for one of the optimizer: the loss is divided by it.
        seed: of the first values of parameters, which do not depend on the plan.
        init: gives the parameters that a module itself holds their first values; None: as the module knows.

    Returns:
        What runs a step, and this rank's stages.

    Raises:
        EvenloadError: the plan does not fit the processes or the model, or the model cannot be cut. Ranks on which
            nothing is wrong raise it too, and name the rank that knows more.
    """
    if not isinstance(cast("object", plan), Plan):
        raise EvenloadError(f"the plan is a {type(plan).__name__}", where="plan", fix="pass an evenload.plan.plan.Plan")
    if isinstance(accumulation, bool) or not isinstance(cast("object", accumulation), int) or accumulation < 1:
        raise EvenloadError(f"accumulation is {shown(accumulation)}", where="accumulation", fix="give 1 or more")
    ranks = find_ranks(plan, mesh, device)
    with agreed():
        check_sharding(plan.setup)
        model = made(model)
        anatomy = examined(model, plan, layers, example, autocast)
        materials = Materials(model, ranks.device, seed=seed, init=init)
        pipeline = assemble(
            materials, anatomy, plan, ranks, loss=loss, autocast=autocast, share=plan.setup.micro_batches * accumulation
        )
    pipeline.tie()
    return pipeline, pipeline.stages


def assemble(
    materials: Materials,
    anatomy: Anatomy,
    plan: Plan,
    ranks: Ranks,
    *,
    loss: Loss,
    autocast: torch.dtype | None,
    share: int,
) -> Pipeline:
    """This rank's part of a pipeline, made without talking to other ranks but those that share its layers.

    Args:
        materials: where parameters come from.
        anatomy: of the whole model.
        plan: how it is divided.
        ranks: this process's place.
        loss: mean loss of a micro-batch.
        autocast: type in which forward runs under autocast.
        share: what the loss of a micro-batch is divided by.

    Raises:
        EvenloadError: the plan's schedule cannot run so, or its policy does not fit the layers.
    """
    setup = plan.setup
    kind = torch_schedule(plan.schedule, pp=setup.pp, interleave=setup.interleave, micro_batches=setup.micro_batches)
    every = places(plan.layout, kind.style)
    _check_tied(anatomy, every, plan)
    chunks = [make_chunk(materials, place, anatomy) for place in every if place.rank == ranks.stage]
    with materials.dividing():
        for chunk in chunks:
            divide(chunk, plan, ranks)
    for chunk in chunks:
        materials.fill(chunk.model, chunk.full_names)
    handles = [handle for chunk in chunks if (handle := _recompute(chunk, plan, kind)) is not None]
    for chunk in chunks:
        chunk.arm()
    anatomy = replace(anatomy, hidden=local_hidden(anatomy.hidden, plan.setup))
    stages = tuple(_stage(chunk, replicated(chunk, plan, ranks), len(every), anatomy, ranks) for chunk in chunks)

    def divided(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss(logits, target) / share

    schedule = cast("Any", get_schedule_class(kind.torch_name))(
        list(stages) if kind.several else stages[0],
        n_microbatches=setup.micro_batches,
        loss_fn=divided,
        scale_grads=False,  # by the loss: a tied parameter of two stages of one rank would be scaled twice
    )
    return Pipeline(
        schedule,
        stages,
        ranks=ranks,
        handles=handles,
        autocast=autocast,
        anatomy=anatomy,
        kind=kind,
        places=every,
        micro_batches=setup.micro_batches,
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that ranks divide between them, as a plain one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def made(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """The model itself, or what a function makes, without values of parameters.

    Raises:
        EvenloadError: the function makes something else, or nothing.
    """
    if isinstance(model, nn.Module):
        return model
    try:
        with without_parameters():
            found = cast("object", model())
    except (EvenloadError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the user's code raises
        own = [frame for frame in extract_tb(error.__traceback__)[1:] if not is_library(frame.filename)]
        raise EvenloadError(
            f"the function that makes the model raised {type(error).__name__}: {error}",
            where=f"{own[-1].filename}:{own[-1].lineno}" if own else "$.model",
        ) from error
    if not isinstance(found, nn.Module):
        raise EvenloadError(f"the function makes a {type(found).__name__}, not a torch.nn.Module", where="$.model")
    return found


def examined(
    model: nn.Module,
    plan: Plan,
    layers: str | None,
    example: tuple[torch.Tensor, ...] | None,
    autocast: torch.dtype | None,
) -> Anatomy:
    """The parts of a model that a plan is for.

    Raises:
        EvenloadError: the model cannot be cut, or the plan is for another.
    """
    batch = example or (torch.zeros((plan.setup.micro_batch, plan.setup.seq), dtype=torch.int64),)
    with nullcontext() if autocast is None else torch.autocast(batch[0].device.type, autocast):
        anatomy = examine(model, batch, layers)
    if len(anatomy.layers) != plan.layout.num_layers:
        raise EvenloadError(
            f"the plan places {plan.layout.num_layers} layers, the model has {len(anatomy.layers)}",
            where="$.layout",
            fix="make the plan for this model",
        )
    return anatomy


def _check_tied(anatomy: Anatomy, every: Sequence[Place], plan: Plan) -> None:
    """Both ends of one rank have the same parameter, which dividing them would make two of."""
    divided = plan.setup.tp > 1 or plan.setup.dp > 1
    if divided and anatomy.tied and len(every) > 1 and every[0].rank == every[-1].rank:
        raise EvenloadError(
            f"{anatomy.tied[0][0]} is used at both ends of the model, which {plan.schedule} puts on one rank: dividing "
            "them by tp or dp would make two parameters of it",
            where="$.schedule",
            fix="use interleaved_1f1b, or tp 1 and dp 1, or a model whose embeddings are not tied",
        )


def _recompute(chunk: Chunk, plan: Plan, kind: TorchSchedule) -> Handle | None:
    policy = local_policy(plan.policy, chunk.place.layers)
    if not chunk.place.layers or not (recomputes(policy) or policy.optimizer_comm):
        return None
    # PyTorch's checkpoint would run forward again for every group of parameters where backward comes in parts.
    return apply(chunk.model, policy, layers=chunk.container, whole="engine" if kind.parts else "auto")


_NONE: Final[tuple[torch.Tensor, ...]] = ()


def _stage(chunk: Chunk, called: nn.Module, count: int, anatomy: Anatomy, ranks: Ranks) -> PipelineStage:
    """PyTorch's stage of a chunk. What it sends and receives is known, so no rank has to run it once to find out."""
    place = chunk.place
    return PipelineStage(
        called,
        place.index,
        count,
        ranks.device,
        input_args=_NONE if place.first else (anatomy.hidden.like(),),
        output_args=(anatomy.result.like() if place.last else anatomy.hidden.like(),),
        group=ranks.pp_group,
    )
