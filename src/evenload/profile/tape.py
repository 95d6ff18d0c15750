"""Writes an operator graph line by line, the way a forward pass runs.

The builders of `evenload.profile.eager` and `evenload.profile.fused` read like the modules they describe: every line is
one operator call, takes references to values and gives back references.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict, Unpack

from evenload.plan.operators import Graph, Operator, Value

TABLES = "position"
"""Prefix of what a stage makes once per forward for all its layers: tables of the rotary embedding, masks."""
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
    stretch: int = 1
    """Times that the view repeats its elements without a copy (stride 0); what is made from it has all of them."""

    @property
    def nbytes(self) -> int:
        """Bytes that this view covers."""
        return self.elements * self.width

    def part(self, elements: int) -> Ref:
        """A view on some of the elements: same storage."""
        return replace(self, elements=elements)

    def like(self, *, width: int | None = None) -> Out:
        """A result of as many elements, of the same type unless another is given."""
        return Out(self.elements * self.stretch, self.width if width is None else width)


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
    group: Literal["tensor", "expert", "context"]
    scratch: int
    backward_scratch: int
    overwrites: bool
    weight_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Autocast:
    """Widths under `torch.autocast`, in bytes of an element."""

    product: int
    """Matrix products and attention convert to this what is wider."""
    parameter: int


@dataclass(slots=True)
class _Book:
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    operators: list[Operator] = field(default_factory=list[Operator])
    uses: Counter[str] = field(default_factory=Counter[str])
    autocast: Autocast | None = None

    def add(self, ref: Ref, *, held: bool = False, differentiable: bool = True) -> Ref:
        self.values[ref.name] = Value(name=ref.name, nbytes=ref.nbytes, held=held, differentiable=differentiable)
        return ref

    def make(self, name: str, out: Out) -> Ref:
        self.uses[name] += 1
        unique = name if self.uses[name] == 1 else f"{name}#{self.uses[name]}"
        return self.add(Ref(unique, out.elements, out.width), differentiable=out.differentiable)

    def parts(self, refs: tuple[Ref, ...]) -> tuple[tuple[str, int], ...]:
        """Values of which the references cover a part only, and its bytes; those that are held need no gradient."""
        covered: Counter[str] = Counter()
        for ref in refs:
            covered[ref.name] += ref.nbytes
        return tuple(
            (name, nbytes)
            for name, nbytes in covered.items()
            if not self.values[name].held and nbytes < self.values[name].nbytes
        )


class Tape:
    """Collects values and operators of one layer; `graph` freezes them.

    A tape writes under a module path; `at` gives one that writes under a child of that module.
    """

    def __init__(self, path: str = "", book: _Book | None = None) -> None:
        self.path = path
        self._book = book or _Book()

    @classmethod
    def under_autocast(cls, autocast: Autocast | None) -> Tape:
        """A tape on which matrix products convert what is wider; None: without autocast."""
        return cls(book=_Book(autocast=autocast))

    def parameter_width(self, source: Ref) -> int:
        """Bytes of an element of parameters: without autocast they have the type of what they meet."""
        return self._book.autocast.parameter if self._book.autocast else source.width

    def lowered(self, ref: Ref, weight_bytes: int = 0) -> Ref:
        """A value in the type of matrix products: converted where autocast is on and the value is wider."""
        if self._book.autocast is None or ref.width <= self._book.autocast.product:
            return ref
        return self.op("_to_copy", (ref,), ref.like(width=self._book.autocast.product), weight_bytes=weight_bytes)

    def promoted(self, ref: Ref, other: Ref) -> Ref:
        """A value in the type of a wider one that it is put together with."""
        return ref if ref.width >= other.width else self.op("_to_copy", (ref,), ref.like(width=other.width))

    def at(self, child: str) -> Tape:
        """The same tape, writing under a child module."""
        return Tape(_join(self.path, child), self._book)

    def given(self, name: str, elements: int, width: int) -> Ref:
        """A value that exists before the layer runs and is kept only if somebody saves it: the layer input."""
        return self._book.add(Ref(name, elements, width))

    def shared(self, name: str, elements: int, width: int) -> Ref:
        """A value that is alive anyway and belongs to no layer: position tables, tokens, labels."""
        ref = Ref(name, elements, width)
        return ref if name in self._book.values else self._book.add(ref, held=True)

    def parameter(self, name: str, elements: int, width: int) -> Ref:
        """A parameter or buffer of the module."""
        return self.shared(_join(self.path, name), elements, width)

    def op(self, name: str, inputs: tuple[Ref, ...], out: Out, **facts: Unpack[Facts]) -> Ref:
        """One operator call with one result; see `ops`."""
        (result,) = self.ops(name, inputs, (out,), **facts)
        return result

    def ops(self, name: str, inputs: tuple[Ref, ...], outs: tuple[Out, ...], **facts: Unpack[Facts]) -> tuple[Ref, ...]:
        """One operator call.

        Args:
            name: the call as it stands in Python.
            inputs: what it reads; the bytes moved are those of the inputs and results.
            outs: what it makes.
            facts: what else is known of it.
        """
        results = tuple(self._book.make(_join(self.path, name, out.suffix), out) for out in outs)
        saved = (*facts.get("saves", ()), *(results[index] for index in facts.get("saves_results", ())))
        aten = facts.get("aten", "")
        self._book.operators.append(
            Operator(
                path=self.path,
                name=name,
                aten="" if aten == name else aten,
                inputs=_unique(inputs),
                parts=self._book.parts(inputs),
                outputs=tuple(ref.name for ref in results),
                saves=_unique(saved),
                flops=facts.get("flops", 0.0),
                moved=float(sum(ref.nbytes for ref in (*inputs, *results))),
                comm=facts.get("comm"),
                comm_bytes=facts.get("comm_bytes", 0.0),
                group=facts.get("group", "tensor"),
                heavy=facts.get("heavy", False),
                scratch=facts.get("scratch", 0),
                backward_scratch=facts.get("backward_scratch", 0),
                overwrites=facts.get("overwrites", False),
                weight_bytes=facts.get("weight_bytes", 0),
            )
        )
        return results

    def graph(self, source: Ref, result: Ref) -> Graph:
        """The finished graph, from the layer input to the layer output."""
        return Graph(
            values=tuple(self._book.values.values()),
            operators=tuple(self._book.operators),
            input=source.name,
            output=result.name,
        )


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _unique(refs: tuple[Ref, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(ref.name for ref in refs))
