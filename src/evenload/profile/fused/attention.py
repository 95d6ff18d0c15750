"""Attention with one projection for q, k and v, fused rotary embedding and a fused core.

Sources: Megatron-LM, `core/transformer/attention.py` (`get_query_key_value_tensors`); Transformer Engine,
`pytorch/attention/dot_product_attention/backends.py` (`FlashAttention.forward` makes q, k and v contiguous, so that v
does not hold the whole projection).
"""

from __future__ import annotations

from evenload.model import Attention
from evenload.profile.fused.core import Heads, core
from evenload.profile.fused.linear import column, row
from evenload.profile.fused.norms import FP32, norm
from evenload.profile.sizes import Sizes
from evenload.profile.tape import TABLES, Ref, Tape


def attention(tape: Tape, source: Ref, shape: Attention, sizes: Sizes) -> Ref:
    """Attention, output projection included.

    Args:
        tape: at the module.
        source: the normed layer input, divided as it is between tensor-parallel regions.
        shape: heads and widths of the whole model; a rank holds `1 / tp` of the heads, at least one key/value head.
        sizes: the rank's micro-batch.
    """
    heads, kv_heads = shape.heads // sizes.tp, max(1, shape.kv_heads // sizes.tp)
    dim = shape.head_dim
    width = (heads + 2 * kv_heads) * dim
    mixed = column(tape.at("qkv_proj"), source, sizes.hidden, width, sizes, bias=shape.qkv_bias)
    query, key, value = (mixed.part(sizes.tokens * count * dim) for count in (heads, kv_heads, kv_heads))
    if heads > kv_heads > 1:  # groups of q lie between k and v: putting them side by side copies
        query = tape.op("reshape", (query,), query.like(), aten="clone")
    if shape.qk_norm:
        query, key = norm(tape.at("q_norm"), query, dim), norm(tape.at("k_norm"), key, dim)
    turned = dim if shape.rotary_dim is None else shape.rotary_dim
    query, key = rotate(tape, query, turned, sizes), rotate(tape, key, turned, sizes)
    value = tape.op("contiguous", (value,), value.like(), aten="clone")
    out = core(tape, (query, key, value), Heads(query=heads, dim=dim, value_dim=dim), sizes)
    return row(tape.at("o_proj"), out, heads * dim, sizes.hidden, sizes, bias=shape.out_bias)


def rotate(tape: Tape, value: Ref, dim: int, sizes: Sizes) -> Ref:
    """Rotary embedding in one kernel: keeps only the table of angles, fp32 and shared by all layers.

    Source: NVIDIA apex, `transformer/functional/fused_rope.py`; Transformer Engine, `pytorch/attention/rope.py`.
    """
    angles = tape.shared(f"{TABLES}.angles", sizes.seq * sizes.cp * dim, FP32)
    return tape.op("fused_rope", (value, angles), value.like(), saves=(angles,))
