"""What is alive while one layer runs: the memory events of its forward and of its backward.

Ownership. A layer takes over its input at the start of forward and hands over its output at the end; in backward it
takes over the gradient of its output and hands over that of its input. So each segment begins with what comes in, ends
without what goes out, and the segments of a stack of layers add up: forward ends at the sum of what the layers keep
(`Decision.kept`: the input where the layer keeps it, never an output that the next layer owns), backward at zero.

Forward. An operator makes its results and its scratch; then the scratch goes, and every value goes that is neither kept
nor read again. What enters a module stays until the module returns, because caller and callee still name it; so the
layer's input stays to the end.

Backward (PyTorch's autograd engine, `torch/csrc/autograd/engine.cpp`): operators in reverse order of forward.

- An operator's backward makes a gradient of every input that needs one, the gradient of its weights, and temporaries;
  they meet the saved values and the gradients of its results. Then the temporaries go, the saved values that nobody
  needs any more, the gradients of its results, and last the gradient of its weights: it is added to the one the rank
  holds.
- The second gradient of one value is added to the first in place if nothing else holds the first by then, else into a
  new tensor (`InputBuffer::accumulate`).
- Addition hands the gradient of its result on without a copy, as do concatenation (views of it) and cloning.
- Gradients of parts of a value (`chunk`, `split`, slices) are joined to one of the whole value when that is needed.
- The gradient of a smaller operand of a product is made at the size of the result; then it is summed up, or converted
  if the operand was of a narrower type (`validate_outputs`). Values computed again are gone by then, those that were
  kept go after it (`release_variables`).
- An operator that overwrites what it saved turns the saved value into its gradient.
- A dropped value is computed again when it is first needed, with all that it follows from, and stays until its last
  use. Full recompute computes everything again before it starts (`torch.utils.checkpoint`), and keeps the layer's input
  to the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from evenload.plan.mincut import Decision
from evenload.plan.operators import Graph, Operator

_SHARES: Final = frozenset({"add", "clone"})
"""Operators whose backward returns the gradient of the result itself."""
_PRODUCTS: Final = frozenset({"mul", "div"})
_TEMPORARIES: Final[Mapping[str, int]] = {"pow": 2}
"""Operator -> temporaries of the size of its input that its backward makes beside the gradient it returns.
Source: the formulas in `tools/autograd/derivatives.yaml` of PyTorch."""
_NEW: Final = "+"
"""Marks a gradient that has not reached its value yet."""


def forward_events(graph: Graph, kept: Iterable[str], *, input_share: float = 1.0) -> tuple[float, ...]:
    """Memory events of a layer's forward; they add up to what is kept.

    Args:
        graph: the layer.
        kept: values that stay for backward, as in `Decision.kept`.
        input_share: the part of the input that stays where it is kept, the rest being held by other ranks.
    """
    stay = set(kept)
    memory = _Memory(graph)
    memory.make(graph.input)
    last = _last_uses(graph)
    for i, operator in enumerate(graph.operators):
        memory.change(*map(graph.nbytes, operator.outputs), operator.scratch, -operator.scratch)
        memory.alive.update(operator.outputs)
        memory.drop(name for name in memory.alive if last[name] <= i and name not in stay)
    memory.drop({graph.input, graph.output} - stay)
    if graph.input in stay:
        memory.change(graph.nbytes(graph.input) * (input_share - 1))
    return memory.events()


def backward_events(
    graph: Graph,
    decision: Decision,
    *,
    full: bool,
    weight_gradients: float = 1.0,
    input_share: float = 1.0,
    born: float = 0.0,
) -> tuple[float, ...]:
    """Memory events of a layer's backward; they add up to what is born minus what was kept.

    Args:
        graph: the layer.
        decision: what it keeps and runs again.
        full: everything is run again before backward starts.
        weight_gradients: bytes of a weight's gradient while it is made, for every byte of the weight.
        input_share: the part of the input that was kept; the rest is gathered first.
        born: bytes of accumulated gradients that come to be with the gradient of a weight, for every byte of it.
    """
    walk = _Backward(graph, decision, weight_gradients, born)
    return walk.run(full=full, input_share=input_share)


def needs_gradient(graph: Graph, name: str) -> bool:
    """Whether backward makes a gradient of a value (that of a held value goes to its owner and is counted there)."""
    value = graph.by_name[name]
    return value.differentiable and not value.held


def shares_gradient(graph: Graph, operator: Operator, name: str) -> bool:
    """Whether backward passes the gradient of the result, or a view of it, on to this input without a copy."""
    kinds = _kinds(operator)
    if len(operator.outputs) != 1 or kinds & _PRODUCTS:
        return False
    result = graph.nbytes(operator.outputs[0])
    if "cat" in kinds:
        return sum(operator.reads(graph.by_name[one]) for one in operator.inputs) == result
    return bool(kinds & _SHARES) and operator.reads(graph.by_name[name]) == result


def _last_uses(graph: Graph) -> dict[str, int]:
    """Value -> position of the last operator during whose call it is alive in a forward that keeps nothing."""
    last = dict.fromkeys((graph.input, graph.output), len(graph.operators))
    for i, operator in enumerate(graph.operators):
        last.update(dict.fromkeys((name for name in operator.outputs if name != graph.output), i))
        for name in operator.inputs:
            last[name] = max(last.get(name, i), _return_of_entered(graph, i, graph.producers.get(name, -1)))
    return last


def _return_of_entered(graph: Graph, reader: int, producer: int) -> int:
    """Position of the last operator of the outermost module call that `reader` is in and `producer` is not."""
    path = graph.operators[reader].path.split(".") if graph.operators[reader].path else []
    for depth in range(1, len(path) + 1):
        module = path[:depth]
        inside = [op.path.split(".")[:depth] == module for op in graph.operators]
        if producer >= 0 and all(inside[producer:reader]):
            continue  # made in the same call of this module
        after = reader
        while after + 1 < len(inside) and inside[after + 1]:
            after += 1
        return after
    return reader


class _Memory:
    """The values that are alive, and the changes that led there."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.alive: set[str] = set()
        self._events: list[float] = []

    def change(self, *amounts: float) -> None:
        self._events.extend(amount for amount in amounts if amount)

    def make(self, name: str) -> None:
        """A value comes to life; held ones are counted elsewhere."""
        if name not in self.alive and not self.graph.by_name[name].held:
            self.alive.add(name)
            self.change(self.graph.nbytes(name))

    def drop(self, names: Iterable[str]) -> None:
        for name in sorted(set(names) & self.alive):
            self.alive.remove(name)
            self.change(-self.graph.nbytes(name))

    def events(self) -> tuple[float, ...]:
        return tuple(self._events)


@dataclass(slots=True, eq=False)
class _Gradient:
    """One gradient storage."""

    nbytes: float
    holders: set[str] = field(default_factory=set[str])
    """Values whose gradient it is, or will be."""


class _Backward:
    """The walk through one layer's backward."""

    def __init__(self, graph: Graph, decision: Decision, weight_gradients: float, born: float):
        self.graph = graph
        self.decision = decision
        self.weight_gradients = weight_gradients
        self.born = born
        self.memory = _Memory(graph)
        self.gradients: dict[str, _Gradient] = {}
        self.parts: dict[str, list[_Gradient]] = {}
        """Gradients of parts of a value, which are still to be joined."""
        self.waiting = set(decision.rerun)
        """Operators that are still to be run again."""
        self.needs = Counter(name for operator in graph.operators for name in operator.saves)
        """Value -> uses that are still to come: backward calls and second runs."""
        self.needs.update(name for i in decision.rerun for name in graph.operators[i].inputs)

    def run(self, *, full: bool, input_share: float) -> tuple[float, ...]:
        graph, memory = self.graph, self.memory
        memory.alive.update(self.decision.kept)
        if graph.output in self.needs and graph.output not in {*self.decision.kept, *self.decision.dropped}:
            self.needs.pop(graph.output)  # the next layer owns it and holds it long enough
        if needs_gradient(graph, graph.output):
            self._take(graph.output)
        if full:
            self.needs[graph.input] += 1  # whoever recomputes holds it to the end
            memory.change(graph.nbytes(graph.input) * (1 - input_share))
            for i in self.decision.rerun:
                self._run_again(i)
        for operator in reversed(graph.operators):
            self._step(operator)
        memory.drop(set(memory.alive))
        self._join(graph.input)
        if graph.input in self.gradients:
            self._release(self.gradients.pop(graph.input), graph.input)
        return memory.events()

    def _step(self, operator: Operator) -> None:
        """Backward of one operator."""
        for name in operator.outputs:
            self._join(name)
        arrived = [name for name in operator.outputs if name in self.gradients]
        weights = self.weight_gradients * operator.weight_bytes if arrived else 0.0
        made: list[tuple[str, _Gradient]] = []
        if arrived:
            for name in operator.saves:
                self._provide(name)
            scratch = operator.backward_scratch + temporaries(self.graph, operator)
            self.memory.change(weights, self.born * operator.weight_bytes, scratch)
            made = self._differentiate(operator, arrived)
            self.memory.change(-scratch)
        kept = set(self.decision.kept)
        self._used(name for name in operator.saves if name not in kept)
        made = [(name, self._reduce(gradient, operator, name)) for name, gradient in made]
        self._used(name for name in operator.saves if name in kept)
        for name in arrived:
            self._release(self.gradients.pop(name), name)
        for name, gradient in made:
            if operator.reads(self.graph.by_name[name]) < self.graph.nbytes(name):
                parts = self.parts.setdefault(name, [])
                if gradient not in parts:  # nested concatenations hand on views of one storage
                    parts.append(gradient)
            else:
                self._accumulate(name, gradient)
        self.memory.change(-weights)

    def _differentiate(self, operator: Operator, arrived: list[str]) -> list[tuple[str, _Gradient]]:
        """The gradients of the inputs, not yet added to those that other operators made."""
        made: list[tuple[str, _Gradient]] = []
        for name in operator.inputs:
            if not needs_gradient(self.graph, name):
                continue
            if shares_gradient(self.graph, operator, name):
                gradient = self.gradients[arrived[0]]
            elif operator.overwrites and name in operator.saves and name in self.memory.alive:
                gradient = _Gradient(self.graph.nbytes(name))
                self.memory.alive.remove(name)  # its bytes go on as those of the gradient
            else:
                gradient = _Gradient(first_size(self.graph, operator, name))
                self.memory.change(gradient.nbytes)
            gradient.holders.add(_NEW + name)
            made.append((name, gradient))
        return made

    def _reduce(self, gradient: _Gradient, operator: Operator, name: str) -> _Gradient:
        """Sum up a gradient that was made at the size of the result, or convert it to the operand's type."""
        size = operator.reads(self.graph.by_name[name])
        if gradient.nbytes == size or shares_gradient(self.graph, operator, name):
            return gradient
        small = _Gradient(size, {_NEW + name})
        self.memory.change(small.nbytes)
        self._release(gradient, _NEW + name)
        return small

    def _accumulate(self, name: str, gradient: _Gradient) -> None:
        """A gradient arrives at a value: as the first one, or to be added to it."""
        first = self.gradients.get(name)
        if first is None:
            self.gradients[name] = gradient
            gradient.holders.add(name)
        elif first.holders != {name}:
            self._release(first, name)
            self._take(name)
        self._release(gradient, _NEW + name)

    def _join(self, name: str) -> None:
        """Make one gradient of a value of the gradients of its parts."""
        parts = self.parts.pop(name, [])
        if not parts:
            return
        whole = _Gradient(self.graph.nbytes(name), {_NEW + name})
        self.memory.change(whole.nbytes)
        for part in parts:
            self._release(part, _NEW + name)
        self._accumulate(name, whole)

    def _take(self, name: str) -> None:
        self.gradients[name] = _Gradient(self.graph.nbytes(name), {name})
        self.memory.change(self.graph.nbytes(name))

    def _release(self, gradient: _Gradient, holder: str) -> None:
        gradient.holders.remove(holder)
        if not gradient.holders:
            self.memory.change(-gradient.nbytes)

    def _provide(self, name: str) -> None:
        """Compute a value again, with all that it follows from, if it was dropped and is not there yet."""
        missing: set[int] = set()
        todo = [name]
        while todo:
            producer = self.graph.producers.get(name := todo.pop())
            if name not in self.memory.alive and producer in self.waiting and producer not in missing:
                missing.add(producer)
                todo += self.graph.operators[producer].inputs
        for i in sorted(missing):
            self._run_again(i)

    def _run_again(self, index: int) -> None:
        operator = self.graph.operators[index]
        self.waiting.remove(index)
        twice = [name for name in operator.outputs if name in self.memory.alive]  # kept, and made once more
        for name in operator.outputs:
            self.memory.make(name)
        extra = sum(map(self.graph.nbytes, twice)) + operator.scratch
        self.memory.change(extra, -extra)
        self.memory.drop(name for name in operator.outputs if not self.needs[name])
        self._used(operator.inputs)

    def _used(self, names: Iterable[str]) -> None:
        for name in names:
            self.needs[name] -= 1
            if self.needs[name] <= 0:
                self.memory.drop((name,))


def first_size(graph: Graph, operator: Operator, name: str) -> float:
    """Bytes of an input's gradient when it is made: an operand of a product gets one of the size of the result."""
    size = operator.reads(graph.by_name[name])
    return max(size, _result_size(graph, operator)) if _kinds(operator) & _PRODUCTS else size


def temporaries(graph: Graph, operator: Operator) -> float:
    """Bytes that an operator's backward makes beside the gradients it returns and its `backward_scratch`."""
    kinds, size = _kinds(operator), _result_size(graph, operator)
    own = sum(count for kind, count in _TEMPORARIES.items() if kind in kinds) * size
    weight_at_full_size = bool(kinds & _PRODUCTS) and 0 < operator.weight_bytes < size
    return own + weight_at_full_size * size


def _kinds(operator: Operator) -> set[str]:
    return {operator.name.strip("_"), operator.aten.strip("_")}


def _result_size(graph: Graph, operator: Operator) -> int:
    return max((graph.nbytes(name) for name in operator.outputs), default=0)
