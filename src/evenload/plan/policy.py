"""What is recomputed on which layer.

`LayerPolicy` is what is in force on one layer; `Policy` is the set of layers behind every switch, as the settings say
it. Sets of layers are the truth: tables of counts, layer ids and patterns are all read into them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from evenload.errors import EvenloadError
from evenload.plan.checks import whole
from evenload.plan.layer_ranges import layer_ranges
from evenload.plan.layout import Layout, Table
from evenload.plan.patterns import compile_pattern

DEFAULT_SELECT: Final = (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu")
"""Operators of `select_recompute: True` (MindFormers r1.x)."""
DEFAULT_COMM: Final = (r".*\.norm",)
"""Operators whose communication `select_comm_recompute: True` re-runs (MindFormers r1.x)."""
LEVEL: Final = r"\."
"""What separates the levels of a pattern; every level between is a regular expression of its own."""
_PLAIN: Final = re.compile(r"\w+")


class Recompute(StrEnum):
    """The five whole choices for a layer, in MindFormers' and SAPP's terms."""

    NONE = "none"
    SELECT = "select"
    COMM = "comm"
    BOTH = "both"
    """Select and communication recompute."""
    FULL = "full"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPolicy:
    """Patterns in force on one layer. Full recompute leaves no room for the others."""

    full: bool = False
    select: tuple[str, ...] = ()
    """Operators recomputed in backward from what is kept."""
    comm: tuple[str, ...] = ()
    """Operators whose collectives are run again in backward instead of keeping their result."""
    select_exclude: tuple[str, ...] = ()
    """Operators that stay kept although `full` or a wider pattern of `select` names them."""
    comm_exclude: tuple[str, ...] = ()
    """Operators whose collective result stays kept although `full` or a wider pattern of `comm` names them."""

    @property
    def choice(self) -> Recompute:
        """The whole choice this policy amounts to, whatever its patterns are."""
        if self.full:
            return Recompute.FULL
        if self.select and self.comm:
            return Recompute.BOTH
        if self.select:
            return Recompute.SELECT
        return Recompute.COMM if self.comm else Recompute.NONE

    @classmethod
    def of(cls, choice: Recompute) -> LayerPolicy:
        """The policy of a whole choice with the default patterns."""
        return cls(
            full=choice is Recompute.FULL,
            select=DEFAULT_SELECT if choice in {Recompute.SELECT, Recompute.BOTH} else (),
            comm=DEFAULT_COMM if choice in {Recompute.COMM, Recompute.BOTH} else (),
        )


Layers = frozenset[int]
"""A set of layer numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The layers behind every switch.

    A layer in `full` ignores `select` and `comm`. An exclude acts on the layers it names and on no other (see
    `docs/differences.md`): there a pattern that it covers is off, and the operators it names are kept even under a
    wider pattern or under full recompute.
    """

    full: Layers = frozenset()
    select: Mapping[str, Layers] = field(default_factory=dict[str, Layers])
    """Pattern -> layers, in the order of the settings."""
    comm: Mapping[str, Layers] = field(default_factory=dict[str, Layers])
    select_exclude: Mapping[str, Layers] = field(default_factory=dict[str, Layers])
    comm_exclude: Mapping[str, Layers] = field(default_factory=dict[str, Layers])
    optimizer_comm: bool = False
    """`parallel_optimizer_comm_recompute`: gather sharded parameters again in backward (FSDP: reshard)."""
    mp_comm: bool = True
    """`mp_comm_recompute`: full recompute runs tensor-parallel collectives again instead of keeping their results."""
    slice_activation: bool = False
    """`recompute_slice_activation`: full recompute keeps 1/tp of the layer input and gathers it again."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "full", frozenset(self.full))
        for name in ("select", "comm", "select_exclude", "comm_exclude"):  # a copy: later edits by the caller are his
            patterns: Mapping[str, Iterable[int]] = getattr(self, name)
            object.__setattr__(self, name, {pattern: frozenset(layers) for pattern, layers in patterns.items()})

    def for_layer(self, layer: int) -> LayerPolicy:
        """What is in force on one layer."""
        select_exclude = _naming(self.select_exclude, layer)
        comm_exclude = _naming(self.comm_exclude, layer)
        if layer in self.full:
            return LayerPolicy(full=True, select_exclude=select_exclude, comm_exclude=comm_exclude)
        select = _uncovered(_naming(self.select, layer), select_exclude)
        comm = _uncovered(_naming(self.comm, layer), comm_exclude)
        return LayerPolicy(
            select=select,
            comm=comm,
            select_exclude=select_exclude if select else (),  # nothing left to exclude from
            comm_exclude=comm_exclude if comm else (),
        )

    def __str__(self) -> str:
        lines = [f"full: {layer_ranges(self.full)}"] if self.full else []
        for name, patterns in (
            ("select", self.select),
            ("communication", self.comm),
            ("select, except", self.select_exclude),
            ("communication, except", self.comm_exclude),
        ):
            lines += [f"{name} {pattern}: {layer_ranges(layers)}" for pattern, layers in patterns.items() if layers]
        return "\n".join(lines) or "no recomputation"

    @classmethod
    def of_choices(cls, choices: Iterable[Recompute]) -> Policy:
        """The policy that gives every layer (in order) one of the five whole choices, with the default patterns."""
        by_choice: dict[Recompute, set[int]] = {choice: set() for choice in Recompute}
        for layer, choice in enumerate(choices):
            by_choice[choice].add(layer)
        select = frozenset(by_choice[Recompute.SELECT] | by_choice[Recompute.BOTH])
        comm = frozenset(by_choice[Recompute.COMM] | by_choice[Recompute.BOTH])
        return cls(
            full=frozenset(by_choice[Recompute.FULL]),
            select=dict.fromkeys(DEFAULT_SELECT, select) if select else {},
            comm=dict.fromkeys(DEFAULT_COMM, comm) if comm else {},
        )

    @classmethod
    def everywhere(cls, choice: Recompute, num_layers: int) -> Policy:
        """One choice for every layer."""
        return cls.of_choices([choice] * num_layers)


def counts(layers: Layers, layout: Layout) -> Table:
    """How many layers of the set every chunk holds, as [chunk][stage]."""
    held = [len(layers.intersection(chunk)) for _, _, chunk in layout.chunks()]
    return tuple(tuple(held[first : first + layout.pp]) for first in range(0, len(held), layout.pp))


def first_layers(table: Table, layout: Layout) -> Layers:
    """The set that takes the first n layers of every chunk; counts above a chunk's layers take all of it."""
    return frozenset(
        layer for chunk, stage, layers in layout.chunks() for layer in layers[: max(0, table[chunk][stage])]
    )


def as_counts(layers: Layers, layout: Layout) -> Table:
    """The table of counts that means exactly this set, for formats that know only "the first n layers".

    Raises:
        EvenloadError: in some chunk the set is not the first n layers.
    """
    table = counts(layers, layout)
    for chunk, stage, held in layout.chunks():
        count = table[chunk][stage]
        if not layers.issuperset(held[:count]):
            inside = frozenset(layers.intersection(held))
            raise EvenloadError(
                f"layers {layer_ranges(inside)} are not the first {count} layers of stage {stage}, chunk {chunk} "
                f"(layers {layer_ranges(frozenset(held))})",
                fix=f"choose layers {layer_ranges(frozenset(held[:count]))} there",
            )
    return table


def covers(exclude: str, pattern: str) -> bool:
    r"""Whether an exclude pattern names every operator that a pattern names, as far as the two texts can tell.

    True for equal patterns, and for a pattern of plain names that the exclude matches level for level. What a regular
    expression on both sides has in common is known only with the operators at hand.

    Examples:
        >>> covers(r"feed_forward\.w.\.matmul", r"feed_forward\.w1\.matmul")
        True
        >>> covers(r"feed_forward\.w1\.matmul", r"feed_forward\.w.\.matmul")
        False
    """
    if exclude == pattern:
        return True
    names = tuple(pattern.split(LEVEL))
    return all(map(_PLAIN.fullmatch, names)) and compile_pattern(exclude).matches(names)


def recompute_units(num_layers: int, group: int) -> tuple[range, ...]:
    """The layers of one chunk in units that are recomputed together, the last one as short as it must be.

    Megatron's `--recompute-method uniform --recompute-num-layers group`: one input is kept a unit. A group of 1 is full
    recompute of every layer.

    Examples:
        >>> [len(unit) for unit in recompute_units(24, 7)]
        [7, 7, 7, 3]

    Raises:
        EvenloadError: a negative number of layers, or a group below 1.
    """
    num_layers, group = whole(num_layers, "$.num_layers", least=0), whole(group, "$.group", least=1)
    return tuple(range(first, min(first + group, num_layers)) for first in range(0, num_layers, group))


def _naming(patterns: Mapping[str, Layers], layer: int) -> tuple[str, ...]:
    return tuple(pattern for pattern, layers in patterns.items() if layer in layers)


def _uncovered(patterns: tuple[str, ...], excludes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(pattern for pattern in patterns if not any(covers(exclude, pattern) for exclude in excludes))
