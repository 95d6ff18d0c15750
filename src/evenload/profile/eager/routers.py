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
    if scores.width != FP32:
        scores = tape.op("float", (scores,), Out(scores.elements, FP32), aten="_to_copy")
    weights, chosen = _best(tape, _softmax(tape, scores), shape)
    return _normalized(tape, weights, shape), chosen


def _qwen(tape: Tape, source: Ref, shape: Experts, sizes: Sizes) -> tuple[Ref, Ref]:
    scores = linear(tape, source, sizes.hidden, shape.experts)
    width = scores.width
    if width != FP32:
        scores = tape.op("softmax", (scores,), Out(scores.elements, FP32), aten="_to_copy")
    weights, chosen = _best(tape, _softmax(tape, scores), shape)
    if shape.normalized:
        weights = _normalized(tape, weights, shape)
    if width != FP32:
        weights = tape.op("to", (weights,), Out(weights.elements, width), aten="_to_copy")
    return weights, chosen


def _deepseek_v2(tape: Tape, source: Ref, shape: Experts, sizes: Sizes) -> tuple[Ref, Ref]:
    scores = _softmax(tape, _wide_scores(tape, source, shape, sizes))
    if shape.groups > 1:
        groups = scores.elements // shape.experts * shape.groups
        values = Out(groups, FP32, differentiable=False)
        best, _ = tape.ops("max", (scores,), (values, Out(groups, INDEX, "indices", differentiable=False)))
        flags = _outside(tape, best, scores, shape)
        scores = tape.op("masked_fill", (scores, flags), scores.like(), saves=(flags,))
    weights, chosen = _best(tape, scores, shape)
    return tape.op("mul", (weights,), weights.like()), chosen


def _deepseek_v3(tape: Tape, source: Ref, shape: Experts, sizes: Sizes) -> tuple[Ref, Ref]:
    """Experts are chosen by scores with a bias, weighted by those without: the choice itself has no gradient."""
    logits = _wide_scores(tape, source, shape, sizes)
    scores = tape.op("sigmoid", (logits,), logits.like(), saves_results=(0,))
    bias = tape.parameter("e_score_correction_bias", shape.experts, FP32)
    biased = Out(scores.elements, FP32, differentiable=False)
    ranked = tape.op("add", (scores, bias), biased)
    rows = scores.elements // shape.experts
    best, _ = _ranked(tape, ranked, rows * shape.groups * _BEST_OF_GROUP)
    groups = tape.op("sum", (best,), Out(rows * shape.groups, FP32, differentiable=False))
    flags = _outside(tape, groups, scores, shape)
    ranked = tape.op("masked_fill", (ranked, flags), biased)
    _, chosen = _ranked(tape, ranked, rows * shape.top_k)
    out = Out(chosen.elements, scores.width)
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
    return linear(tape, source, sizes.hidden, shape.experts, width=FP32)


def _softmax(tape: Tape, scores: Ref) -> Ref:
    return tape.op("softmax", (scores,), Out(scores.elements, FP32), aten="_softmax", saves_results=(0,))


def _best(tape: Tape, scores: Ref, shape: Experts) -> tuple[Ref, Ref]:
    """The best scores of every token and whose they are; they become weights, so that the places are kept."""
    elements = scores.elements // shape.experts * shape.top_k
    outs = (Out(elements, FP32), Out(elements, INDEX, "indices", differentiable=False))
    weights, chosen = tape.ops("topk", (scores,), outs, saves_results=(1,))
    return weights, chosen


def _ranked(tape: Tape, scores: Ref, elements: int) -> tuple[Ref, Ref]:
    """The same where only the places are used: autograd keeps nothing."""
    outs = (Out(elements, FP32, differentiable=False), Out(elements, INDEX, "indices", differentiable=False))
    values, places = tape.ops("topk", (scores,), outs)
    return values, places


def _normalized(tape: Tape, weights: Ref, shape: Experts) -> Ref:
    """Divided by their sum, in place: autograd copies the old content first and keeps it."""
    total = tape.op("sum", (weights,), Out(weights.elements // shape.top_k, FP32))
    return tape.op("div_", (weights, total), weights.like(), aten="clone", saves=(weights, total))


def _outside(tape: Tape, group_scores: Ref, scores: Ref, shape: Experts) -> Ref:
    """For every token, the experts outside its best groups."""
    rows = scores.elements // shape.experts
    _, groups = _ranked(tape, group_scores, rows * shape.groups_kept)
    flags = tape.op("scatter_", (groups,), Out(group_scores.elements, FP32, differentiable=False))
    if shape.groups > 1:  # a single group is spread over its experts by a view
        flags = tape.op("reshape", (flags,), Out(scores.elements, FP32, differentiable=False), aten="clone")
    bits = Out(scores.elements, BOOL, differentiable=False)
    flags = tape.op("bool", (flags,), bits, aten="_to_copy")
    return tape.op("__invert__", (flags,), bits, aten="bitwise_not")
