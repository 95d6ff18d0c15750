"""What to keep for backward when some operators are to be recomputed: a minimum cut.

Dropping the result of a matched operator frees nothing if its inputs must be kept instead. So the choice is made for
all matched operators of a layer together, as a minimum cut over its values:

- a value that is alive in backward anyway costs nothing: held by the model, or saved for the backward of some operator
  and made by one that is not matched;
- any other value costs its bytes, whether it is a matched result that stays, or something that would not be kept
  without recomputation (the layer's input is such a value unless something saves it);
- a value can be computed again if its operator may be re-run: matrix products, attention and collectives only where
  they are matched by name, those that must run once never, everything else always;
- an operator that a pattern of the exclude list names is not matched, does not run again, and what backward needs of
  its results stays kept, also under full recompute.

Every matched result must be kept or follow from what is kept. Keeping all of them is one of the cuts, so recomputation
never costs memory; among the cuts of fewest bytes the one nearest to the results is taken, which re-runs the fewest
operators. Bytes freed by two patterns together are therefore not the sum of what each frees alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final, cast

from evenload.plan.operators import Graph, Operator
from evenload.plan.patterns import Match, match_all
from evenload.plan.policy import LayerPolicy
from evenload.units import human_bytes

_LAYOUT: Final = frozenset(
    {
        *("wait_tensor", "cat", "concat", "chunk", "split", "contiguous", "clone", "reshape", "view", "transpose"),
        *("permute", "flatten", "unflatten", "slice", "narrow", "pad"),
    }
)
"""Operators that only move data: behind a collective they belong to it, for backward may save their result instead."""

_Node = tuple[str, str]
"""A value, before or after the edge that carries its bytes."""
_SOURCE: Final[_Node] = ("", "source")
_SINK: Final[_Node] = ("", "sink")


@dataclass(frozen=True, kw_only=True, slots=True)
class Declined:
    """A pattern that hits operators of the layer, but frees nothing."""

    pattern: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What one layer keeps, and what it computes again, under one policy. Values are in the graph's order."""

    kept: tuple[str, ...]
    """Everything that forward leaves for backward, `extra` included, as `Graph.kept` counts it."""
    dropped: tuple[str, ...]
    """Values that backward needs and that are computed again."""
    extra: tuple[str, ...]
    """Values that are kept only because something is computed again from them."""
    rerun: tuple[int, ...]
    """Operators that run again in backward, as ascending positions in `Graph.operators`."""
    kept_bytes: int
    freed: int
    """Bytes kept without recomputation minus `kept_bytes`. Negative only under full recompute of a layer that keeps
    less than its input anyway."""
    declined: tuple[Declined, ...] = ()


def decide(graph: Graph, policy: LayerPolicy, *, mp_comm: bool = True) -> Decision:
    """What a layer keeps under a policy.

    Full recompute keeps the layer's input alone and runs the layer again up to the last value that backward needs, as
    `torch.utils.checkpoint` does with its early stop. Where it keeps the results of collectives, it runs only what
    follows from them and from the input.

    Args:
        graph: the layer.
        policy: what is recomputed on it.
        mp_comm: full recompute runs collectives again; if False their results are kept where they are needed.

    Raises:
        EvenloadError: a pattern cannot be read.
    """
    excluded = _hits(graph, policy.select_exclude) | collectives(graph, _hits(graph, policy.comm_exclude))
    if policy.full:
        return _full(graph, mp_comm=mp_comm, excluded=excluded)
    select, comm = match_all(policy.select, graph), match_all(policy.comm, graph)
    behind = [collectives(graph, hit.indices) for hit in comm]
    matched = frozenset(i for hit in select for i in hit.indices) | frozenset(i for some in behind for i in some)
    decision = cut(graph, matched - excluded, excluded=excluded)
    declined = [_declined(graph, hit, frozenset(hit.indices), excluded, decision) for hit in select]
    declined += [_declined(graph, hit, some, excluded, decision) for hit, some in zip(comm, behind, strict=True)]
    return replace(decision, declined=tuple(one for one in declined if one is not None))


def _hits(graph: Graph, patterns: Collection[str]) -> frozenset[int]:
    return frozenset(i for hit in match_all(patterns, graph) for i in hit.indices)


def collectives(graph: Graph, matched: Iterable[int]) -> frozenset[int]:
    r"""The collectives behind matched operators, with the operators that only lay out what arrives.

    A communication pattern names the operator whose result is sent (MindFormers: `.*\.norm`), or the collective
    itself.

    Args:
        graph: the layer.
        matched: positions of the operators that a communication pattern hits.
    """
    hit = frozenset(matched)
    sent = {name for i in hit if not graph.operators[i].comm for name in graph.operators[i].outputs}
    found: set[int] = set()
    arrived: set[str] = set()
    for i, operator in enumerate(graph.operators):
        read = [name for name in operator.inputs if not graph.by_name[name].held]
        if operator.comm and (i in hit or sent.intersection(read)):
            found.add(i)
            arrived.update(operator.outputs)
        elif _lays_out(operator) and read:
            if arrived.issuperset(read):
                found.add(i)
                arrived.update(operator.outputs)
            elif sent.issuperset(read):
                sent.update(operator.outputs)
    return frozenset(found)


def cut(graph: Graph, matched: Collection[int], *, excluded: Collection[int] = ()) -> Decision:
    """What to keep when the results of matched operators are to be computed again.

    Args:
        graph: the layer.
        matched: positions of the operators; they may be re-run whatever they are, unless they must run once.
        excluded: positions of operators that may not be re-run.
    """
    saved = _saved(graph)
    made = {name for i in matched for name in graph.operators[i].outputs}
    targets = (saved & made) - {graph.output}  # the next layer holds the output: dropping it frees nothing
    targets -= _escaping(graph)
    allowed = frozenset(
        i
        for i, op in enumerate(graph.operators)
        if (i in matched or not (op.heavy or op.comm)) and not op.once and i not in excluded
    )
    chosen, again = _minimum_cut(graph, targets, free=saved - targets, allowed=allowed)
    return _decision(graph, (set(graph.kept()) - targets) | chosen, again)


def _full(graph: Graph, *, mp_comm: bool, excluded: Collection[int] = ()) -> Decision:
    stay = _escaping(graph) | {name for i in excluded for name in graph.operators[i].outputs}
    targets = _saved(graph) - {graph.input} - stay
    allowed = frozenset(
        i for i, op in enumerate(graph.operators) if (mp_comm or not op.comm) and not op.once and i not in excluded
    )
    still = _saved(graph) & stay
    chosen, again = _minimum_cut(graph, targets, free={graph.input} | still, allowed=allowed)
    first: set[str] = set() if graph.by_name[graph.input].held else {graph.input}
    decision = _decision(graph, chosen | first | still, again)
    if not mp_comm or excluded or not decision.rerun:
        return decision
    return replace(decision, rerun=tuple(range(decision.rerun[-1] + 1)))


def _escaping(graph: Graph) -> set[str]:
    return {value.name for value in graph.values if value.escapes}


def _saved(graph: Graph) -> set[str]:
    """Values that some operator's backward needs, held ones left out."""
    return {name for operator in graph.operators for name in operator.saves if not graph.by_name[name].held}


def _decision(graph: Graph, kept: set[str], again: set[str]) -> Decision:
    saved = _saved(graph)
    kept_bytes = graph.total(kept)
    order = [value.name for value in graph.values]
    return Decision(
        kept=tuple(name for name in order if name in kept),
        dropped=tuple(name for name in order if name in again and name in saved),
        extra=tuple(name for name in order if name in kept - saved),
        rerun=tuple(sorted({graph.producers[name] for name in again})),
        kept_bytes=kept_bytes,
        freed=graph.kept_bytes - kept_bytes,
    )


def _minimum_cut(
    graph: Graph, targets: Collection[str], *, free: Collection[str], allowed: Collection[int]
) -> tuple[set[str], set[str]]:
    """(Values to keep, values to compute again) so that every target is there in backward.

    A value is two nodes with its bytes between them; an operator that may be re-run joins its inputs to its outputs
    without limit; all else comes from the source, so that it must be kept. Free values are left out; no bytes pay for
    what cannot be kept.
    """
    if not targets:
        return set(), set()
    free = {*free, *(value.name for value in graph.values if value.held)}
    edges: list[tuple[_Node, _Node, float]] = []
    for value in graph.values:
        if value.name in free:
            continue
        before, after = (value.name, "before"), (value.name, "after")
        edges.append((before, after, value.nbytes if value.keepable or value.name in targets else inf))
        producer = graph.producers.get(value.name)
        if producer is None or producer not in allowed:
            edges.append((_SOURCE, before, inf))
        else:
            edges += [((name, "after"), before, inf) for name in graph.operators[producer].inputs if name not in free]
    edges += [((name, "after"), _SINK, inf) for name in targets]
    near = _sink_side(edges)
    again = {name for name, side in near if side == "before"}
    return {name for name, side in near if side == "after" and name not in again}, again


def _sink_side(edges: Iterable[tuple[_Node, _Node, float]]) -> set[_Node]:
    """The sink's side of the minimum cut that is nearest to the sink; the sink itself left out."""
    import networkx as nx  # noqa: PLC0415  # slow to import, and needed only here

    library = cast("Any", nx)  # its types know neither node nor edge
    network = library.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    for start, end, capacity in edges:
        if capacity == inf:
            network.add_edge(start, end)  # without a capacity: no limit, and sums of whole bytes stay exact
        else:
            network.add_edge(start, end, capacity=capacity)
    # networkx leaves on the sink's side only what can still reach the sink
    _, (_, near) = library.minimum_cut(network, _SOURCE, _SINK)
    return set(near) - {_SINK}


def _lays_out(operator: Operator) -> bool:
    return not operator.heavy and not operator.comm and bool(_LAYOUT & {operator.name, operator.aten})


def _declined(
    graph: Graph, hit: Match, found: frozenset[int], excluded: frozenset[int], decision: Decision
) -> Declined | None:
    """Why a pattern that hits something frees nothing; None if it frees something or hits nothing."""
    if not hit:
        return None
    indices = found - excluded
    results = {name for i in indices for name in graph.operators[i].outputs}
    if results & set(decision.dropped):
        return None
    saved = _saved(graph) & results
    leaving = {graph.output} | _escaping(graph)
    if not indices:
        reason = "no collective sends what it makes" if not found else "an exclude pattern names all that it hits"
    elif not saved:
        reason = "backward needs nothing of what it makes"
    elif saved == {graph.output}:
        reason = "it makes the layer's output, which the next layer holds"
    elif saved <= leaving:
        reason = "what it makes leaves the layer and is held there"
    else:
        reason = _no_gain(graph, saved - leaving)
    return Declined(pattern=hit.pattern, reason=reason)


def _no_gain(graph: Graph, results: set[str]) -> str:
    first = graph.operators[min(graph.producers[name] for name in results)]
    who = (
        f"{first.label} keeps its own result" if results & set(first.saves) else f"the result of {first.label} is kept"
    )
    size = human_bytes(graph.total(results))
    return f"saves nothing: {who} ({size}), and what it would be computed from is as large and not kept otherwise"
