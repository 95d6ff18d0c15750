"""The dry run of one rank of a plan: local shapes, and the collectives that the rank would take part in."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from evenload.ledger.ledger import Ledger
from evenload.plan.plan import Plan
from evenload.plan.policy import Recompute
from evenload.recompute import apply
from evenload.record.hugging_face import model_builder, token_batches
from evenload.record.planned import DTYPES, check_trainable
from evenload.record.rehearsal import Rehearsal
from evenload.record.runs import Prepared, record_steps
from evenload.record.targets import Target, find_target
from evenload.record.training import OptimizerName, Training, make_optimizer
from evenload.runtime._torch_private import without_fake_tensors
from evenload.runtime.collectives import Collective, of_all_layers
from evenload.runtime.listener import Listener
from evenload.runtime.parallel import apply_tensor_parallel
from evenload.runtime.parts import check_complete, find_parts
from evenload.runtime.pipeline import Pipeline, examined, made, next_token_loss
from evenload.runtime.ranks import find_ranks
from evenload.runtime.rehearse import blank_batch, rehearse
from evenload.runtime.replicas import without_data
from evenload.runtime.schedules import torch_schedule
from evenload.runtime.sharding import apply_data_parallel, check_sharding
from evenload.runtime.world import first_rank, make_mesh, place_of, simulated
from evenload.simulate.composition import Reduction

__all__ = ["RankRun", "divided", "first_rank", "prepare_rank", "step"]


class RankRun(NamedTuple):
    """What the dry run of a rank found."""

    ledger: Ledger
    collectives: tuple[Collective, ...]
    """Of the last step, in order."""


def prepare_rank(
    config: Mapping[str, Any],
    plan: Plan,
    *,
    rank: int = 0,
    device: str = "cuda",
    steps: int = 2,
    autocast: torch.dtype | None = None,
    optimizer: OptimizerName | None = None,
    full: bool = False,
) -> Callable[[], RankRun]:
    """Make a function that runs training steps of one rank of a plan; the imports are done by then.

    Args:
        config: the model, as a Hugging Face configuration.
        plan: how it is trained.
        rank: which of pp x dp x tp ranks; those that share a layer are neighbours, then come the replicas.
        device: the device that the run is for.
        steps: how many steps to run.
        autocast: type in which forward runs under autocast.
        optimizer: in place of the one that the setup names.
        full: run every layer, also those that do exactly what others do.

    Raises:
        EvenloadError: PyTorch has no such run, there is no such rank, or the model cannot be built.
    """
    setup = plan.setup
    check_trainable(plan)
    check_sharding(setup)
    if setup.chunks > 1:
        torch_schedule(plan.schedule, pp=setup.pp, interleave=setup.interleave, micro_batches=setup.micro_batches)
    place_of(rank, setup)
    target = find_target(device)
    build = model_builder(
        config, where=plan.model or "config.json", dtype=DTYPES[setup.parameter_dtype], attention=setup.attention
    )
    chosen: Any = optimizer or setup.optimizer

    def go() -> RankRun:
        run = _Run(plan=plan, build=build, target=target, rank=rank, autocast=autocast, optimizer=chosen)
        with simulated(rank, setup.devices), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of views that are changed in place
            if setup.chunks > 1:
                ledger = run.pipeline(steps)
            else:
                ledger = record_steps(run.rehearsal, run.prepare, steps=steps, full=full)
        return RankRun(ledger=ledger, collectives=run.collectives)

    return go


class _Run:
    """One rank: how its model is made and trained."""

    def __init__(
        self,
        *,
        plan: Plan,
        build: Callable[[], nn.Module],
        target: Target,
        rank: int,
        autocast: torch.dtype | None,
        optimizer: OptimizerName,
    ) -> None:
        self._plan = plan
        self._build = build
        self._target = target
        self._rank = rank
        self._autocast = autocast
        self._optimizer: OptimizerName = optimizer
        self._listener: Listener | None = None
        self._reduced: tuple[str, Reduction] | None = None

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """What the rank sent and received in its last step."""
        heard = () if self._listener is None else self._listener.collectives
        return heard if self._reduced is None else of_all_layers(heard, self._reduced[0], self._reduced[1].source)

    def rehearsal(self) -> Rehearsal:
        """A place for the rank to run in."""
        return Rehearsal(self._target, redirect=False, rank=self._rank, world=self._plan.setup.devices)

    def prepare(self, place: Rehearsal) -> Prepared:
        """The model of the rank, divided as the plan says."""
        plan, setup = self._plan, self._plan.setup
        self._listener, self._reduced = Listener(place.core), None
        with without_fake_tensors(), torch.device("meta"):
            mesh = make_mesh(setup)
            model = self._build()
            selective = _selective(plan)
            if selective:
                apply(model, plan.policy)
            model = divided(model, plan, mesh)
        model.to_empty(device="cpu")
        batch = token_batches(model, micro_batch=setup.micro_batch, seq=setup.seq, device="cpu")
        if setup.dp > 1 and setup.zero == 0:  # has buckets of its own, so it must meet what stands for memory
            model = apply_data_parallel(model, find_parts(model), mesh["dp"], setup, equalize=False)
            without_data(model, mesh["dp"].get_group())
        training = Training(
            batch=batch,
            micro_batches=setup.micro_batches,
            autocast=self._autocast,
            device=self._target.kind,
        )
        return Prepared(
            model=model,
            training=Training(batch=batch, own=partial(step, training, setup.tp)),
            optimizer=partial(make_optimizer, self._optimizer),
            recompute=frozenset() if selective else plan.policy.full,
            whole=selective,  # layers may do what they do for reasons that nobody sees in them
            reduced=self._few,
        )

    def pipeline(self, steps: int) -> Ledger:
        """Run the rank's chunks under their schedule."""
        plan, setup = self._plan, self._plan.setup
        whole = made(self._build)
        anatomy = examined(whole, plan, None, None, self._autocast)
        ranks = find_ranks(plan, make_mesh(setup), "cpu")
        tokens = blank_batch(plan)

        def train(pipeline: Pipeline, optimizer: torch.optim.Optimizer | None) -> None:
            ids = tokens(0)[0]  # labels are the tokens, as without a pipeline
            pipeline.step(ids, ids)
            del ids
            if optimizer is not None:
                optimizer.step()
            for chunk in pipeline.chunks:
                chunk.zero_grad()

        with self.rehearsal() as place:
            self._listener = Listener(place.core)
            return rehearse(
                place,
                whole,
                anatomy,
                plan,
                ranks,
                loss=next_token_loss,
                autocast=self._autocast,
                share=setup.micro_batches,
                optimizer=partial(make_optimizer, self._optimizer),
                step=train,
                steps=steps,
            )

    def _few(self, path: str, reduced: Reduction) -> None:
        self._reduced = path, reduced


def _selective(plan: Plan) -> bool:
    """Whether something else than whole layers is recomputed, which is the engine's business."""
    choices = {plan.for_layer(layer).choice for layer in range(plan.layout.num_layers)}
    return not choices <= {Recompute.NONE, Recompute.FULL} or not plan.policy.mp_comm or plan.policy.slice_activation


def divided(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> nn.Module:
    """A whole model as the ranks of a mesh [dp, tp] hold it; what to call in its place.

    Args:
        model: a causal language model of transformers.
        plan: a plan without a pipeline.
        mesh: the mesh of the run.

    Raises:
        EvenloadError: the model cannot be divided so.
    """
    setup, parts = plan.setup, find_parts(model)
    if setup.tp > 1:
        check_complete(model, parts)
        apply_tensor_parallel(parts, mesh["tp"], sequence_parallel=setup.sequence_parallel)
    if setup.zero == 0:
        return model
    return apply_data_parallel(model, parts, mesh["dp"], setup, gather_again=plan.policy.optimizer_comm)


def step(training: Training, ranks: int, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """A training step; logits that are divided over ranks meet a loss that knows."""
    with loss_parallel() if ranks > 1 else nullcontext():
        training.step(model, optimizer)
