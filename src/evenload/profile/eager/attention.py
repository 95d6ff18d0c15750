"""Multi-head and grouped-query attention modules: projections, rotary embedding, the core."""

from __future__ import annotations

from evenload.model import Attention
from evenload.profile.eager.core import Heads, attention_core
from evenload.profile.eager.linear import linear
from evenload.profile.eager.norms import rms_norm
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Out, Ref, Tape


def attention(tape: Tape, path: str, source: Ref, shape: Attention, sizes: Sizes) -> Ref:
    """Attention of Llama, Mistral, Qwen and Gemma blocks, output projection included.

    Args:
        tape: where to write.
        path: module path, `self_attn`.
        source: the normed layer input, all tokens of the rank.
        shape: heads and widths of the whole model; a rank holds `1 / tp` of the heads, at least one key/value head.
        sizes: the rank's micro-batch.
    """
    heads, kv_heads = shape.heads // sizes.tp, max(1, shape.kv_heads // sizes.tp)
    dim, bias = shape.head_dim, shape.qkv_bias

    def projected(name: str, count: int) -> Ref:
        return linear(tape, f"{path}.{name}_proj", source, sizes.hidden, count * dim, bias=bias)

    def normed(name: str, value: Ref) -> Ref:
        if not shape.qk_norm:
            return value
        return rms_norm(tape, f"{path}.{name}_norm", value, dim, one_plus_weight=sizes.style.one_plus_weight)

    if sizes.style.norm_after_all_projections:
        query, key, value = projected("q", heads), projected("k", kv_heads), projected("v", kv_heads)
        query, key = normed("q", query), normed("k", key)
    else:
        query = normed("q", projected("q", heads))
        key = normed("k", projected("k", kv_heads))
        value = projected("v", kv_heads)
    cos, sin = position_tables(tape, sizes, dim)
    query, key = rotate(tape, path, query, cos, sin), rotate(tape, path, key, cos, sin)
    mixed = attention_core(
        tape,
        path,
        (query, key, value),
        Heads(query=heads, key=kv_heads, dim=dim, value_dim=dim, window=shape.window, softcap=shape.softcap),
        sizes,
    )
    return linear(tape, f"{path}.o_proj", mixed, heads * dim, sizes.hidden, bias=shape.out_bias)


def position_tables(tape: Tape, sizes: Sizes, dim: int) -> tuple[Ref, Ref]:
    """Cosines and sines of [1, seq, dim]: made once per forward by the model, shared by all its layers."""
    elements = sizes.seq * dim
    return tape.held("position.cos", elements, sizes.width), tape.held("position.sin", elements, sizes.width)


def rotate(tape: Tape, path: str, value: Ref, cos: Ref, sin: Ref) -> Ref:
    """Rotary embedding in halves: `x * cos + cat(-x2, x1) * sin`. Keeps only the shared tables."""
    full, half = Out(value.elements, value.width), value.part(value.elements // 2)
    straight = tape.op(path, "mul", (value, cos), full, saves=(cos,))
    negative = tape.op(path, "neg", (half,), Out(half.elements, half.width))
    turned = tape.op(path, "cat", (negative, half), full)
    crossed = tape.op(path, "mul", (turned, sin), full, saves=(sin,))
    return tape.op(path, "add", (straight, crossed), full)
