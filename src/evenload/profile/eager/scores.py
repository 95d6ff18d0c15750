"""Attention that writes its scores out: matrix product, softmax, matrix product."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evenload.profile.eager.embedding import BOOL
from evenload.profile.eager.norms import FP32
from evenload.profile.sizes import Sizes
from evenload.profile.tape import TABLES, Out, Ref, Tape


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Heads of one rank and their widths."""

    query: int
    key: int
    """Heads of keys and values."""
    dim: int
    """Width of a query and key head."""
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    packed: bool = False
    """q and k are contiguous as [batch, heads, seq, dim]; else they are transposed views of a projection."""
    copied: bool = False
    """k and v are contiguous: they were repeated for their query heads."""

    @property
    def repeats(self) -> int:
        """Query heads that share a key/value head."""
        return self.query // self.key


QueryKeyValue = tuple[Ref, Ref, Ref]
_SDPA = "scaled_dot_product_attention"


def in_eager(tape: Tape, qkv: QueryKeyValue, heads: Heads, sizes: Sizes) -> Ref:
    """Matrix product, softmax in fp32, matrix product: keeps the scores after softmax, and both operands of each."""
    query, key, value = qkv
    width = query.width
    key, value = repeated(tape, key, heads), repeated(tape, value, heads)
    query, key = tape.lowered(query), tape.lowered(key)
    if not heads.packed:
        query = _batched(tape, query, heads, sizes, repeats=1)
    if not heads.packed or heads.repeats > 1:
        key = _batched(tape, key, heads, sizes, repeats=heads.repeats)
    full = Out(sizes.batch * heads.query * sizes.seq * sizes.seq, query.width)
    flops = 2.0 * full.elements
    weights = tape.op("matmul", (query, key), full, aten="bmm", saves=(query, key), flops=flops * heads.dim, heavy=True)
    weights = _softmax(tape, tape.op("mul", (weights,), full), heads, sizes, width=width)
    weights, value = tape.lowered(weights), tape.lowered(value)
    value = _batched(tape, value, heads, sizes, repeats=heads.repeats)
    mixed = tape.op(
        "matmul",
        (weights, value),
        Out(sizes.tokens * heads.query * heads.value_dim, value.width),
        aten="bmm",
        saves=(weights, value),
        flops=flops * heads.value_dim,
        heavy=True,
    )
    if heads.query == 1:
        return mixed  # already in the layout of the output projection
    return tape.op("contiguous", (mixed,), mixed.like(), aten="clone")


def _softmax(tape: Tape, scores: Ref, heads: Heads, sizes: Sizes, *, width: int) -> Ref:
    """Scores to weights in fp32, converted to the type of the queries, which has `width` bytes an element."""
    if heads.softcap is not None:
        scores = tape.op("div", (scores,), scores.like())
        scores = tape.op("tanh", (scores,), scores.like(), saves_results=(0,))
        scores = tape.op("mul", (scores,), scores.like())
    kind = ".local" if heads.window is not None else ""
    mask = tape.shared(f"{TABLES}{kind}.mask", sizes.batch * sizes.seq * sizes.seq, sizes.width)
    scores = tape.op("add", (scores, mask), scores.like(width=max(scores.width, mask.width)))
    if scores.width != FP32:
        scores = tape.op("softmax", (scores,), scores.like(width=FP32), aten="_to_copy")
    weights = tape.op("softmax", (scores,), scores.like(), aten="_softmax", saves_results=(0,))
    return weights if width == FP32 else tape.op("to", (weights,), weights.like(width=width), aten="_to_copy")


def repeated(tape: Tape, value: Ref, heads: Heads) -> Ref:
    """Keys or values repeated for every query head that shares them.

    `expand` then `reshape` copies, unless a single head is repeated: then the reshaped view has stride 0.
    """
    if heads.repeats == 1:
        return value
    if heads.key == 1:
        return replace(value, stretch=heads.repeats)
    return tape.op("reshape", (value,), Out(value.elements * heads.repeats, value.width), aten="clone")


def _batched(tape: Tape, value: Ref, heads: Heads, sizes: Sizes, *, repeats: int) -> Ref:
    """The operand of a batched product: batch and heads are merged, which copies a transposed tensor of both."""
    several = heads.query > 1 if repeats == 1 else value.stretch > 1  # `repeated` has made several heads contiguous
    if sizes.batch == 1 or not several:
        return value
    return tape.op("matmul", (value,), value.like(), aten="clone")


def in_math(tape: Tape, qkv: QueryKeyValue, bias: Ref | None, heads: Heads, sizes: Sizes) -> Ref:
    """`scaled_dot_product_attention` without a fused kernel: in fp32, queries and keys scaled before their product.

    Keeps the scores after softmax, and both operands of each product. Grouped keys and values are repeated in it, which
    makes them contiguous. Source: PyTorch, `_scaled_dot_product_attention_math` in
    aten/src/ATen/native/transformers/attention.cpp.

    Args:
        tape: at the attention module.
        qkv: queries, keys and values.
        bias: the mask as numbers to be added to the scores; None: causal.
        heads: of this rank; grouped ones are repeated.
        sizes: the rank's micro-batch.
    """
    query, key, value = (_single(tape, one) for one in qkv)
    mergeable = sizes.batch == 1 or heads.query == 1
    fresh = heads.copied or heads.repeats > 1
    query = tape.op(_SDPA, (query,), query.like(), aten="mul")
    if bias is None:
        bias = _causal(tape, sizes)
    if heads.repeats > 1:
        key, value = (
            tape.op(_SDPA, (one,), Out(one.elements * heads.repeats, FP32), aten="clone") for one in (key, value)
        )
    key = tape.op(_SDPA, (key,), key.like(), aten="mul")
    if not (mergeable or heads.packed):
        query = tape.op(_SDPA, (query,), query.like(), aten="clone")
    if not (mergeable or heads.packed or fresh):
        key = tape.op(_SDPA, (key,), key.like(), aten="clone")
    full = Out(sizes.batch * heads.query * sizes.seq * sizes.seq, FP32)
    flops = 2.0 * full.elements
    scores = tape.op(_SDPA, (query, key), full, aten="bmm", saves=(query, key), flops=flops * heads.dim, heavy=True)
    scores = tape.op(_SDPA, (scores, bias), full, aten="add")
    weights = tape.op(_SDPA, (scores,), full, aten="_safe_softmax", saves_results=(0,))
    half = qkv[0].width != FP32
    if half:
        tape.op("_to_copy", (weights,), weights.like(width=qkv[0].width))  # a result that nobody takes
    if sizes.batch > 1 and (value.stretch > 1 or not (mergeable or fresh)):
        value = tape.op(_SDPA, (value,), value.like(), aten="clone")
    mixed = tape.op(
        _SDPA,
        (weights, value),
        Out(sizes.tokens * heads.query * heads.value_dim, FP32),
        aten="bmm",
        saves=(weights, value),
        flops=flops * heads.value_dim,
        heavy=True,
    )
    if half:
        mixed = tape.op("_to_copy", (mixed,), mixed.like(width=qkv[0].width))
    if heads.query == 1:
        return mixed
    return tape.op("contiguous", (mixed,), mixed.like(), aten="clone")


def _single(tape: Tape, value: Ref) -> Ref:
    return value if value.width == FP32 else tape.op("_to_copy", (value,), value.like(width=FP32))


def _causal(tape: Tape, sizes: Sizes) -> Ref:
    """A causal mask of the layer's own, as numbers to be added to the scores."""
    flags = Out(sizes.seq * sizes.seq, BOOL, differentiable=False)
    kept = tape.op(_SDPA, (tape.op(_SDPA, (), flags, aten="ones"),), flags, aten="tril")
    return tape.op(_SDPA, (kept,), Out(flags.elements, FP32, differentiable=False), aten="where")
