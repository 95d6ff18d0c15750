"""Layers put together from parts: the order of norms, sums and halves is the same whoever runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evenload.errors import EvenloadError
from evenload.model import Attention, Experts, FeedForward, LatentAttention, Layer, Model
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Out, Ref, Tape

INDEX = 8
"""Bytes of a token number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a backend runs for each part of a layer.

    Inputs and results are divided over tensor-parallel ranks as the hidden state between layers is.
    """

    norm: Callable[[Tape, Ref, str, Sizes], Ref]
    """(at the module, input, `rms_norm` or `layer_norm`, sizes)"""
    attention: Callable[[Tape, Ref, Attention, Sizes], Ref]
    latent_attention: Callable[[Tape, Ref, LatentAttention, Sizes], Ref]
    feed_forward: Callable[[Tape, Ref, FeedForward, Sizes], Ref]
    experts: Callable[[Tape, Ref, Experts, Sizes], Ref]
    linear: Callable[[Tape, Ref, int, int], Ref]
    """A product that every rank does whole: (at the module, input, features in, features out)"""
    embedding: Callable[[Tape, Ref, Sizes], Ref]
    loss: Callable[[Tape, Ref, Model, Sizes], Ref]
    """Output projection and loss from the normed hidden state."""


def embedding(parts: Parts, tape: Tape, sizes: Sizes) -> tuple[Ref, Ref]:
    """The embedding on the first stage: tokens and their hidden states."""
    tokens = tape.shared("tokens", sizes.tokens, INDEX)
    return tokens, parts.embedding(tape, tokens, sizes)


def head(parts: Parts, tape: Tape, layer: Layer, model: Model, sizes: Sizes) -> tuple[Ref, Ref]:
    """Final norm, output projection and loss on the last stage."""
    source = _entering(tape, sizes)
    return source, parts.loss(tape, parts.norm(tape.at("norm"), source, layer.norm, sizes), model, sizes)


def block(parts: Parts, tape: Tape, layer: Layer, sizes: Sizes) -> tuple[Ref, Ref]:
    """One decoder layer."""
    source = _entering(tape, sizes)
    return source, _decoder(parts, tape, source, layer, sizes)


def mtp(parts: Parts, tape: Tape, layer: Layer, model: Model, sizes: Sizes) -> tuple[Ref, Ref]:
    """One multi-token-prediction layer with its own loss (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    The hidden state goes on to the head as it came in; the loss is attached to it, so that backward of the head starts
    that of this layer too (Megatron-LM, `core/transformer/multi_token_prediction.py`: `MTPLossAutoScaler`). Embedding
    and output projection are those of the main model. No trace pins the parts outside the decoder layer: transformers
    does not build them.
    """
    source = _entering(tape, sizes)
    tokens = tape.shared("tokens", sizes.tokens, INDEX)
    ahead = parts.norm(tape.at("enorm"), parts.embedding(tape, tokens, sizes), layer.norm, sizes)
    state = parts.norm(tape.at("hnorm"), source, layer.norm, sizes)
    both = tape.op("cat", (ahead, state), Out(2 * state.elements, state.width))
    joined = parts.linear(tape.at("eh_proj"), both, 2 * sizes.hidden, sizes.hidden)
    predicted = _decoder(parts, tape, joined, layer, sizes)
    loss = parts.loss(tape, parts.norm(tape.at("shared_head.norm"), predicted, layer.norm, sizes), model, sizes)
    return source, tape.op("add", (source, loss), source.like())


_MTP_NORMS = 3
"""Norms of a multi-token-prediction layer outside its decoder layer."""


def _entering(tape: Tape, sizes: Sizes) -> Ref:
    return tape.given("input", sizes.shard * sizes.hidden, sizes.width)


def _decoder(parts: Parts, tape: Tape, source: Ref, layer: Layer, sizes: Sizes) -> Ref:
    """Two halves with residual sums; with four norms the result of each half is normed too (Gemma)."""
    four = layer.norms - (_MTP_NORMS if layer.role == "mtp" else 0) == 4

    def norm(name: str, value: Ref) -> Ref:
        return parts.norm(tape.at(name), value, layer.norm, sizes)

    def added(residual: Ref, value: Ref) -> Ref:
        return tape.op("add", (residual, value), residual.like())

    mixed = _attention(parts, tape.at("self_attn"), norm("input_layernorm", source), layer, sizes)
    middle = added(source, norm("post_attention_layernorm", mixed) if four else mixed)
    before = norm("pre_feedforward_layernorm" if four else "post_attention_layernorm", middle)
    after = _feed_forward(parts, tape.at("mlp"), before, layer, sizes)
    return added(middle, norm("post_feedforward_layernorm", after) if four else after)


def _attention(parts: Parts, tape: Tape, source: Ref, layer: Layer, sizes: Sizes) -> Ref:
    if layer.attention is None:
        raise EvenloadError(f"a {layer.kind} layer has no attention", fix="give its sizes")
    if isinstance(layer.attention, Attention):
        return parts.attention(tape, source, layer.attention, sizes)
    return parts.latent_attention(tape, source, layer.attention, sizes)


def _feed_forward(parts: Parts, tape: Tape, source: Ref, layer: Layer, sizes: Sizes) -> Ref:
    if layer.feed_forward is None:
        raise EvenloadError(f"a {layer.kind} layer has no feed-forward block", fix="give its sizes")
    if isinstance(layer.feed_forward, Experts):
        return parts.experts(tape, source, layer.feed_forward, sizes)
    return parts.feed_forward(tape, source, layer.feed_forward, sizes)
