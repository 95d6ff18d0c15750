"""A layer as a small graph of operators: what each makes, and what its backward needs.

This is the one description that patterns are matched on, that the minimum cut works on, and that a `Profile` is made
of. Formula profiles write it per block; a recording engine can write the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from evenload.errors import EvenloadError


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """One storage in the forward pass of a layer. Views share the value of their base."""

    name: str
    """Unique in the graph, for example `mlp.act_fn.silu`."""
    nbytes: int
    held: bool = False
    """Alive through backward whatever the layer keeps: parameters, buffers, position tables."""
    differentiable: bool = True
    """Backward makes a gradient of the same size: not so for integers, masks and statistics. Ignored if `held`."""
    given: bool = False
    """Comes into the layer beside its input, such as an attention mask: costs its bytes where it is kept."""
    keepable: bool = True
    """Can be kept where nothing saves it: not so if it is written over later, or out of the reach of whoever keeps."""
    escapes: bool = False
    """Leaves the layer beside its output, such as router logits: dropping it frees nothing while others hold it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One operator call in the forward pass of a layer."""

    path: str
    """Module path below the layer in Hugging Face names, such as `mlp.act_fn`; empty for the layer itself."""
    name: str
    """What a user sees in PyTorch code: `silu`, `mul`, `linear`, `scaled_dot_product_attention`."""
    aten: str = ""
    """Name of the aten operator, where it differs (`mm` for `linear`)."""
    inputs: tuple[str, ...] = ()
    """Values read, by name."""
    outputs: tuple[str, ...] = ()
    """Values made, by name."""
    parts: tuple[tuple[str, int], ...] = ()
    """Inputs that are read through a view on a part, with the bytes of that part; the others are read whole."""
    saves: tuple[str, ...] = ()
    """Values that the operator's backward needs: read, made, or held ones."""
    flops: float = 0.0
    """Floating-point operations of the forward call on one rank."""
    moved: float = 0.0
    """Bytes read and written in memory by the forward call on one rank."""
    comm: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"] | None = None
    """A collective: re-run only when its communication is recomputed."""
    comm_bytes: float = 0.0
    """Bytes that one rank sends in the collective."""
    group: Literal["tensor", "expert", "context"] = "tensor"
    """Ranks that take part in the collective."""
    heavy: bool = False
    """Matrix product or attention: never re-run unless a pattern names it."""
    once: bool = False
    """Never runs again, even where a pattern names it: it has effects of its own, such as running statistics."""
    scratch: int = 0
    """Bytes alive only while the forward call runs (transient)."""
    backward_scratch: int = 0
    """Bytes alive only while the operator's backward runs, beside the gradients it returns."""
    overwrites: bool = False
    """Backward writes the gradients of the inputs that it saved over them: they take no memory of their own."""
    weight_bytes: int = 0
    """Bytes of the operator's own parameters on one rank: its backward makes a gradient of this size."""

    def reads(self, value: Value) -> int:
        """Bytes of an input that the operator reads."""
        return dict(self.parts).get(value.name, value.nbytes)

    @property
    def label(self) -> str:
        """How the operator is named to a user: `mlp.act_fn.silu`, `mlp.gate_proj.linear.mm`."""
        aten = self.aten if self.aten != self.name else ""
        return ".".join(part for part in (self.path, self.name, aten) if part)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The operators of one layer's forward, in the order in which they run.

    Every value is held, given, the layer's input, or the output of exactly one operator; an operator reads and saves
    only what exists by then.
    """

    values: tuple[Value, ...]
    operators: tuple[Operator, ...]
    input: str
    """The value that comes in: the output of the layer before."""
    output: str
    """The value that goes out: the input of the layer after, held by whoever needs it there."""

    def __post_init__(self) -> None:
        if len(self.by_name) != len(self.values):
            raise EvenloadError("two values of a graph share a name")
        for value in self.values:
            if value.nbytes < 0:
                raise EvenloadError(f"the value {value.name!r} has {value.nbytes} bytes")
        for end in (self.input, self.output):
            if end not in self.by_name:
                raise EvenloadError(f"the graph's input or output names the unknown value {end!r}")
        alive = {value.name for value in self.values if value.held or value.given} | {self.input}
        for operator in self.operators:
            self._require(operator, operator.inputs, alive)
            for name, nbytes in operator.parts:
                if name not in operator.inputs or not 0 <= nbytes <= self.by_name[name].nbytes:
                    raise EvenloadError(f"operator {operator.label} reads {nbytes} bytes as a part of {name!r}")
            for name in operator.outputs:
                if name in alive:
                    raise EvenloadError(f"operator {operator.label} makes the value {name!r} a second time")
            alive.update(operator.outputs)
            self._require(operator, (*operator.outputs, *operator.saves), alive)
        if self.output not in alive:
            raise EvenloadError(f"no operator makes the graph's output {self.output!r}")

    def _require(self, operator: Operator, names: tuple[str, ...], alive: set[str]) -> None:
        for name in names:
            if name not in self.by_name:
                raise EvenloadError(f"operator {operator.label} names the unknown value {name!r}")
            if name not in alive:
                raise EvenloadError(f"operator {operator.label} needs the value {name!r} before anything makes it")

    @cached_property
    def by_name(self) -> Mapping[str, Value]:
        """Name -> value."""
        return MappingProxyType({value.name: value for value in self.values})

    @cached_property
    def producers(self) -> Mapping[str, int]:
        """Value -> index of the operator that makes it; held values and the layer's input have none."""
        return MappingProxyType({name: i for i, op in enumerate(self.operators) for name in op.outputs})

    def nbytes(self, name: str) -> int:
        """Bytes of a value."""
        return self.by_name[name].nbytes

    def total(self, names: Iterable[str]) -> int:
        """Bytes of several values, each counted once."""
        return sum(self.by_name[name].nbytes for name in set(names))

    def kept(self) -> tuple[str, ...]:
        """Values that forward leaves for backward without recomputation, each storage once, held values left out.

        The layer's input counts where something here saves it. The output belongs to the layer after, as its input;
        it counts here only where something here saves it and nothing here saves the input: then a following layer like
        this one would not count it. So a stack of equal layers counts every storage once.
        """
        saved = {name for operator in self.operators for name in operator.saves}
        if self.input in saved and self.input != self.output:
            saved.discard(self.output)
        return tuple(value.name for value in self.values if value.name in saved and not value.held)

    @property
    def kept_bytes(self) -> int:
        """Bytes of `kept`."""
        return self.total(self.kept())
