"""The operator graph of any layer of a model under a setup."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from evenload.errors import EvenloadError
from evenload.model import Attention, Experts, LatentAttention, Layer, Model
from evenload.plan.operators import Graph
from evenload.profile.eager.parts import EAGER
from evenload.profile.fused.parts import FUSED
from evenload.profile.layers import block, embedding, head, mtp
from evenload.profile.sizes import local_sizes
from evenload.profile.tape import TABLES, Autocast, Tape
from evenload.setup import WIDTH, DType, Setup


def block_graph(model: Model, layer: Layer, setup: Setup, *, autocast: DType | None = None) -> Graph:
    """Operators of one layer's forward pass for one micro-batch on one rank.

    The backend says whose operators run: `torch` those of eager PyTorch and Hugging Face transformers, `megatron` the
    fused ones of Megatron-Core and Transformer Engine, `mindspore` the same as `megatron`.

    Args:
        model: the model.
        layer: one of its layers.
        setup: how it is trained.
        autocast: type of matrix products under `torch.autocast`, where it is narrower than that of the parameters.

    Raises:
        EvenloadError: the attention cannot be divided as the setup says, the layer lacks a part, or nobody has worked
            out what its parts do under autocast.
    """
    _check(setup)
    widths = _autocast(setup, layer, autocast)
    sizes = local_sizes(model, setup)
    parts = EAGER if setup.backend == "torch" else FUSED
    tape = Tape.under_autocast(widths)
    if layer.role == "embedding":
        return tape.graph(*embedding(parts, tape, sizes))
    if layer.role == "head":
        return tape.graph(*head(parts, tape, layer, model, sizes))
    if layer.role == "mtp":
        return tape.graph(*mtp(parts, tape, layer, model, sizes))
    return tape.graph(*block(parts, tape, layer, sizes))


def graph_notes(model: Model, setup: Setup, *, autocast: DType | None = None) -> tuple[str, ...]:
    """What the graphs of a model assume, one sentence each."""
    has_experts = any(isinstance(layer.feed_forward, Experts) for layer in model.layers)
    notes: list[str] = []
    if setup.dtype == "fp8":
        notes.append("Only matrix products run in fp8; activations are counted in bf16, which is an upper bound.")
    if setup.backend == "torch":
        if not autocast:
            notes.append("Activations have the parameters' type: no autocast.")
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


def _autocast(setup: Setup, layer: Layer, autocast: DType | None) -> Autocast | None:
    """Widths under autocast; None where it changes nothing."""
    if autocast is None or WIDTH[autocast] > WIDTH[setup.dtype]:
        return None
    widths = Autocast(product=WIDTH[autocast], parameter=WIDTH[setup.dtype])
    if widths.product != widths.parameter and (unknown := _unknown_under_autocast(setup, layer)):
        raise EvenloadError(
            f"autocast of {setup.dtype} parameters is not counted {unknown}",
            where="--autocast",
            fix="trace the model: name a function that builds it, package.module:function",
        )
    return widths


def _unknown_under_autocast(setup: Setup, layer: Layer) -> str | None:
    """What no trace and no dry run of a rank can confirm."""
    attention, experts = layer.attention, isinstance(layer.feed_forward, Experts)
    if setup.backend != "torch":
        return f"on {setup.backend}, which has no autocast"
    if setup.cp > 1 or setup.ep > 1:
        return f"where {'cp' if setup.cp > 1 else 'ep'} divides the tokens"
    if setup.tp > 1 and (experts or isinstance(attention, LatentAttention)):
        return f"where tp divides {'experts' if experts else 'latent attention'}"
    if setup.attention == "sdpa" and isinstance(attention, Attention) and attention.softcap is not None:
        return "for capped scores in a fused kernel: use --attention eager"
    return None


def _check(setup: Setup) -> None:
    if setup.backend == "torch" and setup.attention == "eager" and setup.cp > 1:
        raise EvenloadError(
            f"cp is {setup.cp}, but eager attention cannot divide a sequence", where="$.attention", fix="use sdpa"
        )
