"""Multi-head latent attention. Source: Megatron-LM, `core/transformer/multi_latent_attention.py`."""

from __future__ import annotations

from evenload.model import LatentAttention
from evenload.profile.fused.attention import rotate
from evenload.profile.fused.core import Heads, core
from evenload.profile.fused.linear import column, gather, plain, row
from evenload.profile.fused.norms import norm
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Out, Ref, Tape


def latent_attention(tape: Tape, source: Ref, shape: LatentAttention, sizes: Sizes) -> Ref:
    """Latent attention, output projection included.

    Down-projections are whole on every rank and work on the rank's own tokens; each norm is one with the up-projection
    after it, which gathers.

    Args:
        tape: at the module.
        source: the normed layer input, divided as it is between tensor-parallel regions.
        shape: heads and widths of the whole model.
        sizes: the rank's micro-batch.
    """
    heads, tokens, width = shape.heads // sizes.tp, sizes.tokens, sizes.width
    dim = shape.nope_dim + shape.rope_dim
    query = _query(tape, source, shape, sizes)
    latent = plain(tape.at("kv_a_proj_with_mqa"), source, sizes.hidden, shape.kv_rank + shape.rope_dim, bias=shape.bias)
    shared_key = gather(tape, latent.part(sizes.shard * shape.rope_dim), sizes)
    squeezed = norm(tape.at("kv_a_layernorm"), latent.part(sizes.shard * shape.kv_rank), shape.kv_rank)
    outer = heads * (shape.nope_dim + shape.value_dim)
    both = column(tape.at("kv_b_proj"), squeezed, shape.kv_rank, outer, sizes)
    straight, turned = tokens * heads * shape.nope_dim, tokens * heads * shape.rope_dim
    full = Out(tokens * heads * dim, width)
    query_turned = rotate(tape, query.part(turned), shape.rope_dim, sizes)
    query = tape.op("cat", (query.part(straight), query_turned), full)
    key_turned = rotate(tape, shared_key, shape.rope_dim, sizes)
    key = tape.op("cat", (both.part(straight), key_turned), full)
    value = both.part(tokens * heads * shape.value_dim)
    value = tape.op("contiguous", (value,), value.like(), aten="clone")
    out = core(tape, (query, key, value), Heads(query=heads, dim=dim, value_dim=shape.value_dim), sizes)
    return row(tape.at("o_proj"), out, heads * shape.value_dim, sizes.hidden, sizes, bias=shape.bias)


def _query(tape: Tape, source: Ref, shape: LatentAttention, sizes: Sizes) -> Ref:
    outer = shape.heads // sizes.tp * (shape.nope_dim + shape.rope_dim)
    if shape.q_rank is None:
        return column(tape.at("q_proj"), source, sizes.hidden, outer, sizes)
    latent = plain(tape.at("q_a_proj"), source, sizes.hidden, shape.q_rank, bias=shape.bias)
    return column(tape.at("q_b_proj"), norm(tape.at("q_a_layernorm"), latent, shape.q_rank), shape.q_rank, outer, sizes)
