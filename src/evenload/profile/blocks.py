"""The operator graph of any layer of a model under a setup."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from evenload.errors import EvenloadError
from evenload.model import Attention, Experts, Layer, Model
from evenload.plan.operators import Graph
from evenload.profile.eager.attention import attention
from evenload.profile.eager.collectives import gathered, reduced
from evenload.profile.eager.embedding import INDEX, embedding
from evenload.profile.eager.experts import mixture
from evenload.profile.eager.feed_forward import feed_forward
from evenload.profile.eager.head import head
from evenload.profile.eager.latent_attention import latent_attention
from evenload.profile.eager.norms import rms_norm
from evenload.profile.sizes import Sizes, local_sizes
from evenload.profile.tape import TABLES, Ref, Tape
from evenload.setup import Setup


def block_graph(model: Model, layer: Layer, setup: Setup) -> Graph:
    """Operators of one layer's forward pass for one micro-batch on one rank.

    Raises:
        EvenloadError: the backend has no rule for a part of the layer.
    """
    sizes = local_sizes(model, setup)
    tape = Tape()
    if layer.role == "embedding":
        tokens = tape.shared("tokens", sizes.tokens, INDEX)
        return tape.graph(tokens, embedding(tape, tokens, sizes))
    source = tape.given("input", sizes.shard * sizes.hidden, sizes.width)
    if layer.role == "head":
        return tape.graph(source, head(tape, source, model, sizes))
    return tape.graph(source, _block(tape, source, layer, sizes))


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


def _block(tape: Tape, source: Ref, layer: Layer, sizes: Sizes) -> Ref:
    def norm(name: str, value: Ref) -> Ref:
        return rms_norm(tape.at(name), value, sizes.hidden, one_plus_weight=sizes.style.one_plus_weight)

    def added(residual: Ref, value: Ref) -> Ref:
        return tape.op("add", (residual, value), residual.like())

    four = layer.norms == 4
    mixed = _attention(tape.at("self_attn"), norm("input_layernorm", source), layer, sizes)
    middle = added(source, norm("post_attention_layernorm", mixed) if four else mixed)
    before = norm("pre_feedforward_layernorm" if four else "post_attention_layernorm", middle)
    after = _feed_forward(tape.at("mlp"), before, layer, sizes)
    return added(middle, norm("post_feedforward_layernorm", after) if four else after)


def _attention(tape: Tape, source: Ref, layer: Layer, sizes: Sizes) -> Ref:
    shape = layer.attention
    if shape is None:
        raise EvenloadError(f"a {layer.kind} layer has no attention")
    whole = gathered(tape, source, sizes)
    if isinstance(shape, Attention):
        return reduced(tape.at("o_proj"), attention(tape, whole, shape, sizes), sizes)
    return reduced(tape.at("o_proj"), latent_attention(tape, whole, shape, sizes), sizes)


def _feed_forward(tape: Tape, source: Ref, layer: Layer, sizes: Sizes) -> Ref:
    shape = layer.feed_forward
    if isinstance(shape, Experts):
        return mixture(tape, source, shape, sizes)
    if shape is None:
        raise EvenloadError(f"a {layer.kind} layer has no feed-forward block")
    return reduced(tape.at("down_proj"), feed_forward(tape, gathered(tape, source, sizes), shape, sizes), sizes)
