"""A layer as a small graph of operators: what each makes, and what its backward needs.

This is the one description that patterns are matched on, that the minimum cut works on, and that a `Profile` is made
of. Formula profiles write it per block; a recording engine can write the same.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    saves: tuple[str, ...] = ()
    """Values that the operator's backward needs."""
    flops: float = 0.0
    """Floating-point operations of the forward call on one rank."""
    moved: float = 0.0
    """Bytes read and written in memory by the forward call on one rank."""
    comm: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"] | None = None
    """A collective: re-run only when its communication is recomputed."""
    comm_bytes: float = 0.0
    """Bytes that one rank sends in the collective."""
    heavy: bool = False
    """Matrix product or attention: never re-run unless a pattern names it."""
    scratch: int = 0
    """Bytes alive only while the operator runs (transient)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """The operators of one layer's forward, in order."""

    values: tuple[Value, ...]
    operators: tuple[Operator, ...]
    input: str
    """The value that comes in: the output of the layer before."""
    output: str
    """The value that goes out: the input of the layer after, held by whoever needs it there."""

    def __post_init__(self) -> None:
        names = {value.name for value in self.values}
        if len(names) != len(self.values):
            raise EvenloadError("two values of a graph share a name")
        for operator in self.operators:
            for name in (*operator.inputs, *operator.outputs, *operator.saves):
                if name not in names:
                    raise EvenloadError(f"operator {operator.path}.{operator.name} names the unknown value {name!r}")

    def nbytes(self, name: str) -> int:
        """Bytes of a value."""
        return next(value.nbytes for value in self.values if value.name == name)

    def kept(self) -> tuple[str, ...]:
        """Values that forward leaves for backward without recomputation, each storage once, held values left out."""
        saved = {name for operator in self.operators for name in operator.saves}
        return tuple(value.name for value in self.values if value.name in saved and not value.held)

    @property
    def kept_bytes(self) -> int:
        """Bytes of `kept`."""
        kept = set(self.kept())
        return sum(value.nbytes for value in self.values if value.name in kept)
