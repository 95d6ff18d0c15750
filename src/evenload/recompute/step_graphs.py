"""The operators of a training step's forward, cut into what comes before the repeated layers, the layers, and the end.

One recording of the step gives the graphs of all parts, so that what passes between them is known: the hidden state
goes from part to part; anything else that a layer reads from outside (tables of positions, masks) is held by whoever
made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from evenload.errors import EvenloadError
from evenload.plan.operators import Graph, Operator
from evenload.plan.operators import Value as GraphValue
from evenload.recompute._torch_private import NO_TASK, graph_task
from evenload.recompute.layer_graph import LayerGraph, layer_graph
from evenload.recompute.recording import Recorder
from evenload.recompute.values import Recording
from evenload.recompute.wrappers import tensors
from evenload.record.pieces import below

_INPUT: Final = "input"


@dataclass(frozen=True, kw_only=True)
class StepGraphs:
    """The parts of one forward."""

    first: Graph
    """What comes before the layers."""
    layers: tuple[Graph, ...]
    """Every layer, with paths below it."""
    inside: tuple[int, ...]
    """Operators of every layer before it returns; those that follow belong to the model between two layers."""
    last: Graph
    """What comes after them, the loss included."""
    besides: tuple[str, ...] = ()
    """What layers read from others than the one before and get gradients for, beside their input."""

    @property
    def boundaries(self) -> tuple[GraphValue, ...]:
        """What goes into every layer, and what comes out of the last one."""
        into = [graph.by_name[graph.input] for graph in self.layers]
        return (*into, self.layers[-1].by_name[self.layers[-1].output])


def step_graphs(model: nn.Module, step: Callable[[], object], path: str, count: int) -> StepGraphs:
    """Record the forward of one step of a model.

    Args:
        model: the model, on fake tensors.
        step: runs forward and backward.
        path: module path of its list of layers.
        count: layers in the list.

    Raises:
        EvenloadError: the layers do not run once each, in order, from one to the next.
    """
    recorder = _StepRecorder({f"{below(path)}{number}": number for number in range(count)})
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        recorder.parameter(name, tensor)
    with ExitStack() as stack:
        stack.enter_context(recorder.path.follow(model, recorder.seen))
        stack.enter_context(saved_tensors_hooks(recorder.save, _unpack))
        stack.enter_context(recorder.calls)
        stack.enter_context(recorder)
        step()
    recording = recorder.finished()
    return _Cutter(layer_graph(recording, hooks_only=False), recording, recorder.visits, path, count).cut()


class _Slot:
    """What autograd holds in place of a tensor that it saves."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _unpack(slot: _Slot) -> torch.Tensor:
    return slot.tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Visit:
    """A layer begins or ends."""

    layer: int
    end: str
    """`in` or `out`."""
    step: int
    """Operators before it."""
    value: int | None
    """Value of the first tensor that goes in or comes out."""


class _StepRecorder(Recorder):
    """Records until backward begins."""

    def __init__(self, layers: Mapping[str, int]) -> None:
        super().__init__()
        self.visits: list[_Visit] = []
        self._layers = layers
        self._slots: list[ReferenceType[_Slot]] = []
        self._recording: Recording | None = None

    def seen(self, path: str, call: int, end: str, tree: Any) -> None:
        if self._recording is not None:
            return
        super().seen(path, call, end, tree)
        layer = self._layers.get(path)
        if layer is not None:
            first = next(tensors(tree), None)
            self.visits.append(_Visit(layer=layer, end=end, step=len(self._steps), value=self._number(first)))

    def _number(self, tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else self._value(tensor).number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._recording is None and (graph_task() != NO_TASK or self.calls.current == "backward"):
            self._recording = self._finish_forward()
        if self._recording is not None or func.namespace == "profiler":  # which an optimizer's `zero_grad` calls
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def save(self, tensor: torch.Tensor) -> _Slot:
        """The saved-tensor hook."""
        slot = _Slot(tensor)
        if self._recording is None:
            self.pack(tensor)
            self._slots.append(ref(slot))
        return slot

    def finished(self) -> Recording:
        """What was recorded before backward.

        Raises:
            EvenloadError: there was no backward.
        """
        if self._recording is None:
            raise EvenloadError("the step has no backward", fix="call backward() in the step function")
        return self._recording

    def _finish_forward(self) -> Recording:
        recording = self.finish(None)  # which lets go of the graph, and so of what nothing differentiates
        for saved, slot in zip(recording.saved, self._slots, strict=True):
            saved.alive = slot() is not None
        return recording


class _Cutter:
    """Cuts the graph of a step into the graphs of its parts."""

    def __init__(
        self, whole: LayerGraph, recording: Recording, visits: Sequence[_Visit], path: str, count: int
    ) -> None:
        self._whole = whole
        self._recording = recording
        self._path = path
        begins, ends = (_in_order(visits, end, count) for end in ("in", "out"))
        if any(begin.step < end.step for begin, end in zip(begins[1:], ends, strict=False)):
            raise EvenloadError("the layers run inside each other", where="--layers", fix="name the list of the inner")
        self._passed = [self._name(visit) for visit in (*begins, ends[-1])]
        """What goes into every layer, and out of the last."""
        self._starts = [0, *(begin.step for begin in begins), ends[-1].step]
        self._operators: list[list[Operator]] = [[] for _ in range(count + 2)]
        self._part_of: dict[str, int] = {}
        for step, operator in zip(whole.steps, whole.graph.operators, strict=True):
            part = sum(start <= step for start in self._starts) - 1
            self._operators[part].append(operator)
            self._part_of.update(dict.fromkeys(operator.outputs, part))
        steps = whole.steps
        self._inside = tuple(
            sum(begin.step <= step < end.step for step in steps) for begin, end in zip(begins, ends, strict=True)
        )
        self._users: dict[str, set[int]] = {}
        for part, operators in enumerate(self._operators):
            for operator in operators:
                for name in (*operator.inputs, *operator.saves):
                    self._users.setdefault(name, set()).add(part)

    def cut(self) -> StepGraphs:
        parts = [self._part(number) for number in range(len(self._operators))]
        return StepGraphs(
            first=parts[0], layers=tuple(parts[1:-1]), inside=self._inside, last=parts[-1], besides=self._besides()
        )

    def _besides(self) -> tuple[str, ...]:
        """Values that go from part to part beside the hidden state, and need a gradient."""
        known = self._whole.graph.by_name
        return tuple(
            name
            for name, part in self._part_of.items()
            if known[name].differentiable
            and any(user > part and self._passed[user - 1] != name for user in self._users.get(name, ()))
        )

    def _name(self, visit: _Visit) -> str:
        if visit.value is None:
            raise EvenloadError(f"no tensor goes {'into' if visit.end == 'in' else 'out of'} layer {visit.layer}")
        return self._whole.names[visit.value]

    def _part(self, number: int) -> Graph:
        operators = self._operators[number]
        last = len(self._operators) - 1
        incoming = self._passed[number - 1] if number else None
        if number < last:
            outgoing = self._passed[number]
        else:
            made = [name for operator in operators for name in operator.outputs]
            outgoing = made[-1] if made else incoming
        named = dict.fromkeys(
            name for operator in operators for name in (*operator.inputs, *operator.outputs, *operator.saves)
        )
        ends = [name for name in (incoming, outgoing) if name is not None]
        renamed = self._renaming(number, incoming, {**named, **dict.fromkeys(ends)})
        values = [self._value(name, number, incoming, outgoing, renamed) for name in renamed]
        if incoming is None:
            values.append(GraphValue(name=_INPUT, nbytes=0, held=True))
        return Graph(
            values=tuple(values),
            operators=tuple(self._operator(operator, number, renamed) for operator in operators),
            input=_INPUT,
            output=renamed[outgoing] if outgoing is not None else _INPUT,
        )

    def _renaming(self, number: int, incoming: str | None, names: Iterable[str]) -> dict[str, str]:
        """Names within a part: below the layer, and unique where the model between two layers uses the same one."""
        prefix = f"{below(self._path)}{number - 1}." if 0 < number < len(self._operators) - 1 else ""
        renamed: dict[str, str] = {}
        taken = {_INPUT}
        for name in names:
            short = _INPUT if name == incoming else name.removeprefix(prefix)
            unique, count = short, 1
            while unique in taken and name != incoming:
                count += 1
                unique = f"{short}#{count}"
            taken.add(unique)
            renamed[name] = unique
        return renamed

    def _operator(self, operator: Operator, number: int, renamed: Mapping[str, str]) -> Operator:
        layer = f"{below(self._path)}{number - 1}"
        path = operator.path
        if 0 < number < len(self._operators) - 1 and (path == layer or path.startswith(f"{layer}.")):
            path = path[len(layer) + 1 :]
        return replace(
            operator,
            path=path,
            inputs=tuple(map(renamed.__getitem__, operator.inputs)),
            outputs=tuple(map(renamed.__getitem__, operator.outputs)),
            saves=tuple(map(renamed.__getitem__, operator.saves)),
            parts=tuple((renamed[name], nbytes) for name, nbytes in operator.parts),
        )

    def _value(
        self, name: str, number: int, incoming: str | None, outgoing: str | None, renamed: Mapping[str, str]
    ) -> GraphValue:
        value = self._whole.graph.by_name[name]
        mine = self._part_of.get(name) == number
        if mine:
            elsewhere = self._users.get(name, set()) - {number}
            return replace(value, name=renamed[name], escapes=bool(elsewhere) and name != outgoing)
        if name == incoming:
            return replace(value, name=_INPUT, held=False, given=False, escapes=False)
        drawn = value.given and value.name not in self._part_of and not self._is_tensor(name)
        return replace(value, name=renamed[name], held=not drawn, given=drawn, escapes=False)

    def _is_tensor(self, name: str) -> bool:
        """Whether a value is one of the recording; the others are states of generators."""
        return name in self._whole.numbers


def _in_order(visits: Sequence[_Visit], end: str, count: int) -> list[_Visit]:
    """The begins or ends of all layers."""
    found = [visit for visit in visits if visit.end == end]
    numbers = [visit.layer for visit in found]
    if numbers != list(range(count)):
        missing = sorted(set(range(count)) - set(numbers))
        what = f"layer {missing[0]} is not called" if missing else "the layers are not called once each, in order"
        raise EvenloadError(
            f"{what}, so that they cannot be dealt to stages", where="--layers", fix="name a list of layers that are"
        )
    return found
