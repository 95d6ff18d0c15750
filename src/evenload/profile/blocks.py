"""The operator graph of any layer of a model under a setup."""

from __future__ import annotations

from evenload.errors import EvenloadError
from evenload.model import Attention, FeedForward, Layer, Model
from evenload.plan.operators import Graph
from evenload.profile.eager.attention import attention
from evenload.profile.eager.embedding import INDEX, embedding
from evenload.profile.eager.feed_forward import feed_forward
from evenload.profile.eager.head import head
from evenload.profile.eager.norms import rms_norm
from evenload.profile.sizes import Sizes, local_sizes
from evenload.profile.tape import Out, Ref, Tape
from evenload.setup import Setup


def block_graph(model: Model, layer: Layer, setup: Setup) -> Graph:
    """Operators of one layer's forward pass for one micro-batch on one rank.

    Raises:
        EvenloadError: the backend has no rule for a part of the layer.
    """
    sizes = local_sizes(model, setup)
    tape = Tape()
    if layer.role == "embedding":
        tokens = tape.held("tokens", sizes.tokens, INDEX)
        return tape.graph(tokens, embedding(tape, tokens, sizes))
    source = tape.given("input", sizes.shard * sizes.hidden, sizes.width)
    if layer.role == "head":
        return tape.graph(source, head(tape, source, model, sizes))
    return tape.graph(source, _block(tape, source, layer, sizes))


def _block(tape: Tape, source: Ref, layer: Layer, sizes: Sizes) -> Ref:
    def norm(path: str, value: Ref) -> Ref:
        return rms_norm(tape, path, value, sizes.hidden, one_plus_weight=sizes.style.one_plus_weight)

    def added(residual: Ref, value: Ref) -> Ref:
        return tape.op("", "add", (residual, value), Out(residual.elements, residual.width))

    four = layer.norms == 4
    mixed = _attention(tape, norm("input_layernorm", source), layer, sizes)
    middle = added(source, norm("post_attention_layernorm", mixed) if four else mixed)
    before = norm("pre_feedforward_layernorm" if four else "post_attention_layernorm", middle)
    after = _feed_forward(tape, before, layer, sizes)
    return added(middle, norm("post_feedforward_layernorm", after) if four else after)


def _attention(tape: Tape, source: Ref, layer: Layer, sizes: Sizes) -> Ref:
    if isinstance(layer.attention, Attention):
        return attention(tape, "self_attn", source, layer.attention, sizes)
    raise EvenloadError(f"no operators are known for the attention of a {layer.kind} layer")


def _feed_forward(tape: Tape, source: Ref, layer: Layer, sizes: Sizes) -> Ref:
    if isinstance(layer.feed_forward, FeedForward):
        return feed_forward(tape, "mlp", source, layer.feed_forward, sizes)
    raise EvenloadError(f"no operators are known for the feed-forward of a {layer.kind} layer")
