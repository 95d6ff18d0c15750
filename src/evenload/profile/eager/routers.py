"""Routers: which experts a token goes to, and with which weight.

Every family has its own; all of them are a small product, a score, a choice of the best and a weight. Sums over
`tokens x experts` numbers are small beside the rest of a layer, but they are written out: integers of eight bytes for
every choice are not nothing when a token chooses eight experts.
"""

from __future__ import annotations

from evenload.model import Experts
from evenload.profile.eager.embedding import INDEX
from evenload.profile.eager.linear import linear
from evenload.profile.eager.norms import FP32
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Out, Ref, Tape

BOOL = 1
_BEST_OF_GROUP = 2
"""DeepSeek-V3 ranks a group by the sum of its two best experts."""


def route(tape: Tape, source: Ref, shape: Experts, sizes: Sizes) -> tuple[Ref, Ref]:
    """Weights and expert numbers of every token's choices, [tokens, top_k] each."""
    if sizes.style.router == "mixtral":
        return _mixtral(tape, source, shape, sizes)
    if sizes.style.router == "deepseek_v2":
        return _deepseek_v2(tape, source, shape, sizes)
    if sizes.style.router == "deepseek_v3":
        return _deepseek_v3(tape, source, shape, sizes)
    return _qwen(tape, source, shape, sizes)


def _mixtral(tape: Tape, source: Ref, shape: Experts, sizes: Sizes) -> tuple[Ref, Ref]:
    scores = linear(tape, source, sizes.hidden, shape.experts)
    if sizes.upcast:
        scores = tape.op("float", (scores,), Out(scores.elements, FP32), aten="_to_copy")
    weights, chosen = _best(tape, _softmax(tape, scores), shape)
    return _normalized(tape, weights, shape), chosen


def _qwen(tape: Tape, source: Ref, shape: Experts, sizes: Sizes) -> tuple[Ref, Ref]:
    scores = linear(tape, source, sizes.hidden, shape.experts)
    if sizes.upcast:
        scores = tape.op("softmax", (scores,), Out(scores.elements, FP32), aten="_to_copy")
    weights, chosen = _best(tape, _softmax(tape, scores), shape)
    if shape.normalized:
        weights = _normalized(tape, weights, shape)
    if sizes.upcast:
        weights = tape.op("to", (weights,), Out(weights.elements, sizes.width), aten="_to_copy")
    return weights, chosen


def _deepseek_v2(tape: Tape, source: Ref, shape: Experts, sizes: Sizes) -> tuple[Ref, Ref]:
    scores = _softmax(tape, _wide_scores(tape, source, shape, sizes))
    if shape.groups > 1:
        groups = scores.elements // shape.experts * shape.groups
        best, *_ = tape.ops(
            "max",
            (scores,),
            (Out(groups, FP32), Out(groups, INDEX, "indices", differentiable=False)),
            saves_results=(1,),
        )
        scores = _masked(tape, scores, best, shape)
    weights, chosen = _best(tape, scores, shape)
    return tape.op("mul", (weights,), Out(weights.elements, FP32)), chosen


def _deepseek_v3(tape: Tape, source: Ref, shape: Experts, sizes: Sizes) -> tuple[Ref, Ref]:
    logits = _wide_scores(tape, source, shape, sizes)
    full = Out(logits.elements, FP32)
    scores = tape.op("sigmoid", (logits,), full, saves_results=(0,))
    bias = tape.parameter("e_score_correction_bias", shape.experts, FP32)
    ranked = tape.op("add", (scores, bias), full)
    rows = scores.elements // shape.experts
    best, _ = _top(tape, ranked, rows * shape.groups * _BEST_OF_GROUP)
    group_scores = tape.op("sum", (best,), Out(rows * shape.groups, FP32))
    ranked = _masked(tape, ranked, group_scores, shape)
    _, chosen = _best(tape, ranked, shape)
    out = Out(chosen.elements, FP32)
    weights = tape.op("gather", (scores, chosen), out, saves=(scores, chosen))
    if shape.normalized:
        total = tape.op("sum", (weights,), Out(rows, FP32))
        total = tape.op("add", (total,), Out(rows, FP32))
        weights = tape.op("div_", (weights, total), out, aten="clone", saves=(weights, total))
    return tape.op("mul", (weights,), out), chosen


def _wide_scores(tape: Tape, source: Ref, shape: Experts, sizes: Sizes) -> Ref:
    """Scores of a router that works in fp32; transformers makes its weight in fp32 whatever the model's type."""
    if sizes.upcast:
        source = tape.op("type", (source,), Out(source.elements, FP32), aten="_to_copy")
    return linear(tape, source, sizes.hidden, shape.experts)


def _softmax(tape: Tape, scores: Ref) -> Ref:
    return tape.op("softmax", (scores,), Out(scores.elements, FP32), aten="_softmax", saves_results=(0,))


def _best(tape: Tape, scores: Ref, shape: Experts) -> tuple[Ref, Ref]:
    return _top(tape, scores, scores.elements // shape.experts * shape.top_k)


def _top(tape: Tape, scores: Ref, elements: int) -> tuple[Ref, Ref]:
    values, indices = tape.ops(
        "topk",
        (scores,),
        (Out(elements, FP32), Out(elements, INDEX, "indices", differentiable=False)),
        saves_results=(1,),
    )
    return values, indices


def _normalized(tape: Tape, weights: Ref, shape: Experts) -> Ref:
    """Divided by their sum, in place: autograd copies the old content first and keeps it."""
    total = tape.op("sum", (weights,), Out(weights.elements // shape.top_k, FP32))
    return tape.op("div_", (weights, total), Out(weights.elements, FP32), aten="clone", saves=(weights, total))


def _masked(tape: Tape, scores: Ref, group_scores: Ref, shape: Experts) -> Ref:
    """Scores with those outside the best groups struck out."""
    rows = scores.elements // shape.experts
    _, groups = _top(tape, group_scores, rows * shape.groups_kept)
    mask = Out(group_scores.elements, FP32, differentiable=False)
    flags = tape.op("scatter_", (groups,), mask)
    if shape.groups > 1:  # a single group is spread over its experts by a view
        wide = Out(scores.elements, FP32, differentiable=False)
        flags = tape.op("reshape", (flags,), wide, aten="clone")
    bits = Out(scores.elements, BOOL, differentiable=False)
    flags = tape.op("bool", (flags,), bits, aten="_to_copy")
    flags = tape.op("__invert__", (flags,), bits, aten="bitwise_not")
    return tape.op("masked_fill", (scores, flags), Out(scores.elements, FP32), saves=(flags,))
