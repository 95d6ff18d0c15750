"""What recomputation does to a model: for every kind of layer what is dropped, what is kept instead, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from evenload.plan.layer_ranges import layer_ranges
from evenload.plan.mincut import Decision, collectives
from evenload.plan.operators import Graph
from evenload.plan.patterns import Match, coverage, match_all
from evenload.recompute.layer_plan import LayerPlan
from evenload.recompute.state import WAYS, LayerState, Served
from evenload.units import human_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """Operators of one name that a pattern hits."""

    operator: str
    """`module.path.operator`, with the aten name where it differs."""
    count: int
    nbytes: int
    """Bytes of their results that are dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PatternReport:
    """What one pattern does to a layer."""

    pattern: str
    hits: tuple[Hit, ...]
    dropped: int
    """Bytes of the results that are dropped. What is kept instead must be subtracted: see `KindReport.freed`."""
    declined: str | None = None
    """Why it frees nothing."""
    nearest: str | None = None
    """Where it hits nothing: what was meant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KindReport:
    """Layers that do the same under the same policy."""

    kind: str
    """Class of the layers."""
    layers: tuple[str, ...]
    """Their paths in the model."""
    numbers: frozenset[int]
    """Their numbers, counted from 0."""
    before: int
    """Bytes that one layer keeps for backward without recomputation, parameters left out."""
    kept: int
    """Bytes that it keeps with recomputation."""
    patterns: tuple[PatternReport, ...]
    kept_instead: Mapping[str, int]
    """Tensors that are kept only because others are computed again from them, in bytes."""
    path: str
    """How forwards are followed: `hooks`, `mode`, `checkpoint`, or `not run yet`."""
    why: str
    """Why this path, where it is not hooks."""
    served: Mapping[Served, int]
    """Forwards of all these layers by how they were served."""
    why_kept: str | None = None
    """Why the last forward that left its plan did."""
    notices: tuple[str, ...] = ()
    graph: Graph | None = None
    """The operators of one such layer, for a profile."""

    @property
    def freed(self) -> int:
        """Bytes that one layer keeps less."""
        return self.before - self.kept

    def __str__(self) -> str:
        many = f"{self.kind}, {len(self.layers)} layers ({layer_ranges(self.numbers)})"
        if self.path == "not run yet":
            return f"{many}: not run yet"
        if self.path == "checkpoint":
            return "\n".join([f"{many}: run again as a whole in backward, by torch.utils.checkpoint", *self._ends()])
        share = f", {100 * self.freed / self.before:.0f} %" if self.before else ""
        head = (
            f"{many}: each keeps {human_bytes(self.kept)} instead of {human_bytes(self.before)} "
            f"(frees {human_bytes(self.freed)}{share})"
        )
        lines = [line for one in self.patterns for line in _pattern_lines(one)]
        instead = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in self.kept_instead.items() if nbytes)
        if instead:
            lines.append(f"  kept instead: {instead}")
        return "\n".join([head, *lines, *self._ends()])

    def _ends(self) -> list[str]:
        served = ", ".join(f"{count} {name}" for name, count in self.served.items())
        why = f", because {self.why}" if self.why else ""
        lines = [f"  followed by {self.path}{why}; forwards so far: {served or 'none'}"]
        if self.why_kept:
            lines.append(f"  kept everything when {self.why_kept}")
        return lines + [f"  {notice}" for notice in self.notices]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What recomputation does to a model."""

    kinds: tuple[KindReport, ...]
    shared: int = 0
    """Bytes that several layers keep together, such as one attention mask, which `kinds` count for every layer."""
    notices: tuple[str, ...] = field(default=())

    @property
    def before(self) -> int:
        """Bytes that all layers keep for one micro-batch without recomputation."""
        return sum(kind.before * len(kind.layers) for kind in self.kinds)

    @property
    def kept(self) -> int:
        """Bytes that they keep with recomputation."""
        return sum(kind.kept * len(kind.layers) for kind in self.kinds) - self.shared

    @property
    def freed(self) -> int:
        """Bytes that they keep less."""
        return self.before - self.kept

    def __str__(self) -> str:
        total = f"all layers keep {human_bytes(self.kept)} instead of {human_bytes(self.before)} a micro-batch"
        return "\n".join([*map(str, self.kinds), total, *self.notices])


def make_report(states: Sequence[LayerState]) -> Report:
    """The report on layers as they are now."""
    groups: list[list[int]] = []
    for number, state in enumerate(states):
        for group in groups:
            if _alike(states[group[0]], state):
                group.append(number)
                break
        else:
            groups.append([number])
    kinds = tuple(_kind([states[number] for number in group], group) for group in groups)
    return Report(kinds=kinds, shared=_shared(states))


def _alike(one: LayerState, other: LayerState) -> bool:
    if type(one.layer) is not type(other.layer) or one.policy != other.policy or one.whole != other.whole:
        return False
    if one.last is None or other.last is None:
        return one.last is other.last
    return (one.last.path, one.last.decision) == (other.last.path, other.last.decision) and (
        one.last.everything == other.last.everything
    )


def _kind(states: Sequence[LayerState], numbers: Sequence[int]) -> KindReport:
    first, plan = states[0], states[0].last
    counts: Counter[Served] = Counter()
    for state in states:
        counts.update(state.served)
    served: dict[Served, int] = {way: counts[way] for way in WAYS if counts[way]}
    path = plan.path if plan is not None else "checkpoint" if first.whole and served else "not run yet"
    graph = plan.everything if plan is not None else None
    return KindReport(
        kind=type(first.layer).__name__,
        layers=tuple(state.name for state in states),
        numbers=frozenset(numbers),
        before=graph.kept_bytes if graph is not None else 0,
        kept=graph.kept_bytes - plan.decision.freed if graph is not None and plan is not None else 0,
        patterns=_patterns(first, plan) if plan is not None else (),
        kept_instead=_instead(plan) if plan is not None else {},
        path=path,
        why=plan.why if plan is not None else "",
        served=served,
        why_kept=next((state.why_kept for state in states if state.why_kept), None),
        notices=tuple(dict.fromkeys(notice for state in states for notice in state.notices())),
        graph=graph,
    )


def _patterns(state: LayerState, plan: LayerPlan) -> tuple[PatternReport, ...]:
    graph, decision = plan.everything, plan.decision
    declined = {one.pattern: one.reason for one in decision.declined}
    select = match_all(state.policy.select, graph)
    rows = [_pattern(graph, decision, hit, hit.indices, declined) for hit in select]
    comm = match_all(state.policy.comm, graph)
    return (*rows, *(_pattern(graph, decision, hit, sorted(collectives(graph, hit.indices)), declined) for hit in comm))


def _pattern(
    graph: Graph, decision: Decision, hit: Match, indices: Iterable[int], declined: Mapping[str, str]
) -> PatternReport:
    dropped = set(decision.dropped)
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for index in indices:
        operator = graph.operators[index]
        counts[operator.label] += 1
        sizes[operator.label] += graph.total(dropped.intersection(operator.outputs))
    return PatternReport(
        pattern=hit.pattern,
        hits=tuple(Hit(operator=label, count=count, nbytes=sizes[label]) for label, count in counts.items()),
        dropped=sum(sizes.values()),
        declined=declined.get(hit.pattern),
        nearest=None if hit else coverage(hit.pattern, [graph]).fix,
    )


def _instead(plan: LayerPlan) -> dict[str, int]:
    return {name: plan.graph.graph.nbytes(name) for name in plan.decision.extra}


def _shared(states: Sequence[LayerState]) -> int:
    """Bytes of arguments that several layers keep, beyond the first of them."""
    seen: set[int] = set()
    twice = 0
    for before, state in zip((None, *states), states, strict=False):
        if before is not None and before.output is not None:
            seen.add(before.output)
        for key, nbytes in state.given.values():
            twice += nbytes if key in seen else 0
            seen.add(key)
    return twice


def _pattern_lines(one: PatternReport) -> list[str]:
    if not one.hits and one.declined is None:
        return [f"  {one.pattern}: matches nothing" + (f"; {one.nearest}" if one.nearest else "")]
    if one.declined is not None:
        return [f"  {one.pattern}: {one.declined}"]
    lines = [f"  {one.pattern}: drops {human_bytes(one.dropped)}"]
    shown = [hit for hit in one.hits if hit.nbytes]
    for hit in shown:
        times = f" x{hit.count}" if hit.count > 1 else ""
        lines.append(f"    {hit.operator}{times}  {human_bytes(hit.nbytes)}")
    if len(shown) < len(one.hits):
        rest = sum(hit.count for hit in one.hits) - sum(hit.count for hit in shown)
        lines.append(f"    {rest} more, of which backward needs nothing or which stay kept")
    return lines
