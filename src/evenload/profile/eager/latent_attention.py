"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1) as the modules of DeepSeek-V2 and V3."""

from __future__ import annotations

from evenload.model import LatentAttention
from evenload.profile.eager.attention import position_tables, rotate
from evenload.profile.eager.core import attention_core
from evenload.profile.eager.linear import linear
from evenload.profile.eager.norms import FP32, rms_norm
from evenload.profile.eager.scores import Heads
from evenload.profile.sizes import Sizes
from evenload.profile.tape import TABLES, Out, Ref, Tape


def latent_attention(tape: Tape, source: Ref, shape: LatentAttention, sizes: Sizes) -> Ref:
    """Latent attention, output projection included.

    A rank holds `1 / tp` of the heads; the down-projections and their norms are whole on every rank. Under tensor
    parallelism the result is this rank's part of a sum.

    Args:
        tape: at the module.
        source: the normed layer input, all tokens of the rank.
        shape: heads and widths of the whole model.
        sizes: the rank's micro-batch.
    """
    heads, tokens = shape.heads // sizes.tp, sizes.tokens
    query = _query(tape, source, shape, sizes)
    squeezed = shape.kv_rank + shape.rope_dim
    latent = linear(tape.at("kv_a_proj_with_mqa"), source, sizes.hidden, squeezed, bias=shape.bias)
    key_value = rms_norm(tape.at("kv_a_layernorm"), latent.part(tokens * shape.kv_rank), shape.kv_rank)
    query_turned, key_turned = _rotary(
        tape, query.part(tokens * heads * shape.rope_dim), latent.part(tokens * shape.rope_dim), shape, sizes
    )
    dim = shape.nope_dim + shape.rope_dim
    straight = tape.promoted(query.part(tokens * heads * shape.nope_dim), query_turned)
    query = tape.op("cat", (straight, query_turned), Out(tokens * heads * dim, straight.width))
    expanded = heads * (shape.nope_dim + shape.value_dim)
    key_value = linear(tape.at("kv_b_proj"), key_value, shape.kv_rank, expanded)
    key = tape.op(
        "copy_",
        (key_value.part(tokens * heads * shape.nope_dim), key_turned),
        Out(tokens * heads * dim, key_value.width),
    )
    mixed = attention_core(
        tape,
        (query, key, key_value.part(tokens * heads * shape.value_dim)),
        Heads(query=heads, key=heads, dim=dim, value_dim=shape.value_dim, packed=True),
        sizes,
    )
    inner = heads * shape.value_dim
    return linear(tape.at("o_proj"), mixed, inner, sizes.hidden, bias=shape.bias, shared_bias=sizes.tp)


def _query(tape: Tape, source: Ref, shape: LatentAttention, sizes: Sizes) -> Ref:
    outer = shape.heads // sizes.tp * (shape.nope_dim + shape.rope_dim)
    if shape.q_rank is None:
        return linear(tape.at("q_proj"), source, sizes.hidden, outer)
    latent = linear(tape.at("q_a_proj"), source, sizes.hidden, shape.q_rank, bias=shape.bias)
    return linear(tape.at("q_b_proj"), rms_norm(tape.at("q_a_layernorm"), latent, shape.q_rank), shape.q_rank, outer)


def _rotary(tape: Tape, query: Ref, key: Ref, shape: LatentAttention, sizes: Sizes) -> tuple[Ref, Ref]:
    """Rotary embedding of the rotary parts of q and of the key that all heads share."""
    if shape.rotary == "complex":
        return _complex(tape, query, key, shape.rope_dim * sizes.seq)
    cos, sin = position_tables(tape, sizes, shape.rope_dim)
    if shape.rotary == "halves":
        return rotate(tape, query, cos, sin), rotate(tape, key, cos, sin)
    return _pairs(tape, query, cos, sin), _pairs(tape, key, cos, sin)


def _pairs(tape: Tape, value: Ref, cos: Ref, sin: Ref) -> Ref:
    """Even and odd elements are turned against each other: `x1 cos - x2 sin`, `x2 cos + x1 sin`."""
    half = value.part(value.elements // 2)
    cos, sin = cos.part(cos.elements // 2), sin.part(sin.elements // 2)
    wide = half.like(width=max(half.width, cos.width))

    def turned(last: str) -> Ref:
        first = tape.op("mul", (half, cos), wide, saves=(cos,))
        second = tape.op("mul", (half, sin), wide, saves=(sin,))
        return tape.op(last, (first, second), wide)

    return tape.op("cat", (turned("sub"), turned("add")), value.like(width=wide.width))


def _complex(tape: Tape, query: Ref, key: Ref, elements: int) -> tuple[Ref, Ref]:
    """A product of complex fp32 numbers: half as many as there are elements, twice as wide."""
    table = tape.shared(f"{TABLES}.turns", elements, FP32)
    width = query.width
    if width != FP32:
        query = tape.op("float", (query,), query.like(width=FP32), aten="_to_copy")
        key = tape.op("float", (key,), key.like(width=FP32), aten="_to_copy")

    def turned(value: Ref) -> Ref:
        product = tape.op("mul", (value, table), value.like(), saves=(table,))
        if width == FP32:
            return product
        return tape.op("type_as", (product,), value.like(width=width), aten="_to_copy")

    return turned(query), turned(key)
