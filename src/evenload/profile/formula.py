"""The profile of a model under a setup, from formulas alone: nothing has to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from types import MappingProxyType

from evenload.model import Layer, Model
from evenload.plan.mincut import collectives
from evenload.plan.operators import Graph, Operator
from evenload.plan.patterns import match_all
from evenload.plan.policy import DEFAULT_COMM, DEFAULT_SELECT, LayerPolicy, Policy, Recompute
from evenload.plan.schedule import find_schedule
from evenload.profile.blocks import block_graph, graph_notes, table_bytes
from evenload.profile.buffers import (
    boundary_bytes,
    buffer_parts,
    fullest_moments,
    layer_buffers,
    optimizer_transient,
    outside_parts,
)
from evenload.profile.cost import Births, graph_cost
from evenload.profile.fused.placeholders import placeholder_bytes
from evenload.profile.hardware import Hardware, find_hardware, operator_time, transfer_time
from evenload.profile.profile import Cost, LayerProfile, Profile
from evenload.profile.static import Static, static_of
from evenload.setup import DType, Setup, check_setup


def formula_profile(
    model: Model, setup: Setup, policy: Policy | None = None, *, autocast: DType | None = None
) -> Profile:
    """What every kind of layer of a model costs under a setup.

    Memory is in bytes and time in seconds, for one micro-batch on the rank of each group that holds most.

    Args:
        model: the model.
        setup: how it is trained.
        policy: whose switches for the whole run to follow (`mp_comm`, `slice_activation`, `optimizer_comm`); None: the
            defaults. What single layers recompute is asked of their `cost`.
        autocast: type of matrix products under `torch.autocast`; the parameters have the setup's, mostly fp32.

    Raises:
        EvenloadError: degrees that do not divide what they must, unknown hardware, or a part of the model that the
            backend has no rule for.
    """
    check_setup(model, setup)
    hardware = find_hardware(setup.hardware)
    switches = policy or Policy()
    boundary = boundary_bytes(model, setup)
    outside = outside_parts(setup)

    layers = {
        layer.kind: layer_profile(layer, model, setup, hardware, switches, autocast=autocast) for layer in model.kinds()
    }
    placeholders = _placeholders(model, layers, setup)
    tables = _position_tables(layers, setup)

    @cache
    def parts(stage: int) -> Mapping[str, float]:
        return {
            **buffer_parts(model, setup, hardware.name, stage, gather_again=switches.optimizer_comm),
            **placeholders,
            **tables(stage),
        }

    return Profile(
        layers=MappingProxyType(layers),
        blocks=tuple(layer.kind for layer in model.blocks),
        first=(model.embedding.kind,),
        last=(*(layer.kind for layer in model.mtp), model.head.kind),
        outside=sum(outside.values()),
        outside_parts=outside,
        boundary=boundary,
        transfer_time=transfer_time(boundary, hardware, setup),
        buffers=lambda stage, _: sum(parts(stage).values()),
        buffer_parts=parts,
        optimizer_transient=optimizer_transient(setup),
        notes=(*_notes(setup, hardware, autocast), *graph_notes(model, setup, autocast=autocast)),
    )


def layer_profile(
    layer: Layer, model: Model, setup: Setup, hardware: Hardware, switches: Policy, *, autocast: DType | None = None
) -> LayerProfile:
    """What one layer costs. Costs under a policy are worked out once and kept."""
    graph = block_graph(model, layer, setup, autocast=autocast)
    products = replace(setup, dtype=autocast or setup.dtype)
    static = _with_tied_gradient(layer, model, setup, static_of(layer, model, setup))

    @cache
    def times(operator: Operator) -> float:
        return operator_time(operator, hardware, products)

    @lru_cache(maxsize=256)
    def cost(policy: LayerPolicy) -> Cost:
        return graph_cost(
            graph,
            policy,
            times,
            mp_comm=switches.mp_comm,
            sliced=setup.tp if switches.slice_activation and not setup.sequence_parallel else 1,
            weight_gradients=_weight_gradients(setup),
            births=_births(layer, model, setup, static.gradients),
        )

    return LayerProfile(
        kind=layer.kind,
        parameters=static.parameters,
        gradients=static.gradients,
        optimizer=static.optimizer,
        buffers=layer_buffers(layer, model, setup, gather_again=switches.optimizer_comm),
        count=static.count,
        cost=cost,
        graph=graph,
        choices=possible_choices(graph) if layer.role == "block" else (Recompute.NONE,),
    )


def _weight_gradients(setup: Setup) -> float:
    """Bytes of a weight's gradient beside the accumulated one while backward makes it, for a byte of the weight.

    Megatron-LM's products add into the accumulated gradient (`gradient_accumulation_fusion`); FSDP's are counted with
    what it gathers; the gradient of the first micro-batch becomes the accumulated one where the types are the same.
    """
    if setup.backend != "torch" or (setup.zero >= 2 and setup.pp == 1):
        return 0.0
    return 0.0 if setup.micro_batches == 1 and setup.gradient_dtype == setup.dtype else 1.0


def _births(layer: Layer, model: Model, setup: Setup, gradients: float) -> Births | None:
    """PyTorch makes gradients in the first backward of a step, and lets them go after it (`set_to_none=True`).

    Megatron-LM has buffers for them, made before the first step (`core/distributed/param_and_grad_buffer.py`).
    """
    if setup.backend != "torch":
        return None
    becomes = setup.gradient_dtype == setup.dtype or (setup.zero >= 2 and setup.pp == 1)
    tied = layer.role == "embedding" and shares_head(model, setup)  # the head has made the gradient
    return Births(gradients=gradients, weight_gradients=0.0 if becomes and not tied else _weight_gradients(setup))


def _with_tied_gradient(layer: Layer, model: Model, setup: Setup, static: Static) -> Static:
    """Static memory of a layer, the gradient of a weight that embedding and head share counted with the head.

    Backward of the head comes first and makes it.
    """
    if setup.backend != "torch" or layer.role not in {"embedding", "head"} or not shares_head(model, setup):
        return static
    moved = static_of(model.embedding, model, setup).gradients
    own = static.gradients - moved if layer.role == "embedding" else static.gradients + moved
    return replace(static, gradients=own)


def shares_head(model: Model, setup: Setup) -> bool:
    """Whether embedding and head of a rank are one weight."""
    return model.tied and setup.pp == 1


def possible_choices(graph: Graph) -> tuple[Recompute, ...]:
    """Choices that can free something: their default patterns name operators whose results the layer keeps."""
    kept = set(graph.kept())

    def frees(indices: Iterable[int]) -> bool:
        return any(kept.intersection(graph.operators[i].outputs) for i in indices)

    select = any(frees(hit.indices) for hit in match_all(DEFAULT_SELECT, graph))
    comm = any(frees(collectives(graph, hit.indices)) for hit in match_all(DEFAULT_COMM, graph))
    possible = {Recompute.SELECT: select, Recompute.COMM: comm, Recompute.BOTH: select and comm}
    return tuple(choice for choice in Recompute if possible.get(choice, True))


def _placeholders(model: Model, layers: Mapping[str, LayerProfile], setup: Setup) -> Mapping[str, float]:
    """Gradients that fused linear layers hand autograd without filling them, on a stage with blocks of every kind."""
    if setup.backend == "torch":
        return {}
    graphs = [(layer, graph) for layer in model.kinds() if (graph := layers[layer.kind].graph) is not None]
    return {"placeholder gradients": placeholder_bytes(graphs, setup)}


def _position_tables(layers: Mapping[str, LayerProfile], setup: Setup) -> Callable[[int], Mapping[str, float]]:
    """Stage -> what its layers share and keep: transformers makes it once for every forward of a chunk."""
    kept = table_bytes(layer.graph for layer in layers.values() if layer.graph is not None).kept
    if setup.backend != "torch" or not kept:
        return lambda _: {}
    name = find_schedule(setup.schedule, interleave=setup.interleave).name
    fullest = fullest_moments(name, setup.pp, setup.interleave, setup.micro_batches)
    return lambda stage: {"position tables of the micro-batches in flight": kept * sum(fullest[stage].held)}


def _notes(setup: Setup, hardware: Hardware, autocast: DType | None) -> tuple[str, ...]:
    """What the profile assumes, for the report."""
    width = f"{setup.parameter_dtype} parameters, {setup.gradient_dtype} gradients, {setup.moment_dtype} moments"
    copies = " and fp32 main copies" if setup.main_copies and not setup.fsdp_mixed else ""
    under = f", matrix products in {autocast} under autocast" if autocast else ""
    notes = [f"Types: {width}{copies}{under}."]
    if setup.backend == "torch":
        notes.append("The optimizer runs its foreach form, PyTorch's default on a GPU.")
        if setup.pp > 1:
            notes.append("The pipeline is torch.distributed.pipelining; the last stage does not return its logits.")
        if setup.zero <= 1 and setup.dp * setup.cp > 1:
            notes.append("DistributedDataParallel keeps gradients in buckets beside the gradients themselves.")
        if setup.zero == 2 and setup.dp * setup.cp > 1:
            notes.append("FSDP divides parameters under ZeRO 2 too; what it gathers is counted all the time.")
        if setup.zero == 3 and setup.pp > 1:
            notes.append(
                "FSDP in a pipeline keeps parameters gathered unless they are to be gathered again in backward."
            )
    if setup.backend == "mindspore":
        notes.append("MindSpore runs are estimated with the rules of Megatron-LM for types and buffers.")
    notes.append(f"Times: {hardware.name} at {hardware.matmul_efficiency:.0%} of its matrix rate.")
    since = "from the backward that makes them" if setup.backend == "torch" else "for the whole step"
    notes.append(f"Gradients are counted {since}; fragmentation of the allocator is not counted.")
    return tuple(notes)
