"""The operator graph of any layer of a model under a setup."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from evenload.errors import EvenloadError
from evenload.model import Experts, Layer, Model
from evenload.plan.operators import Graph
from evenload.profile.eager.parts import EAGER
from evenload.profile.fused.parts import FUSED
from evenload.profile.layers import block, embedding, head, mtp
from evenload.profile.sizes import local_sizes
from evenload.profile.tape import TABLES, Tape
from evenload.setup import Setup


def block_graph(model: Model, layer: Layer, setup: Setup) -> Graph:
    """Operators of one layer's forward pass for one micro-batch on one rank.

    The backend says whose operators run: `torch` those of eager PyTorch and Hugging Face transformers, `megatron` the
    fused ones of Megatron-Core and Transformer Engine, `mindspore` the same as `megatron`.

    Raises:
        EvenloadError: the attention cannot be divided as the setup says, or the layer lacks a part.
    """
    _check(setup)
    sizes = local_sizes(model, setup)
    parts = EAGER if setup.backend == "torch" else FUSED
    tape = Tape()
    if layer.role == "embedding":
        return tape.graph(*embedding(parts, tape, sizes))
    if layer.role == "head":
        return tape.graph(*head(parts, tape, layer, model, sizes))
    if layer.role == "mtp":
        return tape.graph(*mtp(parts, tape, layer, model, sizes))
    return tape.graph(*block(parts, tape, layer, sizes))


def graph_notes(model: Model, setup: Setup) -> tuple[str, ...]:
    """What the graphs of a model assume, one sentence each."""
    has_experts = any(isinstance(layer.feed_forward, Experts) for layer in model.layers)
    notes: list[str] = []
    if setup.dtype == "fp8":
        notes.append("Only matrix products run in fp8; activations are counted in bf16, which is an upper bound.")
    if setup.backend == "torch":
        notes.append("Activations have the parameters' type; autocast is not modelled.")
        if model.family.startswith("llama4"):
            notes.append("Llama 4 is counted with grouped expert products and rotary embedding in halves.")
        if has_experts:
            notes.append("Experts run as grouped products (experts_implementation='grouped_mm').")
    else:
        notes.append("Activations are those of Megatron-Core with Transformer Engine, without dropout.")
        if setup.attention == "eager":
            notes.append("Attention is counted as the fused kernel: Megatron-Core has no eager one here.")
    if setup.backend == "mindspore":
        notes.append("MindSpore's activations are taken to be Megatron-Core's.")
    if has_experts and (setup.ep > 1 or setup.expert_tp != setup.tp):
        notes.append("Tokens are spread evenly over experts; an uneven router needs more on the busiest rank.")
    return tuple(notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableBytes:
    """What a stage makes once per forward for all its layers."""

    kept: int
    """Saved for backward by the layers: lives as long as the micro-batch is in flight."""
    forward: int
    """Only read: lives while the stage's forward runs."""


def table_bytes(graphs: Iterable[Graph]) -> TableBytes:
    """Position tables and masks that layers share, each counted once. The graphs hold them and count none of them."""
    sizes: dict[str, int] = {}
    saved: set[str] = set()
    for graph in graphs:
        sizes |= {value.name: value.nbytes for value in graph.values if value.name.startswith(f"{TABLES}.")}
        saved.update(name for operator in graph.operators for name in operator.saves)
    return TableBytes(
        kept=sum(nbytes for name, nbytes in sizes.items() if name in saved),
        forward=sum(nbytes for name, nbytes in sizes.items() if name not in saved),
    )


def _check(setup: Setup) -> None:
    if setup.backend == "torch" and setup.attention == "eager" and setup.cp > 1:
        raise EvenloadError(
            f"cp is {setup.cp}, but eager attention cannot divide a sequence", where="$.attention", fix="use sdpa"
        )
