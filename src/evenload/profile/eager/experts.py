"""Mixture-of-experts blocks: router, routed experts and the experts that every token goes to.

Where ranks exchange rows, routing is taken as balanced: every rank receives as many as it sends.
"""

from __future__ import annotations

from evenload.model import Experts, FeedForward
from evenload.profile.eager.collectives import gathered, reduced
from evenload.profile.eager.embedding import INDEX
from evenload.profile.eager.expert_rows import Routing, combine, products, sort_rows
from evenload.profile.eager.feed_forward import feed_forward
from evenload.profile.eager.linear import linear
from evenload.profile.eager.routers import route
from evenload.profile.hardware import sent_bytes
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Collective, Out, Ref, Tape


def mixture(tape: Tape, source: Ref, shape: Experts, sizes: Sizes) -> Ref:
    """A block of experts; its result is divided over tokens as its input is.

    Without expert parallelism every tensor-parallel rank sees all tokens and a part of every expert's width, and the
    parts are summed as those of a dense block. With it, each rank routes its own part of the tokens.

    Args:
        tape: at the module.
        source: the normed layer input, as it is between tensor-parallel regions.
        shape: experts of the whole model.
        sizes: the rank's micro-batch.
    """
    if not sizes.exchanges_rows:
        source = gathered(tape, source, sizes)
    early = _shared(tape, source, shape, sizes) if shape.shared_gate else None
    weights, chosen = route(tape.at("gate"), source, shape, sizes)
    routing = Routing(weights=weights, chosen=chosen)
    routed = (_remote if sizes.exchanges_rows else _local)(tape.at("experts"), source, routing, shape, sizes)
    if early is not None:
        routed = tape.op("add", (routed, _gated(tape, source, early, sizes)), routed.like())
    elif shape.shared_intermediate:
        routed = tape.op("add", (routed, _shared(tape, source, shape, sizes)), routed.like())
    return routed if sizes.exchanges_rows else reduced(tape, routed, sizes)


def _local(tape: Tape, source: Ref, routing: Routing, shape: Experts, sizes: Sizes) -> Ref:
    """All experts are on this rank, at least a part of their width."""
    choices = sort_rows(tape, source, routing, shape, sizes)
    return combine(tape, products(tape, choices.rows, choices.offsets, shape, sizes), choices, shape, sizes)


def _remote(tape: Tape, source: Ref, routing: Routing, shape: Experts, sizes: Sizes) -> Ref:
    """Rows go to the ranks of their experts and come back, sorted by rank outside and by expert inside.

    Where tokens are whole on every tensor-parallel rank, each takes `1 / tp` of them and the results are gathered.
    Source: torchtitan, `ExpertParallel`, `ExpertTensorParallel` and `ReordererSequenceParallel`.
    """
    share = 1 if sizes.sequence_parallel else sizes.tp
    own = Routing(
        weights=routing.weights.part(routing.weights.elements // share),
        chosen=routing.chosen.part(routing.chosen.elements // share),
    )
    choices = sort_rows(tape, source, own, shape, sizes)
    rows = choices.rows
    if sizes.ep > 1:
        rows = _collective(tape, "all_to_all_single", rows, ("all_to_all", sizes.ep), rows.like())
    if sizes.expert_tp > 1:
        more = Out(rows.elements * sizes.expert_tp, rows.width)
        rows = _collective(tape, "all_gather_into_tensor", rows, ("all_gather", sizes.expert_tp), more)
    place = Out(rows.elements // sizes.hidden, INDEX, "place", differentiable=False)
    place = tape.op("__getitem__", (choices.offsets,), place, aten="arange")
    rows = tape.op("__getitem__", (rows, place), rows.like(), aten="index", saves=(place,))
    mixed = products(tape, rows, choices.offsets, shape, sizes)
    mixed = tape.op("__setitem__", (mixed, place), mixed.like(), aten="index_put_", saves=(place,))
    if sizes.expert_tp > 1:
        fewer = Out(mixed.elements // sizes.expert_tp, mixed.width)
        mixed = _collective(tape, "reduce_scatter_tensor", mixed, ("reduce_scatter", sizes.expert_tp), fewer)
    if sizes.ep > 1:
        mixed = _collective(tape, "all_to_all_single", mixed, ("all_to_all", sizes.ep), mixed.like())
    result = combine(tape, mixed, choices, shape, sizes)
    if share == 1:
        return result
    full = Out(result.elements * share, result.width)
    return _collective(tape, "all_gather_into_tensor", result, ("all_gather", share), full)


def _collective(tape: Tape, name: str, source: Ref, how: tuple[Collective, int], out: Out) -> Ref:
    kind, size = how
    whole = max(source.nbytes, out.elements * out.width)
    group = "expert" if kind == "all_to_all" else "tensor"
    return tape.op(name, (source,), out, comm=kind, comm_bytes=sent_bytes(kind, whole, size), group=group)


def _shared(tape: Tape, source: Ref, shape: Experts, sizes: Sizes) -> Ref:
    """The experts that every token goes to: one dense block, its parts summed where the routed ones are not."""
    module = tape.at(sizes.style.shared_expert)
    block = FeedForward(intermediate=shape.shared_intermediate, activation=shape.activation)
    if not sizes.exchanges_rows:
        return feed_forward(module, source, block, sizes)
    return reduced(module, feed_forward(module, gathered(module, source, sizes), block, sizes), sizes)


def _gated(tape: Tape, source: Ref, shared: Ref, sizes: Sizes) -> Ref:
    """The shared expert times a sigmoid of one number a token (Qwen 2 MoE)."""
    gate = linear(tape.at(f"{sizes.style.shared_expert}_gate"), source, sizes.hidden, 1)
    gate = tape.op("sigmoid", (gate,), gate.like(), saves_results=(0,))
    return tape.op("mul", (gate, shared), shared.like(), saves=(gate, shared))
