"""Routed experts on one rank: rows by expert, grouped products, and back to tokens.

Grouped products (transformers: `experts_implementation="grouped_mm"`) serve all experts at once. Their shapes do not
depend on how tokens are routed as long as a rank holds all experts: `tokens * top_k` rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from evenload.model import Experts
from evenload.profile.eager.embedding import INDEX
from evenload.profile.eager.feed_forward import activation_name
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Out, Ref, Tape

OFFSET = 4
"""Bytes of a row offset (int32)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """What a router says."""

    weights: Ref
    """Weight of every choice, [tokens, top_k]."""
    chosen: Ref
    """Expert of every choice, [tokens, top_k]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sorted:
    """Choices in the order of their experts."""

    rows: Ref
    """The hidden state of every choice's token."""
    weights: Ref
    order: Ref
    """Where every choice was."""
    offsets: Ref
    """Where the rows of each expert end."""


def sort_rows(tape: Tape, source: Ref, routing: Routing, shape: Experts, sizes: Sizes) -> Sorted:
    """One row for every choice of every token, by expert."""
    count = routing.chosen.elements
    index = Out(count, INDEX, differentiable=False)
    experts_of_rows, order = tape.ops(
        "sort", (routing.chosen,), (index, Out(count, INDEX, "order", differentiable=False))
    )
    token = tape.op("__floordiv__", (order,), index, aten="floor_divide")
    hidden = Out(count * sizes.hidden, source.width)
    rows = tape.op("__getitem__", (source, token), hidden, aten="index", saves=(token,))
    picked = Out(count, routing.weights.width)
    weights = tape.op("__getitem__", (routing.weights, order), picked, aten="index", saves=(order,))
    return Sorted(rows=rows, weights=weights, order=order, offsets=_offsets(tape, experts_of_rows, shape.experts))


def _offsets(tape: Tape, experts_of_rows: Ref, experts: int) -> Ref:
    narrow = Out(experts_of_rows.elements, OFFSET, differentiable=False)
    numbers = tape.op("int", (experts_of_rows,), narrow, aten="_to_copy")
    counts = tape.op("histc", (numbers,), Out(experts, OFFSET, differentiable=False))
    return tape.op("cumsum", (counts,), Out(experts, OFFSET, differentiable=False))


def products(tape: Tape, rows: Ref, offsets: Ref, shape: Experts, sizes: Sizes) -> Ref:
    """Up, activation, gate and down for the rows of every expert on this rank."""
    experts, inner = shape.experts // sizes.ep, shape.intermediate // sizes.expert_tp
    both = _grouped(tape, "gate_up_proj", (rows, offsets), (experts, sizes.hidden, 2 * inner))
    half = both.part(both.elements // 2)
    active = tape.at("act_fn").op(activation_name(shape.activation), (half,), half.like(), saves=(both,))
    product = tape.op("mul", (active, half), half.like(), saves=(active, both))
    return _grouped(tape, "down_proj", (product, offsets), (experts, inner, sizes.hidden))


def _grouped(tape: Tape, name: str, inputs: tuple[Ref, Ref], shape: tuple[int, int, int]) -> Ref:
    """One product an expert over its own rows: keeps the rows and the offsets."""
    source, offsets = inputs
    experts, inner, outer = shape
    weight = tape.parameter(name, experts * inner * outer, source.width)
    rows = source.elements // inner
    return tape.op(
        "_grouped_mm",
        (source, weight, offsets),
        Out(rows * outer, source.width),
        saves=(source, weight, offsets),
        flops=2.0 * rows * inner * outer,
        heavy=True,
        weight_bytes=weight.nbytes,
    )


def combine(tape: Tape, mixed: Ref, choices: Sorted, shape: Experts, sizes: Sizes) -> Ref:
    """Rows times their weights, back in the order of tokens, summed over each token's experts.

    The product has the wider type of the two: fp32 where the router's weights are.
    """
    width = max(choices.weights.width, mixed.width)
    saves = (mixed, choices.weights)
    weighted = tape.op("mul", saves, mixed.like(width=width), saves=saves)
    index = Out(choices.order.elements, INDEX, differentiable=False)
    numbers = tape.op("arange", (), index)
    inverse = tape.op("__setitem__", (choices.order, numbers), index, aten="index_put_")
    ordered = tape.op("__getitem__", (weighted, inverse), weighted.like(), aten="index", saves=(inverse,))
    summed = tape.op("sum", (ordered,), Out(mixed.elements // shape.top_k, width))
    return summed if width == sizes.width else tape.op("to", (summed,), summed.like(width=sizes.width), aten="_to_copy")
