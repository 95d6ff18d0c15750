"""The core of attention: from queries, keys and values to the mixed values."""

from __future__ import annotations

from dataclasses import dataclass

from evenload.profile.eager.norms import FP32
from evenload.profile.hardware import sent_bytes
from evenload.profile.sizes import Sizes
from evenload.profile.tape import TABLES, Out, Ref, Tape

EFFICIENT_ALIGNMENT = 32
"""The memory-efficient kernel rounds the rows of its log-sum-exp up to this (PyTorch: `kAlignLSE`)."""


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

    @property
    def repeats(self) -> int:
        """Query heads that share a key/value head."""
        return self.query // self.key


QueryKeyValue = tuple[Ref, Ref, Ref]


def attention_core(tape: Tape, qkv: QueryKeyValue, heads: Heads, sizes: Sizes) -> Ref:
    """Mixed values of [batch, seq, heads * value_dim], by the kernel that the setup names."""
    if sizes.attention == "eager":
        return _eager(tape, qkv, heads, sizes)
    return _fused(tape, qkv, heads, sizes)


def _fused(tape: Tape, qkv: QueryKeyValue, heads: Heads, sizes: Sizes) -> Ref:
    """`scaled_dot_product_attention`: keeps q, k, v, the result and an fp32 number for every row of scores.

    Without a mask this is the flash kernel, which reads grouped keys as they are and lays its result out like q. A
    window of no more than the sequence makes transformers pass a mask: keys and values are repeated, the mask becomes a
    bias of the activations' type in every layer, and the memory-efficient kernel keeps all of them. That kernel also
    runs where values are narrower than queries. (In fp32 CUDA has no flash kernel; the rules here are those of the
    half types, and of the CPU in fp32.)

    Capped scores (Gemma 2) have no such operator in PyTorch; the flash-attention package has a kernel that keeps the
    same, and knows windows: that one is meant.
    """
    query, key, value = (tape.lowered(one) for one in qkv)
    masked = heads.window is not None and sizes.seq * sizes.cp >= heads.window and heads.softcap is None
    bias: tuple[Ref, ...] = ()
    if masked:
        key, value = _repeated(tape, key, heads), _repeated(tape, value, heads)
        bias = (_mask_bias(tape, sizes),)
    plain = not masked and heads.dim == heads.value_dim
    rows = sizes.seq if plain else -(-sizes.seq // EFFICIENT_ALIGNMENT) * EFFICIENT_ALIGNMENT
    read = (query, *_context(tape, key, value, sizes), *bias)
    mixed, _ = tape.ops(
        "scaled_dot_product_attention",
        read,
        (
            Out(sizes.tokens * heads.query * heads.value_dim, query.width),
            Out(sizes.batch * heads.query * rows, FP32, "logsumexp", differentiable=False),
        ),
        aten="_scaled_dot_product_flash_attention" if plain else "_scaled_dot_product_efficient_attention",
        saves=(query, key, value, *bias),
        saves_results=(0, 1),
        flops=2.0 * sizes.batch * heads.query * _pairs(sizes, causal=not masked) * (heads.dim + heads.value_dim),
        heavy=True,
    )
    if heads.packed and plain and heads.query > 1:
        return tape.op("contiguous", (mixed,), mixed.like(), aten="clone")
    return mixed


def _mask_bias(tape: Tape, sizes: Sizes) -> Ref:
    """A layer's own copy of the mask, as numbers to be added to the scores."""
    scores = sizes.batch * sizes.seq * sizes.seq * sizes.cp
    mask = tape.shared(f"{TABLES}.local.mask", scores, 1)
    bias = Out(scores, sizes.width, "bias", differentiable=False)
    return tape.op("scaled_dot_product_attention", (mask,), bias, aten="where")


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


def _eager(tape: Tape, qkv: QueryKeyValue, heads: Heads, sizes: Sizes) -> Ref:
    """Matrix product, softmax in fp32, matrix product: keeps the scores after softmax, and both operands of each."""
    query, key, value = qkv
    key, value = _repeated(tape, key, heads), _repeated(tape, value, heads)
    if not heads.packed:
        query = _batched(tape, query, heads, sizes, repeats=1)
    if not heads.packed or heads.repeats > 1:
        key = _batched(tape, key, heads, sizes, repeats=heads.repeats)
    full = Out(sizes.batch * heads.query * sizes.seq * sizes.seq, sizes.width)
    flops = 2.0 * full.elements
    weights = tape.op("matmul", (query, key), full, aten="bmm", saves=(query, key), flops=flops * heads.dim, heavy=True)
    weights = _softmax(tape, tape.op("mul", (weights,), full), heads, sizes)
    value = _batched(tape, value, heads, sizes, repeats=heads.repeats)
    mixed = tape.op(
        "matmul",
        (weights, value),
        Out(sizes.tokens * heads.query * heads.value_dim, sizes.width),
        aten="bmm",
        saves=(weights, value),
        flops=flops * heads.value_dim,
        heavy=True,
    )
    if heads.query == 1:
        return mixed  # already in the layout of the output projection
    return tape.op("contiguous", (mixed,), mixed.like(), aten="clone")


def _softmax(tape: Tape, scores: Ref, heads: Heads, sizes: Sizes) -> Ref:
    full, wide = scores.like(), scores.like(width=FP32)
    if heads.softcap is not None:
        scores = tape.op("div", (scores,), full)
        scores = tape.op("tanh", (scores,), full, saves_results=(0,))
        scores = tape.op("mul", (scores,), full)
    kind = ".local" if heads.window is not None else ""
    mask = tape.shared(f"{TABLES}{kind}.mask", sizes.batch * sizes.seq * sizes.seq, sizes.width)
    scores = tape.op("add", (scores, mask), full)
    if sizes.upcast:
        scores = tape.op("softmax", (scores,), wide, aten="_to_copy")
    weights = tape.op("softmax", (scores,), wide, aten="_softmax", saves_results=(0,))
    return tape.op("to", (weights,), full, aten="_to_copy") if sizes.upcast else weights


def _repeated(tape: Tape, value: Ref, heads: Heads) -> Ref:
    """Keys or values repeated for every query head that shares them.

    `expand` then `reshape` copies, unless a single head is repeated: then the reshaped view has stride 0.
    """
    if heads.repeats == 1 or heads.key == 1:
        return value
    return tape.op("reshape", (value,), Out(value.elements * heads.repeats, value.width), aten="clone")


def _batched(tape: Tape, value: Ref, heads: Heads, sizes: Sizes, *, repeats: int) -> Ref:
    """The operand of a batched product: batch and heads are merged, which copies a transposed tensor of both."""
    several = heads.query > 1 if repeats == 1 else heads.key == 1  # `_repeated` has made several key heads contiguous
    if sizes.batch == 1 or not several:
        return value
    return tape.op("matmul", (value,), Out(value.elements * repeats, value.width), aten="clone")


def _pairs(sizes: Sizes, *, causal: bool) -> float:
    """Query/key pairs that a fused kernel works on, for one sequence and head: half of them under a causal mask."""
    whole = sizes.seq * sizes.cp
    return sizes.seq * (whole + 1) / 2 if causal else float(sizes.seq * whole)
