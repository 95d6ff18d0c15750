"""What two ranks do together when the layers are divided over them."""

from __future__ import annotations

from typing import Any

import torch
from tests.recompute.models import DEFAULT, FAMILIES, toy
from tests.recompute.rank_training import ALL, EVERYTHING, RANKS, Training
from torch import distributed

from evenload.plan.policy import LayerPolicy, Policy
from evenload.recompute import apply


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


def tensor_parallel() -> Any:
    results = {}
    for family in ("toy", "llama"):
        for sequence in (True, False):
            training = divided(family, sequence)
            results[family, sequence] = [
                training.under(select=patterns) for patterns in (DEFAULT, (".*norm",), ("mlp",), EVERYTHING)
            ]
    return results


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


SCENARIOS = (
    tensor_parallel,
    tensor_parallel_on_fake_tensors,
    select_comm,
    mp_comm,
    slice_activation,
)
