"""What two processes do together; run by `test_distributed.py`, which looks at the results.

All scenarios run in one pair of processes, because starting one takes seconds. Each returns plain values.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.recompute.measuring import Alive, Operators, allocated, same
from tests.recompute.models import DEFAULT, FAMILIES, toy
from torch import distributed, nn

from evenload.plan.policy import LayerPolicy, Policy
from evenload.recompute import apply

RANKS = 2
EVERYTHING = (".*", r".*\..*")
ALL = frozenset(range(3))
SCENARIOS: dict[str, Callable[[], Any]] = {}


def scenario(run: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[run.__name__] = run
    return run


def main(rank: int, folder: str) -> None:
    """One process: run everything and leave the results in a file."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", RANKS)
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS, store=store)
    results: dict[str, Any] = {}
    for name, run in SCENARIOS.items():
        try:
            results[name] = run()
        except Exception:  # noqa: BLE001  # the other rank would wait for ever: both must go on
            results[name] = traceback.format_exc()
    torch.save(results, Path(folder) / f"results{rank}.pt")
    distributed.destroy_process_group()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


class Training:
    """A model, its forward, and what a step of it costs."""

    def __init__(self, model: nn.Module, forward: Callable[[], torch.Tensor], layers: nn.Module | None = None) -> None:
        self.model = model
        self.forward = forward
        self.layers = layers if layers is not None else model
        self.step()
        with Operators() as seen:
            self.expected, self.collectives = self.step()
        self.operators = seen.counts
        self.kept = self.keeps()

    def step(self) -> tuple[list[torch.Tensor | None], dict[str, int]]:
        self.model.zero_grad()
        torch.manual_seed(3)
        with Operators() as seen:
            self.forward().backward()
        gradients = [None if one.grad is None else local(one.grad) for one in self.model.parameters()]
        return gradients, collectives(seen)

    def keeps(self) -> int:
        alive = Alive()
        with alive:
            loss = self.forward()
        kept = []
        for _ in range(10):  # threads of gloo let go of their buffers when they come to it
            time.sleep(0.01)
            kept.append(alive.nbytes)
        loss.backward()
        return min(kept)

    def under(self, *policy: Any, **options: Any) -> dict[str, Any]:
        """Three steps with recomputation, next to those without."""
        from torch._C._distributed_c10d import _get_work_registry_size

        with apply(self.layers, *policy, **options) as handle:
            steps = [self.step() for _ in range(2)]
            with Operators() as seen:
                steps.append(self.step())
            kept = self.keeps()
            held, _, loss = allocated(self.forward)
            loss.backward()
            report = handle.report()
            return {
                "same": [same(gradients, self.expected) for gradients, _ in steps],
                "again": dict(seen.counts - self.operators),
                "freed": self.kept - kept,
                "predicted": report.freed,
                "kept": kept,
                "held": held,
                "before": self.collectives,
                "after": steps[-1][1],
                "served": [dict(state.served) for state in handle._states],
                "declined": [
                    one.reason for state in handle._states if state.last for one in state.last.decision.declined
                ],
                "notices": [notice for kind in report.kinds for notice in kind.notices],
                "unwaited": _get_work_registry_size(),
            }


def collectives(seen: Operators) -> dict[str, int]:
    """Collectives that ran, by kind."""
    words = ("all_gather", "allgather", "reduce_scatter", "all_reduce", "allreduce")
    found = {name: count for name, count in seen.counts.items() if any(word in name for word in words)}
    found.pop("all_gather_copy_in", None)  # FSDP's own copy, no collective
    return found


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(distributed.get_rank())
    return torch.randint(0, 128, (2, 32), generator=generator)


# ---- data parallel ----


@scenario
def ddp_llama() -> Any:
    from torch.nn.parallel import DistributedDataParallel

    model, _ = FAMILIES["llama"]()
    wrapped, ids = DistributedDataParallel(model), batch()
    training = Training(model, lambda: wrapped(input_ids=ids, labels=ids).loss)
    return [training.under(select=patterns) for patterns in (DEFAULT, (".*norm",), EVERYTHING)]


@scenario
def ddp_toy() -> Any:
    from torch.nn.parallel import DistributedDataParallel

    model, _ = toy()
    wrapped, x = DistributedDataParallel(model), torch.randn(2, 16, 8)
    return [Training(model, lambda: wrapped(x)).under(select=EVERYTHING)]


def sharded(model: nn.Module, layers: Any, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model)
    return model


@scenario
def fsdp_llama() -> Any:
    model, _ = FAMILIES["llama"]()
    sharded(model, model.model.layers)
    ids = batch()
    training = Training(model, lambda: model(input_ids=ids, labels=ids).loss)
    return [training.under(select=patterns) for patterns in (DEFAULT, (".*norm",), EVERYTHING)]


@scenario
def fsdp_toy() -> Any:
    model, _ = toy()
    sharded(model, model.layers)
    x = torch.randn(2, 16, 8)
    return [Training(model, lambda: model(x)).under(select=EVERYTHING)]


@scenario
def fsdp_mixed_precision() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model, _ = FAMILIES["llama"]()
    sharded(model, model.model.layers, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    ids = batch()
    training = Training(model, lambda: model(input_ids=ids, labels=ids).loss)
    return [training.under(select=patterns) for patterns in (DEFAULT, (".*norm",), EVERYTHING)]


@scenario
def fsdp_inside_layers() -> Any:
    """Halves of a layer are gathered one by one, while the layer runs."""
    from torch.distributed.fsdp import fully_shard

    model, _ = FAMILIES["llama"]()
    for layer in model.model.layers:
        fully_shard(layer.self_attn)
        fully_shard(layer.mlp)
        fully_shard(layer)
    fully_shard(model)
    ids = batch()
    training = Training(model, lambda: model(input_ids=ids, labels=ids).loss)
    return [training.under(select=patterns) for patterns in (DEFAULT, EVERYTHING)]


@scenario
def fsdp_after_apply() -> Any:
    model, _ = FAMILIES["llama"]()
    ids = batch()
    handle = apply(model, select=EVERYTHING)
    sharded(model, model.model.layers)
    training = Training(model, lambda: model(input_ids=ids, labels=ids).loss)
    predicted, kept = handle.report().freed, training.kept
    handle.remove()
    plain = Training(model, training.forward)
    return {"same": same(training.expected, plain.expected), "freed": plain.kept - kept, "predicted": predicted}


@scenario
def optimizer_comm() -> Any:
    """`parallel_optimizer_comm_recompute`: parameters are gathered again in backward, or stay gathered."""
    results = {}
    for first in (True, False):
        model, _ = FAMILIES["llama"]()
        sharded(model, model.model.layers, reshard_after_forward=first)
        ids = batch()
        training = Training(model, lambda model=model, ids=ids: model(input_ids=ids, labels=ids).loss)
        results[first] = {
            "plain": training.collectives,
            "again": training.under(Policy(optimizer_comm=True)),
            "kept": training.under(Policy(), optimizer_comm=False),
            "as it was": training.under(Policy()),
            "restored": training.step()[1],
        }
    return results


# ---- pipelines whose backward comes in parts ----


class Part(nn.Module):
    """One stage of one layer."""

    def __init__(self, model: nn.Module, index: int, family: str) -> None:
        super().__init__()
        layers = model.layers if family == "toy" else model.model.layers
        self.layers = nn.ModuleList([layers[index]])
        self.rotary = None if family == "toy" else model.model.rotary_emb

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = {}
        if self.rotary is not None:
            options = {"position_embeddings": self.rotary(x, torch.arange(x.shape[1])[None])}
        for layer in self.layers:
            x = layer(x, **options)
        return x


def piped(family: str, schedule: str, recomputed: bool) -> dict[str, Any]:
    """Gradients of one rank's stages after a step, and how often their layers ran."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    model, _ = toy(layers=4) if family == "toy" else FAMILIES["llama"](num_hidden_layers=4)
    rank, x = distributed.get_rank(), torch.randn(4, 16, 32 if family == "toy" else 64)
    indices = (rank, 3 - rank) if schedule.startswith(("ZBV", "DualPipeV")) else (rank, rank + 2)
    parts = [Part(model, index, family) for index in indices]
    calls: list[int] = []
    for part in parts:
        part.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    example = (x[:1].clone().requires_grad_(),)
    stages = [
        PipelineStage(
            part, index, 4, torch.device("cpu"), input_args=example if index else (x[:1],), output_args=example
        )
        for part, index in zip(parts, indices, strict=True)
    ]
    made = get_schedule_class(schedule)(
        stages, n_microbatches=4, loss_fn=lambda y, target: (y - target).square().mean()
    )
    handles = [apply(part, LayerPolicy(full=True), layers="layers", whole="engine") for part in parts if recomputed]
    for _ in range(2):
        for part in parts:
            part.zero_grad()
        calls.clear()
        last = any(stage.is_last for stage in stages)
        made.step(*((x,) if rank == 0 else ()), **({"target": x * 2} if last else {}), return_outputs=False)
    served = [dict(state.served) for handle in handles for state in handle._states]
    freed = sum(handle.report().freed for handle in handles)
    for handle in handles:
        handle.remove()
    found = [None if one.grad is None else one.grad.clone() for part in parts for one in part.parameters()]
    return {"gradients": found, "calls": len(calls), "served": served, "freed": freed}


@scenario
def zero_bubble() -> Any:
    """Backward for inputs and for weights apart: forward must not run again for each group of parameters."""
    results = {}
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "Interleaved1F1B"):
        for family in ("toy", "llama"):
            plain, ours = (piped(family, schedule, recomputed) for recomputed in (False, True))
            results[schedule, family] = {
                "same": same(ours["gradients"], plain["gradients"]),
                "calls": (plain["calls"], ours["calls"]),
                "served": ours["served"],
                "freed": ours["freed"],
            }
    return results


# ---- tensor parallel ----


def divided(family: str, sequence: bool) -> Training:
    """Two layers divided over the ranks, with or without sequence parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (RANKS,))
    out = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=out),
    }
    if sequence:
        plan["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    if family == "toy":
        model, _ = toy(layers=2)
        plan |= {"norm": SequenceParallel()} if sequence else {}
        layers, options = model.layers, {}
        hidden = model.first(torch.randn(2, 32, 8, generator=torch.Generator().manual_seed(1))).detach()
    else:
        model, _ = FAMILIES["llama"](num_hidden_layers=2)
        layers = model.model.layers
        plan |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan["self_attn.o_proj"] = RowwiseParallel(output_layouts=out)
        if sequence:
            plan |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
            plan["self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
        ids = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(1))
        hidden = model.model.embed_tokens(ids).detach()
        options = {"position_embeddings": model.model.rotary_emb(hidden, torch.arange(32)[None])}
    for layer in layers:
        parallelize_module(layer, mesh, plan)

    def forward() -> torch.Tensor:
        state = hidden.clone().requires_grad_() * 1
        if sequence:
            state = state.chunk(RANKS, 1)[distributed.get_rank()].contiguous()
        for layer in layers:
            state = layer(state, **options)
        return state.square().mean()

    return Training(layers, forward)


@scenario
def tensor_parallel() -> Any:
    results = {}
    for family in ("toy", "llama"):
        for sequence in (True, False):
            training = divided(family, sequence)
            results[family, sequence] = [
                training.under(select=patterns) for patterns in (DEFAULT, (".*norm",), ("mlp",), EVERYTHING)
            ]
    return results


@scenario
def tensor_parallel_on_fake_tensors() -> Any:
    """Recorded on fake tensors: the same plan, the same bytes."""
    results = {}
    for sequence in (True, False):
        training = divided("llama", sequence)
        with apply(training.layers, select=EVERYTHING) as handle:
            training.step()
            real = [(state.last.decision, state.last.everything) for state in handle._states]
        result = training.under(select=EVERYTHING, rehearse=True)
        with apply(training.layers, select=EVERYTHING, rehearse=True) as handle:
            training.step()
            fake = [(state.last.decision, state.last.everything) for state in handle._states]
        results[sequence] = {**result, "equal": real == fake}
    return results


@scenario
def select_comm() -> Any:
    """`select_comm_recompute`: what a collective brought is dropped, and the collective runs again."""
    training = divided("llama", sequence=True)
    norms = (r".*norm\.norm",)
    return {
        "default": training.under(LayerPolicy(comm=(r".*\.norm",))),
        "excluded": training.under(LayerPolicy(comm=norms, comm_exclude=(r"attention_norm\.norm",))),
        "all excluded": training.under(LayerPolicy(comm=norms, comm_exclude=norms)),
        "with norms": training.under(LayerPolicy(comm=norms, select=(".*norm",))),
        "select": training.under(LayerPolicy(select=(".*norm",))),
        "no sequence parallelism": divided("llama", sequence=False).under(LayerPolicy(comm=norms)),
    }


@scenario
def mp_comm() -> Any:
    """`mp_comm_recompute: False`: inside a recomputed layer the results of collectives stay kept."""
    results = {}
    for sequence in (True, False):
        training = divided("llama", sequence)
        results[sequence] = {
            "again": training.under(Policy(full=ALL - {2})),
            "engine": training.under(Policy(full=ALL - {2}), whole="engine"),
            "kept": training.under(Policy(full=ALL - {2}, mp_comm=False)),
            "excluded": training.under(LayerPolicy(full=True, comm_exclude=(r".*\.norm",))),
            "plain": training.kept,
        }
    return results


@scenario
def slice_activation() -> Any:
    """`recompute_slice_activation`: each rank keeps its part of a layer's input."""
    results = {}
    for sequence in (True, False):
        training = divided("llama", sequence)
        results[sequence] = {
            "whole": training.under(Policy(full=ALL - {2})),
            "sliced": training.under(Policy(full=ALL - {2}, slice_activation=True)),
        }
    return results
