"""A recording as the graph that patterns are matched on and that the minimum cut works on."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from evenload.plan.operators import Graph, Operator
from evenload.plan.operators import Value as GraphValue
from evenload.recompute.aten import collective, is_heavy
from evenload.recompute.geometry import Ref
from evenload.recompute.recording import refs
from evenload.recompute.values import Recording, Source, Step, Value

WITHIN_REACH: Final = frozenset({"argument", "parameter", "pack", "module"})
"""Sources that hooks can take a tensor from; the rest passes inside the layer, where only a dispatch mode sees it."""
_NO_INPUT: Final = "input"
_LOOKUPS: Final = frozenset({"embedding", "gather", "index", "index_select", "take_along_dim"})
"""Operators that read of a table no more than what they return."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGraph:
    """A graph, and which of its names stands for what in the recording."""

    graph: Graph
    names: tuple[str, ...]
    """Value of the recording -> its name."""
    numbers: dict[str, int]
    """Name -> value of the recording."""
    steps: tuple[int, ...]
    """Operator of the graph -> step of the recording."""


def layer_graph(recording: Recording, *, hooks_only: bool) -> LayerGraph:
    """The operators of a recorded layer.

    Args:
        recording: one forward of it.
        hooks_only: what only a dispatch mode could keep counts as not keepable, and the graph ends where the layer's
            code begins to depend on data.
    """
    names = _names(recording)
    sure_steps, sure_saves = len(recording.steps), len(recording.saved)
    if hooks_only:
        sure_steps, sure_saves = recording.sure_steps, recording.sure_saves
    saves = _saves(recording, sure_steps, sure_saves)
    shown = [step for step in recording.steps[:sure_steps] if step.results or step.number in saves]
    output = recording.outputs[0] if recording.outputs else recording.input
    values = [
        _value(recording, value, name, hooks_only)
        for value, name in zip(recording.values, names, strict=True)
        if value.step is None or value.step < sure_steps
    ]
    values += [_generator(step, hooks_only) for step in shown if step.random is not None]
    incoming = names[recording.input] if recording.input is not None else _NO_INPUT
    if recording.input is None:
        values.append(GraphValue(name=_NO_INPUT, nbytes=0, held=True))
    graph = Graph(
        values=tuple(values),
        operators=tuple(_operator(recording, step, names, saves.get(step.number, ())) for step in shown),
        input=incoming,
        output=names[output] if output is not None and _made_before(recording, output, sure_steps) else incoming,
    )
    return LayerGraph(
        graph=graph,
        names=names,
        numbers={name: number for number, name in enumerate(names)},
        steps=tuple(step.number for step in shown),
    )


def _names(recording: Recording) -> tuple[str, ...]:
    """A name for every value that is the same in every recording of an equal layer."""
    seen: Counter[str] = Counter()
    names: list[str] = []
    for value in recording.values:
        name = _name(recording, value)
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return tuple(names)


def _name(recording: Recording, value: Value) -> str:
    if value.step is not None:
        return label(recording.steps[value.step])
    for sighting in value.sightings:
        source = sighting.source
        if source.kind == "parameter":
            return source.at[0]
        if source.kind == "argument":
            return _NO_INPUT if value.number == recording.input else f"argument.{source.at[0]}"
    return "outside"


def label(step: Step) -> str:
    """How an operator is named to a user."""
    return Operator(path=step.path, name=step.name or step.aten, aten=step.aten).label


def _made_before(recording: Recording, value: int, step: int) -> bool:
    made = recording.values[value].step
    return made is None or made < step


def _saves(recording: Recording, steps: int, count: int) -> dict[int, tuple[int, ...]]:
    """Step -> values that its backward needs.

    The first step that runs for an autograd node is the node's; a custom function may save what one of its later steps
    makes, which then counts as that step's. A node that clones what it is about to write over has a number of its own,
    before that of its steps.
    """
    first: dict[int, int] = {}
    for step in recording.steps:
        first.setdefault(step.node, step.number)
    nodes = sorted(first)
    last = len(recording.steps[:steps]) - 1
    found: dict[int, dict[int, None]] = {}
    for saved in recording.saved[:count]:
        if saved.alive and saved.at is not None:
            maker = recording.values[saved.at.value].step
            following = bisect_left(nodes, saved.node)
            owner = min(first[nodes[following]] if following < len(nodes) else last, last)
            if last >= 0:
                found.setdefault(max(owner, maker or 0), {})[saved.at.value] = None
    return {step: tuple(values) for step, values in found.items()}


def _value(recording: Recording, value: Value, name: str, hooks_only: bool) -> GraphValue:
    # what comes from an object that nobody looks into (a cache, a closure) was seen nowhere
    reachable = any(not hooks_only or within_reach(sighting.source) for sighting in value.sightings)
    held = value.held and reachable
    outlives = value.number in recording.outputs[1:] or value.number in _held_by_others(recording)
    if hooks_only:  # a tensor that is saved where the code depends on data cannot be told from others: it is kept
        outlives |= value.number in _late(recording)
    return GraphValue(
        name=name,
        nbytes=value.nbytes,
        held=held,
        differentiable=value.differentiable,
        given=value.step is None and not held and value.number != recording.input,
        keepable=reachable and not value.overwritten,
        escapes=value.step is not None and outlives,
    )


def _held_by_others(recording: Recording) -> set[int]:
    """Values in the memory of saved tensors that are more than strided memory, which always stay."""
    return {number for saved in recording.saved if saved.alive for number in saved.holds}


def _late(recording: Recording) -> set[int]:
    """Values that are saved where the code depends on data."""
    late = recording.saved[recording.sure_saves :]
    return {saved.at.value for saved in late if saved.alive and saved.at is not None}


def within_reach(source: Source) -> bool:
    """Whether hooks can take a tensor there."""
    return source.kind in WITHIN_REACH and not source.late


def _generator_name(step: Step) -> str:
    return f"generator before operator {step.number}"


def _generator(step: Step, hooks_only: bool) -> GraphValue:
    """The state of a generator, without which a call cannot draw the same numbers again."""
    nbytes = step.random.nbytes if step.random is not None else 0
    return GraphValue(name=_generator_name(step), nbytes=nbytes, given=True, keepable=not hooks_only)


def _operator(recording: Recording, step: Step, names: Sequence[str], saves: Sequence[int]) -> Operator:
    values = recording.values
    comm = collective(step.func)
    reads = dict.fromkeys((*step.reads, *(write.before for write in step.writes)))
    parts = _parts(recording, step, names, reads)
    name = step.name or step.aten
    return Operator(
        path=step.path,
        name=name,
        aten="" if step.aten == name else step.aten,
        inputs=(
            *(names[number] for number in reads),
            *((_generator_name(step),) if step.random is not None else ()),
        ),
        outputs=tuple(names[number] for number in step.results if not values[number].held),
        parts=parts,
        saves=tuple(names[number] for number in saves),
        flops=step.flops,
        moved=_moved(recording, step, {number: dict(parts).get(names[number]) for number in reads}),
        comm=comm,
        comm_bytes=_sent(recording, step) if comm else 0.0,
        heavy=is_heavy(step.func) or step.random is not None,
        once=step.once,
        weight_bytes=sum(values[number].nbytes for number in reads if values[number].trainable),
    )


def _moved(recording: Recording, step: Step, reads: Mapping[int, int | None]) -> float:
    """Bytes that a call reads and writes: of what it reads in part the part, of a table that it looks up the rows."""
    values = recording.values
    written = sum(values[number].nbytes for number in step.results)
    read = [values[number].nbytes if part is None else part for number, part in reads.items()]
    if step.aten in _LOOKUPS:
        read = [min(nbytes, written) for nbytes in read]
    return float(written + sum(read))


def _parts(
    recording: Recording, step: Step, names: Sequence[str], reads: dict[int, None]
) -> tuple[tuple[str, int], ...]:
    """Inputs that are read in part only."""
    most: dict[int, int] = {}

    def note(at: Ref) -> None:
        most[at.value] = max(most.get(at.value, 0), prod(at.size) * at.dtype.itemsize)

    refs((step.args, step.kwargs), note)
    nbytes = {number: recording.values[number].nbytes for number in reads}
    return tuple((names[number], most[number]) for number in reads if number in most and most[number] < nbytes[number])


def _sent(recording: Recording, step: Step) -> float:
    """Bytes that one rank sends in a collective, by ring algorithms: (n - 1) / n of the whole, twice to reduce all."""
    sizes = [recording.values[number].nbytes for number in (*step.reads, *step.results)]
    if not sizes or not min(sizes):
        return 0.0
    given = [one for one in step.args if isinstance(one, int) and not isinstance(one, bool)]
    ranks = given[0] if given else max(2, max(sizes) // min(sizes))
    whole = max(sizes) * (ranks - 1) / ranks
    return 2 * whole if collective(step.func) == "all_reduce" else whole
