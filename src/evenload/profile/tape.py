"""Writes an operator graph line by line, the way a forward pass runs.

The builders of `evenload.profile.eager` and `evenload.profile.fused` read like the modules they describe: every line is
one operator call, takes references to values and gives back references.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal, TypedDict, Unpack

from evenload.plan.operators import Graph, Operator, Value

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Ref:
    """A value, or a view on a part of it."""

    name: str
    """Name of the value in the graph."""
    elements: int
    """Elements that this view covers."""
    width: int
    """Bytes of one element."""

    @property
    def nbytes(self) -> int:
        """Bytes that this view covers."""
        return self.elements * self.width

    def part(self, elements: int) -> Ref:
        """A view on some of the elements: same storage."""
        return replace(self, elements=elements)


@dataclass(frozen=True, slots=True)
class Out:
    """Shape of a result to be made."""

    elements: int
    width: int
    suffix: str = ""
    """Tells the second result of an operator from the first: `logsumexp`."""
    differentiable: bool = True
    """Backward makes a gradient of it: not so for integers, masks and statistics."""


class Facts(TypedDict, total=False):
    """What an operator is, beyond its inputs and results; see `evenload.plan.operators.Operator`."""

    aten: str
    saves: tuple[Ref, ...]
    """Inputs that its backward needs."""
    saves_results: tuple[int, ...]
    """Numbers of the results that its backward needs."""
    flops: float
    """Of a matrix product or attention; elementwise operators are bound by the bytes they move and count none."""
    heavy: bool
    comm: Collective
    comm_bytes: float
    scratch: int
    backward_scratch: int
    weight_bytes: int


class Tape:
    """Collects values and operators; `graph` freezes them."""

    def __init__(self) -> None:
        self._values: dict[str, Value] = {}
        self._operators: list[Operator] = []
        self._names: Counter[str] = Counter()

    def given(self, name: str, elements: int, width: int) -> Ref:
        """A value that exists before the layer runs and is kept only if somebody saves it: the layer input."""
        return self._add(Ref(name, elements, width))

    def held(self, name: str, elements: int, width: int) -> Ref:
        """A value that is alive anyway: a parameter, a position table. The same name may be asked for again."""
        ref = Ref(name, elements, width)
        return ref if name in self._values else self._add(ref, held=True)

    def op(self, path: str, name: str, inputs: tuple[Ref, ...], out: Out, **facts: Unpack[Facts]) -> Ref:
        """One operator call with one result; see `ops`."""
        (result,) = self.ops(path, name, inputs, (out,), **facts)
        return result

    def ops(
        self, path: str, name: str, inputs: tuple[Ref, ...], outs: tuple[Out, ...], **facts: Unpack[Facts]
    ) -> tuple[Ref, ...]:
        """One operator call.

        Args:
            path: module path below the layer.
            name: the call as it stands in Python.
            inputs: what it reads; the bytes moved are those of the inputs and results.
            outs: what it makes.
            facts: what else is known of it.
        """
        results = tuple(self._made(_join(path, name, out.suffix), out) for out in outs)
        saved = (*facts.get("saves", ()), *(results[index] for index in facts.get("saves_results", ())))
        aten = facts.get("aten", "")
        self._operators.append(
            Operator(
                path=path,
                name=name,
                aten="" if aten == name else aten,
                inputs=_unique(inputs),
                outputs=tuple(ref.name for ref in results),
                saves=_unique(saved),
                flops=facts.get("flops", 0.0),
                moved=float(sum(ref.nbytes for ref in (*inputs, *results))),
                comm=facts.get("comm"),
                comm_bytes=facts.get("comm_bytes", 0.0),
                heavy=facts.get("heavy", False),
                scratch=facts.get("scratch", 0),
                backward_scratch=facts.get("backward_scratch", 0),
                weight_bytes=facts.get("weight_bytes", 0),
            )
        )
        return results

    def graph(self, source: Ref, result: Ref) -> Graph:
        """The finished graph, from the layer input to the layer output."""
        return Graph(
            values=tuple(self._values.values()),
            operators=tuple(self._operators),
            input=source.name,
            output=result.name,
        )

    def _made(self, name: str, out: Out) -> Ref:
        self._names[name] += 1
        unique = name if self._names[name] == 1 else f"{name}#{self._names[name]}"
        return self._add(Ref(unique, out.elements, out.width), differentiable=out.differentiable)

    def _add(self, ref: Ref, *, held: bool = False, differentiable: bool = True) -> Ref:
        self._values[ref.name] = Value(name=ref.name, nbytes=ref.nbytes, held=held, differentiable=differentiable)
        return ref


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _unique(refs: tuple[Ref, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(ref.name for ref in refs))
