"""Multi-head and grouped-query attention modules: projections, rotary embedding, the core."""

from __future__ import annotations

from evenload.model import Attention
from evenload.profile.eager.core import attention_core
from evenload.profile.eager.linear import linear
from evenload.profile.eager.norms import rms_norm
from evenload.profile.eager.scores import Heads
from evenload.profile.sizes import Sizes
from evenload.profile.tape import TABLES, Ref, Tape


def attention(tape: Tape, source: Ref, shape: Attention, sizes: Sizes) -> Ref:
    """Attention of Llama, Mistral, Qwen, Phi and Gemma blocks, output projection included.

    Under tensor parallelism the result is this rank's part of a sum.

    Args:
        tape: at the module.
        source: the normed layer input, all tokens of the rank.
        shape: heads and widths of the whole model; a rank holds `1 / tp` of the heads, at least one key/value head.
        sizes: the rank's micro-batch.
    """
    heads, kv_heads = shape.heads // sizes.tp, max(1, shape.kv_heads // sizes.tp)
    dim = shape.head_dim
    query, key, value = _projected(tape, source, shape, sizes)
    turned = dim if shape.rotary_dim is None else shape.rotary_dim
    local = shape.window is not None and sizes.style.local_positions
    cos, sin = position_tables(tape, sizes, turned, kind=".local" if local else "")
    if sizes.style.partial_rotary:
        query, key = (_rotate_part(tape, part, (turned, dim), cos, sin) for part in (query, key))
    else:
        query, key = (rotate(tape, part, cos, sin) for part in (query, key))
    mixed = attention_core(
        tape,
        (query, key, value),
        Heads(
            query=heads,
            key=kv_heads,
            dim=dim,
            value_dim=dim,
            window=shape.window,
            softcap=shape.softcap,
            packed=sizes.style.partial_rotary,
        ),
        sizes,
    )
    return linear(tape.at("o_proj"), mixed, heads * dim, sizes.hidden, bias=shape.out_bias, shared_bias=sizes.tp)


def _projected(tape: Tape, source: Ref, shape: Attention, sizes: Sizes) -> tuple[Ref, Ref, Ref]:
    heads, kv_heads = shape.heads // sizes.tp, max(1, shape.kv_heads // sizes.tp)
    dim, bias = shape.head_dim, shape.qkv_bias
    if sizes.style.fused_projections:
        both = linear(tape.at("qkv_proj"), source, sizes.hidden, (heads + 2 * kv_heads) * dim, bias=bias)
        parts = (both.part(sizes.tokens * count * dim) for count in (heads, kv_heads, kv_heads))
        query, key, value = parts
        return query, key, value

    def projected(name: str, count: int) -> Ref:
        return linear(tape.at(f"{name}_proj"), source, sizes.hidden, count * dim, bias=bias)

    def normed(name: str, value: Ref) -> Ref:
        if not shape.qk_norm:
            return value
        return rms_norm(tape.at(f"{name}_norm"), value, dim, one_plus_weight=sizes.style.one_plus_weight)

    if sizes.style.norm_after_all_projections:
        query, key, value = projected("q", heads), projected("k", kv_heads), projected("v", kv_heads)
        return normed("q", query), normed("k", key), value
    query = normed("q", projected("q", heads))
    key = normed("k", projected("k", kv_heads))
    return query, key, projected("v", kv_heads)


def position_tables(tape: Tape, sizes: Sizes, dim: int, *, kind: str = "") -> tuple[Ref, Ref]:
    """Cosines and sines of [1, seq, dim]: made once per forward by the model, shared by all its layers of a kind."""
    cos, sin = (tape.shared(f"{TABLES}{kind}.{name}", sizes.seq * dim, sizes.width) for name in ("cos", "sin"))
    return cos, sin


def rotate(tape: Tape, value: Ref, cos: Ref, sin: Ref) -> Ref:
    """Rotary embedding in halves: `x * cos + cat(-x2, x1) * sin`. Keeps only the shared tables."""
    half = value.part(value.elements // 2)
    wide = value.like(width=max(value.width, cos.width))
    straight = tape.op("mul", (value, cos), wide, saves=(cos,))
    negative = tape.op("neg", (half,), half.like())
    turned = tape.op("cat", (negative, half), value.like())
    crossed = tape.op("mul", (turned, sin), wide, saves=(sin,))
    return tape.op("add", (straight, crossed), wide)


def _rotate_part(tape: Tape, value: Ref, widths: tuple[int, int], cos: Ref, sin: Ref) -> Ref:
    """Rotary embedding of the first elements of every head, put together with the rest (Phi-3)."""
    turned, dim = widths
    part = value.part(value.elements // dim * turned)
    rest = value.part(value.elements - part.elements)
    part = rotate(tape, part, cos, sin)
    return tape.op("cat", (part, tape.promoted(rest, part)), value.like(width=part.width))
