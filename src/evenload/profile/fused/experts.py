"""Mixture-of-experts blocks: fused permutation, exchange of rows, grouped products with weights in the activation.

Sources: Megatron-LM, `core/transformer/moe/{router,token_dispatcher,experts}.py` (all-to-all dispatcher,
`TEGroupedMLP`, `weighted_bias_swiglu_impl`); arXiv 2603.07685. Routing is taken as balanced.
"""

from __future__ import annotations

from dataclasses import replace

from evenload.model import Experts, FeedForward
from evenload.profile.eager.feed_forward import activation_name
from evenload.profile.fused.feed_forward import feed_forward
from evenload.profile.fused.linear import plain
from evenload.profile.fused.norms import FP32
from evenload.profile.hardware import sent_bytes
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Collective, Out, Ref, Tape

INDEX, MAP = 8, 4
"""Bytes of a place and of an entry of a row map."""


def mixture(tape: Tape, source: Ref, shape: Experts, sizes: Sizes) -> Ref:
    """Router, routed experts and shared experts; the result is divided over tokens as the input is.

    Args:
        tape: at the module.
        source: the normed layer input, divided as it is between tensor-parallel regions.
        shape: experts of the whole model.
        sizes: the rank's micro-batch.
    """
    weights = _route(tape.at("gate"), source, shape, sizes)
    routed = _experts(tape.at("experts"), source, weights, shape, sizes)
    if not shape.shared_intermediate:
        return routed
    name = sizes.style.shared_expert
    block = FeedForward(intermediate=shape.shared_intermediate, activation=shape.activation)
    shared = feed_forward(tape.at(name), source, block, sizes)
    if shape.shared_gate:
        gate = plain(tape.at(f"{name}_gate"), source, sizes.hidden, 1)
        gate = tape.op("sigmoid", (gate,), gate.like(), saves_results=(0,))
        shared = tape.op("mul", (shared, gate), shared.like(), saves=(shared, gate))
    return tape.op("add", (routed, shared), routed.like())


def _route(tape: Tape, source: Ref, shape: Experts, sizes: Sizes) -> Ref:
    """Weights of every token for every expert, 0 for those it does not go to (`topk_routing_with_score_function`)."""
    logits = plain(tape, source, sizes.hidden, shape.experts)
    name = "sigmoid" if sizes.style.router == "deepseek_v3" else "softmax"
    scores = tape.op(name, (logits,), logits.like(width=FP32), saves_results=(0,))
    choices = source.elements // sizes.hidden * shape.top_k
    outs = (Out(choices, FP32), Out(choices, INDEX, "indices", differentiable=False))
    weights, chosen = tape.ops("topk", (scores,), outs, saves_results=(1,))
    if shape.normalized:
        total = tape.op("sum", (weights,), Out(choices // shape.top_k, FP32))
        weights = tape.op("div", (weights, total), weights.like(), saves=(weights, total))
    return tape.op("scatter", (weights, chosen), logits.like(width=FP32), saves=(chosen,))


def _experts(tape: Tape, source: Ref, weights: Ref, shape: Experts, sizes: Sizes) -> Ref:
    tokens = source.elements // sizes.hidden
    share = 1 if sizes.sequence_parallel else sizes.tp
    rows = tokens // share * shape.top_k
    table = Out(tokens // share * shape.experts, MAP, "rows", differentiable=False)
    taken, row_weights, row_map = tape.ops(
        "permute",
        (source.part(source.elements // share), weights.part(weights.elements // share)),
        (Out(rows * sizes.hidden, sizes.width), Out(rows, FP32, "weights"), table),
        saves_results=(2,),
    )
    taken, row_weights = (_exchange(tape, value, sizes, back=False) for value in (taken, row_weights))
    several = shape.experts > sizes.ep
    if several:
        order = Out(row_weights.elements, MAP, "rows", differentiable=False)
        outs = (taken.like(), replace(row_weights.like(), suffix="weights"), order)
        taken, row_weights, _ = tape.ops("sort_chunks", (taken, row_weights), outs, saves_results=(2,))
    mixed = _products(tape, taken, row_weights, shape, sizes)
    if several:
        mixed = tape.op("sort_chunks", (mixed,), mixed.like())
    mixed = _exchange(tape, mixed, sizes, back=True)
    result = tape.op("unpermute", (mixed, row_map), Out(tokens // share * sizes.hidden, sizes.width), saves=(row_map,))
    if share == 1:
        return result
    return _collective(tape, result, ("all_gather", share), Out(result.elements * share, result.width))


def _products(tape: Tape, rows: Ref, weights: Ref, shape: Experts, sizes: Sizes) -> Ref:
    """Two grouped products with the weighted activation between: keeps both inputs, the first result, the weights."""
    experts, inner = shape.experts // sizes.ep, shape.intermediate // sizes.expert_tp
    both = _grouped(tape.at("gate_up_proj"), rows, (experts, sizes.hidden, 2 * inner))
    act = activation_name(shape.activation)
    name = {"silu": "swiglu", "gelu": "geglu"}.get(act, f"{act}_glu")
    hidden = Out(both.elements // 2, both.width)
    return _grouped(
        tape.at("down_proj"),
        tape.at("act_fn").op(name, (both, weights), hidden, saves=(both, weights)),
        (experts, inner, sizes.hidden),
    )


def _grouped(tape: Tape, source: Ref, shape: tuple[int, int, int]) -> Ref:
    experts, inner, outer = shape
    weight = tape.parameter("weight", experts * inner * outer, source.width)
    rows = source.elements // inner
    return tape.op(
        "grouped_mm",
        (source, weight),
        Out(rows * outer, source.width),
        saves=(source, weight),
        flops=2.0 * rows * inner * outer,
        heavy=True,
        weight_bytes=weight.nbytes,
    )


def _exchange(tape: Tape, rows: Ref, sizes: Sizes, *, back: bool) -> Ref:
    """Rows to the ranks of their experts, or back; where an expert is divided, all of its ranks get them."""
    size = sizes.expert_tp
    if back and size > 1:
        rows = _collective(tape, rows, ("reduce_scatter", size), Out(rows.elements // size, rows.width))
    if sizes.ep > 1:
        rows = _collective(tape, rows, ("all_to_all", sizes.ep), rows.like())
    if not back and size > 1:
        rows = _collective(tape, rows, ("all_gather", size), Out(rows.elements * size, rows.width))
    return rows


def _collective(tape: Tape, source: Ref, how: tuple[Collective, int], out: Out) -> Ref:
    kind, size = how
    whole = max(source.nbytes, out.elements * out.width)
    group = "expert" if kind == "all_to_all" else "tensor"
    return tape.op(kind, (source,), out, comm=kind, comm_bytes=sent_bytes(kind, whole, size), group=group)
