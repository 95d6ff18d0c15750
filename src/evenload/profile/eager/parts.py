"""The parts of layers as eager PyTorch runs them, with the collectives around each."""

from __future__ import annotations

from evenload.model import Attention, FeedForward, LatentAttention
from evenload.profile.eager.attention import attention
from evenload.profile.eager.collectives import gathered, reduced
from evenload.profile.eager.embedding import embedding
from evenload.profile.eager.experts import mixture
from evenload.profile.eager.feed_forward import feed_forward
from evenload.profile.eager.head import projected_loss
from evenload.profile.eager.latent_attention import latent_attention
from evenload.profile.eager.linear import linear
from evenload.profile.eager.norms import layer_norm, rms_norm
from evenload.profile.layers import Parts
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Ref, Tape


def _norm(tape: Tape, source: Ref, kind: str, sizes: Sizes) -> Ref:
    if kind == "layer_norm":
        return layer_norm(tape, source, sizes.hidden)
    return rms_norm(tape, source, sizes.hidden, one_plus_weight=sizes.style.one_plus_weight)


def _attention(tape: Tape, source: Ref, shape: Attention, sizes: Sizes) -> Ref:
    return reduced(tape.at("o_proj"), attention(tape, gathered(tape, source, sizes), shape, sizes), sizes)


def _latent_attention(tape: Tape, source: Ref, shape: LatentAttention, sizes: Sizes) -> Ref:
    return reduced(tape.at("o_proj"), latent_attention(tape, gathered(tape, source, sizes), shape, sizes), sizes)


def _feed_forward(tape: Tape, source: Ref, shape: FeedForward, sizes: Sizes) -> Ref:
    return reduced(tape.at("down_proj"), feed_forward(tape, gathered(tape, source, sizes), shape, sizes), sizes)


EAGER = Parts(
    norm=_norm,
    attention=_attention,
    latent_attention=_latent_attention,
    feed_forward=_feed_forward,
    experts=mixture,
    linear=linear,
    embedding=embedding,
    loss=projected_loss,
)
"""Backend `torch`."""
