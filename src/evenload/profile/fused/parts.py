"""The parts of layers as Megatron-Core runs them."""

from __future__ import annotations

from evenload.profile.fused.attention import attention
from evenload.profile.fused.ends import embedding, projected_loss
from evenload.profile.fused.experts import mixture
from evenload.profile.fused.feed_forward import feed_forward
from evenload.profile.fused.latent_attention import latent_attention
from evenload.profile.fused.linear import plain
from evenload.profile.fused.norms import norm
from evenload.profile.layers import Parts
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Ref, Tape


def _norm(tape: Tape, source: Ref, kind: str, sizes: Sizes) -> Ref:
    return norm(tape, source, sizes.hidden, kind=kind)


FUSED = Parts(
    norm=_norm,
    attention=attention,
    latent_attention=latent_attention,
    feed_forward=feed_forward,
    experts=mixture,
    linear=plain,
    embedding=embedding,
    loss=projected_loss,
)
"""Backend `megatron`, and for want of other facts `mindspore`."""
