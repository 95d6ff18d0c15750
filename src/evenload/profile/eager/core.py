"""The core of attention: from queries, keys and values to the mixed values, by the kernel that runs."""

from __future__ import annotations

from dataclasses import replace

from evenload.errors import EvenloadError
from evenload.profile.eager.norms import FP32
from evenload.profile.eager.scores import Heads, QueryKeyValue, in_eager, in_math, repeated
from evenload.profile.hardware import sent_bytes
from evenload.profile.kernels import PADDED_TO, WIDEST, kernel, rounded
from evenload.profile.sizes import Sizes
from evenload.profile.tape import TABLES, Out, Ref, Tape

EFFICIENT_ALIGNMENT = 32
"""The memory-efficient kernel rounds the rows of its log-sum-exp up to this (PyTorch: `kAlignLSE`)."""
_NAME = "scaled_dot_product_attention"


def attention_core(tape: Tape, qkv: QueryKeyValue, heads: Heads, sizes: Sizes) -> Ref:
    """Mixed values of [batch, seq, heads * value_dim], by the kernel that the setup names."""
    if sizes.attention == "eager":
        return in_eager(tape, qkv, heads, sizes)
    return _scaled_dot_product(tape, qkv, heads, sizes)


def _scaled_dot_product(tape: Tape, qkv: QueryKeyValue, heads: Heads, sizes: Sizes) -> Ref:
    """`scaled_dot_product_attention` of transformers: the first kernel of CUDA that takes the tensors.

    A window of no more than the sequence makes transformers pass a mask, which becomes a bias of the activations' type
    in every layer. Grouped keys go in as they are where there is no mask and heads are equal and not too wide
    (`use_gqa_in_sdpa`); else they are repeated. Only the flash kernel reads grouped keys, and it knows no fp32.

    Capped scores (Gemma 2) have no such operator in PyTorch; the flash-attention package has a kernel that keeps the
    same, and knows windows: that one is meant.
    """
    masked = heads.window is not None and sizes.seq * sizes.cp >= heads.window and heads.softcap is None
    query, key, value = qkv
    if masked or not (heads.dim == heads.value_dim <= WIDEST):
        key, value = repeated(tape, key, heads), repeated(tape, value, heads)
        heads = replace(heads, key=heads.query, copied=heads.repeats > 1)
    query, key, value = (tape.lowered(one) for one in (query, key, value))
    if heads.softcap is not None:
        return _flash(tape, (query, key, value), heads, sizes)
    bias = _bias(tape, query, sizes) if masked else None
    dims = {heads.dim, heads.value_dim}
    runs = kernel(width=query.width, dims=dims, same_heads=heads.repeats == 1, masked=masked)
    if runs == "flash":
        return _flash(tape, (query, key, value), heads, sizes)
    if runs == "efficient":
        return _efficient(tape, (query, key, value), bias, heads, sizes)
    if sizes.cp > 1:
        raise EvenloadError(
            f"cp is {sizes.cp}, but no fused kernel takes these heads, and without one a sequence cannot be divided",
            where="$.cp",
            fix="use bf16 or heads that the kernels take, or leave cp at 1",
        )
    return in_math(tape, (query, key, value), bias, heads, sizes)


def _flash(tape: Tape, qkv: QueryKeyValue, heads: Heads, sizes: Sizes) -> Ref:
    """Keeps q, k, v, the result, laid out like q, and an fp32 number for every row of scores.

    Widths are padded to a multiple of 8; the result is then a part of what the kernel made, and copied.
    Source: PyTorch, `pad_last_dim` in aten/src/ATen/native/transformers/attention.cpp.
    """
    width = rounded(heads.dim, PADDED_TO)
    if width == heads.dim:
        mixed = _kernel(tape, "flash", qkv, heads, sizes)
        return (
            tape.op("contiguous", (mixed,), mixed.like(), aten="clone") if heads.packed and heads.query > 1 else mixed
        )
    query, key, value = (
        tape.op(_NAME, (one,), Out(one.elements // heads.dim * width, one.width), aten="constant_pad_nd") for one in qkv
    )
    mixed = _kernel(tape, "flash", (query, key, value), replace(heads, dim=width, value_dim=width), sizes)
    return tape.op("contiguous", (mixed,), Out(mixed.elements // width * heads.dim, mixed.width), aten="clone")


def _efficient(tape: Tape, qkv: QueryKeyValue, bias: Ref | None, heads: Heads, sizes: Sizes) -> Ref:
    """Keeps the bias too, whose rows are padded to 16 bytes, and more numbers than there are rows."""
    if bias is None:
        return _kernel(tape, "efficient", qkv, heads, sizes)
    columns = sizes.seq * sizes.cp
    if columns % PADDED_TO:
        more = Out(bias.elements // columns * rounded(columns, PADDED_TO), bias.width, differentiable=False)
        bias = tape.op(_NAME, (bias,), more, aten="constant_pad_nd")
    return _kernel(tape, "efficient", qkv, heads, sizes, bias=(bias,))


def _kernel(
    tape: Tape, which: str, qkv: QueryKeyValue, heads: Heads, sizes: Sizes, *, bias: tuple[Ref, ...] = ()
) -> Ref:
    query, key, value = qkv
    rows = sizes.seq if which == "flash" else rounded(sizes.seq, EFFICIENT_ALIGNMENT)
    mixed, _ = tape.ops(
        _NAME,
        (query, *_context(tape, key, value, sizes), *bias),
        (
            Out(sizes.tokens * heads.query * heads.value_dim, query.width),
            Out(sizes.batch * heads.query * rows, FP32, "logsumexp", differentiable=False),
        ),
        aten=f"_scaled_dot_product_{which}_attention",
        saves=(*qkv, *bias),
        saves_results=(0, 1),
        flops=2.0 * sizes.batch * heads.query * _pairs(sizes, causal=not bias) * (heads.dim + heads.value_dim),
        heavy=True,
    )
    return mixed


def _bias(tape: Tape, query: Ref, sizes: Sizes) -> Ref:
    """A layer's own copy of the mask, as numbers to be added to the scores.

    Source: PyTorch, `convert_boolean_attn_mask` in aten/src/ATen/native/transformers/attention.cpp.
    """
    scores = sizes.batch * sizes.seq * sizes.seq * sizes.cp
    mask = tape.shared(f"{TABLES}.local.mask", scores, 1)
    return tape.op(_NAME, (mask,), Out(scores, query.width, "bias", differentiable=False), aten="where")


def _context(tape: Tape, key: Ref, value: Ref, sizes: Sizes) -> tuple[Ref, Ref]:
    """Keys and values of all context-parallel ranks, gathered again in backward rather than kept.

    Source: PyTorch, `torch.distributed.tensor.experimental.context_parallel`, all-gather rotation.
    """
    if sizes.cp == 1:
        return key, value
    both = tape.op("cat", (key, value), Out(key.elements + value.elements, key.width))
    whole = Out(both.elements * sizes.cp, both.width)
    sent = sent_bytes("all_gather", whole.elements * whole.width, sizes.cp)
    everywhere = tape.op("all_gather_into_tensor", (both,), whole, comm="all_gather", comm_bytes=sent, group="context")
    return everywhere.part(key.elements * sizes.cp), everywhere.part(value.elements * sizes.cp)


def _pairs(sizes: Sizes, *, causal: bool) -> float:
    """Query/key pairs that a fused kernel works on, for one sequence and head: half of them under a causal mask."""
    whole = sizes.seq * sizes.cp
    return sizes.seq * (whole + 1) / 2 if causal else float(sizes.seq * whole)
