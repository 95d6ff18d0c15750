"""What to do with every tensor that autograd saves in a layer: keep it, or drop it and compute it again.

A plan is made once from a recording and followed by every forward of the layer that is like the recorded one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, cast

import torch

from evenload.plan.mincut import Decision, decide
from evenload.plan.operators import Graph
from evenload.plan.policy import LayerPolicy
from evenload.recompute.aten import collective, reads_only_shape
from evenload.recompute.geometry import Ref
from evenload.recompute.layer_graph import LayerGraph, label, layer_graph, within_reach
from evenload.recompute.program import Blank, Call, Draw, Leaf, Program
from evenload.recompute.values import Recording, Saved, Source, Step, Value
from evenload.recompute.wrappers import Wrapping

Path = Literal["hooks", "mode"]
"""How later forwards are followed: by saved-tensor hooks alone, or by a dispatch mode besides."""

_PREFERRED: Final = {kind: rank for rank, kind in enumerate(("parameter", "argument", "pack", "module", "step"))}
_WORTH: Final = 1.1
"""A dispatch mode must free so much more than hooks alone: it costs some ten microseconds an operator."""


class Drop(NamedTuple):
    """How to get a dropped tensor back."""

    at: Ref
    wrappings: tuple[Wrapping, ...]


class Save(NamedTuple):
    """One tensor that autograd saves: how to recognise it, and what becomes of it."""

    kind: type
    size: tuple[int, ...]
    stride: tuple[int, ...] | None
    """None: it is no strided memory."""
    dtype: torch.dtype
    drop: Drop | None
    """None: it is kept."""
    fills: tuple[int, ...]
    """Leaves that are taken from it."""
    label: str
    """Who made it, for messages."""
    at: int | None
    """Value that it shows; None: it is no strided memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPlan:
    """The plan of one layer under one policy, for forwards like the recorded one."""

    path: Path
    why: str
    """Why this path."""
    saves: tuple[Save, ...]
    open_end: bool
    """What is saved after these is kept: there the layer's code depends on data."""
    program: Program
    from_arguments: tuple[tuple[int, int], ...]
    """(leaf, position of the tensor argument)."""
    from_parameters: tuple[tuple[int, str], ...]
    """(leaf, name of the parameter or buffer)."""
    from_modules: Mapping[tuple[str, str], tuple[tuple[int, int, int], ...]]
    """(module, "in" or "out") -> (leaf, call, position)."""
    from_steps: Mapping[int, tuple[tuple[int, int], ...]]
    """Step -> (leaf, result), of the mode path."""
    from_generators: Mapping[int, int]
    """Step that draws -> leaf, of the mode path."""
    trace: tuple[Step, ...]
    """All operators in order."""
    outside: Mapping[int, Source | None]
    """Values that are there before the layer runs: which argument or parameter each is, None where it is neither."""
    graph: LayerGraph
    """What the decision was made on."""
    everything: Graph
    """All operators of the layer, also those where its code depends on data."""
    decision: Decision
    given: tuple[tuple[int, int], ...]
    """(leaf, position of the tensor argument) of arguments that nothing keeps otherwise."""
    keeps_output: bool
    """What the layer returns is counted among what it keeps. Where its code depends on data, the graph ends before."""

    @property
    def drops(self) -> bool:
        """Whether anything is dropped at all."""
        return bool(self.program.saves)


def make_plan(recording: Recording, policy: LayerPolicy, *, mp_comm: bool = True) -> LayerPlan:
    """Choose what to keep, and how to follow later forwards.

    Hooks alone are enough unless the best choice keeps a value that no hook can reach, draws random numbers again, or
    drops what is saved where the layer's code depends on data. Then a dispatch mode follows, which costs time on every
    operator, if it frees enough more.
    """
    everything = layer_graph(recording, hooks_only=False)
    best = _decided(everything.graph, policy, mp_comm)
    reachable = layer_graph(recording, hooks_only=True)
    within = _decided(reachable.graph, policy, mp_comm)
    if best.freed <= _WORTH * within.freed or best.freed <= 0:
        return _Builder(recording, reachable, everything.graph, within, hooks_only=True).build("hooks", "")
    if any(recording.steps[everything.steps[number]].random is not None for number in best.rerun):
        why = "random numbers are drawn again"
    elif recording.reads_data:
        why = "its code depends on data"
    else:
        why = "the best choice keeps what passes only inside a module"
    return _Builder(recording, everything, everything.graph, best, hooks_only=False).build("mode", why)


def _decided(graph: Graph, policy: LayerPolicy, mp_comm: bool) -> Decision:
    """The choice for a layer. What nothing is computed from is not kept, though it be the input."""
    decision = _leaving_output(graph, policy, mp_comm) if policy.full else decide(graph, policy, mp_comm=mp_comm)
    if not decision.dropped:
        return replace(decision, kept=graph.kept(), extra=(), kept_bytes=graph.kept_bytes, freed=0)
    needless = set(decision.extra) - _starts(graph, decision)
    spared = graph.total(needless)
    return replace(
        decision,
        kept=tuple(name for name in decision.kept if name not in needless),
        extra=tuple(name for name in decision.extra if name not in needless),
        kept_bytes=decision.kept_bytes - spared,
        freed=decision.freed + spared,
    )


def _leaving_output(graph: Graph, policy: LayerPolicy, mp_comm: bool) -> Decision:
    """The choice for a whole layer, whose output stays: what follows the layer may hold it, which nobody here sees.

    Where the next layer counts it, as its input, it is not counted here, as without recomputation.
    """
    leaving = {graph.output} - {graph.input}
    values = tuple(replace(value, escapes=True) if value.name in leaving else value for value in graph.values)
    decision = decide(replace(graph, values=values), policy, mp_comm=mp_comm)
    counted_next = leaving.intersection(decision.kept).difference(graph.kept())
    spared = graph.total(counted_next)
    return replace(
        decision,
        kept=tuple(name for name in decision.kept if name not in counted_next),
        kept_bytes=decision.kept_bytes - spared,
        freed=decision.freed + spared,
    )


def _starts(graph: Graph, decision: Decision) -> set[str]:
    """The kept values that dropped ones are computed from."""
    kept, dropped = set(decision.kept), set(decision.dropped)
    todo, seen, found = list(decision.dropped), set(decision.dropped), set[str]()
    while todo:
        name = todo.pop()
        if name not in graph.producers or (name in kept and name not in dropped):
            found.add(name)
        else:
            inputs = graph.operators[graph.producers[name]].inputs
            todo += [one for one in inputs if one not in seen]
            seen.update(inputs)
    return found


class _Builder:
    """Turns a decision about a graph into a plan."""

    def __init__(
        self, recording: Recording, view: LayerGraph, everything: Graph, decision: Decision, *, hooks_only: bool
    ) -> None:
        self._recording = recording
        self._view = view
        self._everything = everything
        self._decision = decision
        self._hooks_only = hooks_only
        self._saves = recording.saved[: recording.sure_saves] if hooks_only else recording.saved
        self._dropped = {view.numbers[name] for name in decision.dropped}
        self._kept = {view.numbers[name] for name in decision.kept if name in view.numbers}
        self._saved = {at.value for at in recording.needed(len(self._saves))}

    def build(self, path: Path, why: str) -> LayerPlan:
        steps, values = self._trace_back()
        leaves = tuple(map(self._leaf, values))
        random = [step for step in steps if step.generator is not None]
        saved = [at.value for at in self._recording.needed(len(self._saves))]
        program = Program(
            leaves=leaves,
            draws=tuple(Draw(step=step.number, label=label(step)) for step in random),
            calls=tuple(map(self._call, steps)),
            saves=Counter(value for value in saved if value in self._dropped),
        )
        return LayerPlan(
            path=path,
            why=why,
            saves=tuple(self._save(one, leaves) for one in self._saves),
            open_end=self._hooks_only and self._recording.reads_data,
            program=program,
            from_arguments=tuple((leaf, at[0]) for leaf, at in _sources(leaves, "argument")),
            from_parameters=tuple((leaf, at[0]) for leaf, at in _sources(leaves, "parameter")),
            from_modules=_by_module(leaves),
            from_steps=_by_step(leaves),
            from_generators={step.number: at for at, step in enumerate(random, len(leaves))},
            trace=tuple(self._recording.steps),
            outside={value.number: _known(value) for value in self._recording.values if value.step is None},
            graph=self._view,
            everything=self._everything,
            given=tuple(
                (leaf, at[0]) for leaf, at in _sources(leaves, "argument") if leaves[leaf].label in self._decision.extra
            ),
            keeps_output=self._view.graph.output in {*self._decision.kept} - {self._view.graph.input},
            decision=self._decision,
        )

    def _trace_back(self) -> tuple[list[Step], list[int]]:
        """The steps that make the dropped values, and the values that they start from, both in order."""
        steps: dict[int, Step] = {}
        leaves: list[int] = []
        todo = list(self._dropped)
        seen = set(todo)
        while todo:
            value = self._recording.values[todo.pop()]
            if value.step is None or (value.number not in self._dropped and self._stays(value.number)):
                leaves.append(value.number)
            elif value.step not in steps:
                step = steps[value.step] = self._recording.steps[value.step]
                needs = _needs(step)
                todo += [needed for needed in needs if needed not in seen]
                seen.update(needs)
        return [steps[number] for number in sorted(steps)], sorted(leaves)

    def _stays(self, value: int) -> bool:
        """Whether a value is there in backward without being computed again."""
        return value in self._kept or value in self._saved

    def _leaf(self, number: int) -> Leaf:
        value = self._recording.values[number]
        reachable = [one for one in value.sightings if not self._hooks_only or within_reach(one.source)]
        best = min(reachable, key=lambda one: _PREFERRED[one.source.kind])
        return Leaf(
            value=number,
            source=best.source,
            captured=best.at,
            anchor=value.anchor,
            label=self._view.names[number],
        )

    def _call(self, step: Step) -> Call:
        writes = tuple((write.before, write.after) for write in step.writes)
        values = self._recording.values
        blank = reads_only_shape(step.func)
        return Call(
            step=step.number,
            label=label(step),
            func=step.func,
            args=tuple(self._argument(one, blank) for one in step.args),
            kwargs={name: self._argument(one, blank) for name, one in step.kwargs.items()},
            needs=_needs(step),
            writes=writes,
            results=tuple(
                (number, value, values[value].anchor) for number, value in enumerate(step.made) if value is not None
            ),
            generator=step.generator,
            collective=collective(step.func) is not None,
        )

    def _argument(self, argument: Any, blank: bool) -> Any:
        if isinstance(argument, Ref):
            if blank:
                device = self._recording.values[argument.value].device
                return Blank(argument.size, argument.stride, argument.dtype, device)
            return argument
        if isinstance(argument, list):
            return [self._argument(one, blank) for one in cast("list[Any]", argument)]
        return argument

    def _save(self, saved: Saved, leaves: tuple[Leaf, ...]) -> Save:
        at = saved.at
        dropped = saved.alive and at is not None and at.value in self._dropped
        return Save(
            kind=saved.kind,
            size=saved.size,
            stride=saved.stride,
            dtype=saved.dtype,
            drop=Drop(at, saved.wrappings) if dropped and at is not None else None,
            fills=tuple(leaf for leaf, one in _sources(leaves, "pack") if one == (saved.number,)),
            label=self._view.names[at.value] if at is not None else "a tensor",
            at=at.value if at is not None else None,
        )


def _needs(step: Step) -> tuple[int, ...]:
    """Values that a step reads or writes over."""
    return tuple(dict.fromkeys((*step.reads, *(write.before for write in step.writes))))


def _known(value: Value) -> Source | None:
    """The argument or parameter that a value from outside is."""
    known = (sighting.source for sighting in value.sightings if sighting.source.kind in {"argument", "parameter"})
    return next(known, None)


def _sources(leaves: tuple[Leaf, ...], kind: str) -> list[tuple[int, tuple[Any, ...]]]:
    """(position of the leaf, where it is) of the leaves that come from one kind of source."""
    return [(at, leaf.source.at) for at, leaf in enumerate(leaves) if leaf.source.kind == kind]


def _by_module(leaves: tuple[Leaf, ...]) -> dict[tuple[str, str], tuple[tuple[int, int, int], ...]]:
    found: dict[tuple[str, str], tuple[tuple[int, int, int], ...]] = {}
    for leaf, (path, call, end, position) in _sources(leaves, "module"):
        found[path, end] = (*found.get((path, end), ()), (leaf, call, position))
    return found


def _by_step(leaves: tuple[Leaf, ...]) -> dict[int, tuple[tuple[int, int], ...]]:
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    for leaf, (step, result) in _sources(leaves, "step"):
        found[step] = (*found.get(step, ()), (leaf, result))
    return found
