"""The core of attention: from queries, keys and values to the mixed values."""

from __future__ import annotations

from dataclasses import dataclass

from evenload.profile.eager.norms import FP32
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Out, Ref, Tape

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

    @property
    def repeats(self) -> int:
        """Query heads that share a key/value head."""
        return self.query // self.key


QueryKeyValue = tuple[Ref, Ref, Ref]


def attention_core(tape: Tape, path: str, qkv: QueryKeyValue, heads: Heads, sizes: Sizes) -> Ref:
    """Mixed values of [batch, seq, heads * value_dim], by the kernel that the setup names."""
    if sizes.attention == "eager":
        return _eager(tape, path, qkv, heads, sizes)
    return _fused(tape, path, qkv, heads, sizes)


def _fused(tape: Tape, path: str, qkv: QueryKeyValue, heads: Heads, sizes: Sizes) -> Ref:
    """`scaled_dot_product_attention`: keeps q, k, v, the result and an fp32 number for every row of scores.

    Without a mask this is the flash kernel, which reads grouped keys as they are. A window shorter than the sequence
    makes transformers pass a mask: keys and values are repeated, the mask becomes a bias of the activations' type in
    every layer, and the memory-efficient kernel keeps all of them.
    """
    query, key, value = qkv
    masked = heads.window is not None and sizes.seq * sizes.cp > heads.window
    saves: tuple[Ref, ...]
    if masked:
        key = _repeated(tape, path, key, heads)
        value = _repeated(tape, path, value, heads)
        scores = sizes.batch * sizes.seq * sizes.seq * sizes.cp
        mask = tape.held("position.mask", scores, 1)
        bias = tape.op(
            path,
            "scaled_dot_product_attention",
            (mask,),
            Out(scores, sizes.width, "bias", differentiable=False),
            aten="where",
        )
        saves = (query, key, value, bias)
    else:
        saves = (query, key, value)
    plain = not masked and heads.dim == heads.value_dim
    rows = sizes.seq if plain else -(-sizes.seq // EFFICIENT_ALIGNMENT) * EFFICIENT_ALIGNMENT
    mixed, _ = tape.ops(
        path,
        "scaled_dot_product_attention",
        saves,
        (
            Out(sizes.tokens * heads.query * heads.value_dim, sizes.width),
            Out(sizes.batch * heads.query * rows, FP32, "logsumexp", differentiable=False),
        ),
        aten="_scaled_dot_product_flash_attention" if plain else "_scaled_dot_product_efficient_attention",
        saves=saves,
        saves_results=(0, 1),
        flops=2.0 * sizes.batch * heads.query * _pairs(sizes, causal=not masked) * (heads.dim + heads.value_dim),
        heavy=True,
    )
    return mixed


def _eager(tape: Tape, path: str, qkv: QueryKeyValue, heads: Heads, sizes: Sizes) -> Ref:
    """Matrix product, softmax in fp32, matrix product: keeps the scores after softmax, and both operands of each."""
    query, key, value = qkv
    key, value = _repeated(tape, path, key, heads), _repeated(tape, path, value, heads)
    scores = sizes.batch * heads.query * sizes.seq * sizes.seq
    full = Out(scores, sizes.width)
    flops = 2.0 * scores
    query = _batched(tape, path, query, heads, sizes, repeated=False)
    key = _batched(tape, path, key, heads, sizes, repeated=True)
    weights = tape.op(
        path, "matmul", (query, key), full, aten="bmm", saves=(query, key), flops=flops * heads.dim, heavy=True
    )
    weights = tape.op(path, "mul", (weights,), full)
    if heads.softcap is not None:
        weights = tape.op(path, "div", (weights,), full)
        weights = tape.op(path, "tanh", (weights,), full, saves_results=(0,))
        weights = tape.op(path, "mul", (weights,), full)
    mask = tape.held("position.mask", sizes.batch * sizes.seq * sizes.seq, sizes.width)
    weights = tape.op(path, "add", (weights, mask), full)
    if sizes.upcast:
        weights = tape.op(path, "softmax", (weights,), Out(scores, FP32), aten="_to_copy")
    weights = tape.op(path, "softmax", (weights,), Out(scores, FP32), aten="_softmax", saves_results=(0,))
    if sizes.upcast:
        weights = tape.op(path, "to", (weights,), full, aten="_to_copy")
    value = _batched(tape, path, value, heads, sizes, repeated=True)
    result = Out(sizes.tokens * heads.query * heads.value_dim, sizes.width)
    mixed = tape.op(
        path,
        "matmul",
        (weights, value),
        result,
        aten="bmm",
        saves=(weights, value),
        flops=flops * heads.value_dim,
        heavy=True,
    )
    if heads.query == 1:
        return mixed  # already in the layout of the output projection
    return tape.op(path, "contiguous", (mixed,), result, aten="clone")


def _repeated(tape: Tape, path: str, value: Ref, heads: Heads) -> Ref:
    """Keys or values repeated for every query head that shares them.

    `expand` then `reshape` copies, unless a single head is repeated: then the reshaped view has stride 0.
    """
    if heads.repeats == 1 or heads.key == 1:
        return value
    return tape.op(path, "reshape", (value,), Out(value.elements * heads.repeats, value.width), aten="clone")


def _batched(tape: Tape, path: str, value: Ref, heads: Heads, sizes: Sizes, *, repeated: bool) -> Ref:
    """The operand of a batched product: batch and heads are merged, which copies a transposed tensor of both."""
    if repeated and heads.repeats > 1:
        copies = heads.key == 1 and sizes.batch > 1
        elements = value.elements * heads.repeats
    else:
        copies = sizes.batch > 1 and heads.query > 1
        elements = value.elements
    if not copies:
        return value
    return tape.op(path, "matmul", (value,), Out(elements, value.width), aten="clone")


def _pairs(sizes: Sizes, *, causal: bool) -> float:
    """Query/key pairs that a fused kernel works on, for one sequence and head: half of them under a causal mask."""
    whole = sizes.seq * sizes.cp
    return sizes.seq * (whole + 1) / 2 if causal else float(sizes.seq * whole)
