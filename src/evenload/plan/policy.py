"""What is recomputed on which layer.

`LayerPolicy` is what is in force on one layer; `Policy` is the set of layers behind every switch, as the settings say
it. Sets of layers are the truth: tables of counts, layer ids and patterns are all read into them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from evenload.plan.layout import Layout, Table

DEFAULT_SELECT: Final = (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu")
"""Operators of `select_recompute: True` (MindFormers r1.x)."""
DEFAULT_COMM: Final = (r".*\.norm",)
"""Operators whose communication `select_comm_recompute: True` re-runs (MindFormers r1.x)."""


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

    A layer in `full` ignores `select` and `comm`; a layer in an exclude set of a pattern is left out of that pattern
    (the exclude acts on the layers it names, see `docs/differences.md`).
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

    def for_layer(self, layer: int) -> LayerPolicy:
        """What is in force on one layer."""
        if layer in self.full:
            return LayerPolicy(full=True)
        return LayerPolicy(
            select=_in_force(self.select, self.select_exclude, layer),
            comm=_in_force(self.comm, self.comm_exclude, layer),
        )

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
    return tuple(
        tuple(sum(layer in layers for layer in layout.layers(chunk, stage)) for stage in range(layout.pp))
        for chunk in range(layout.interleave)
    )


def first_layers(table: Table, layout: Layout) -> Layers:
    """The set that takes the first n layers of every chunk; counts above a chunk's layers take all of it."""
    return frozenset(layer for chunk, stage, layers in layout.chunks() for layer in layers[: table[chunk][stage]])


def _in_force(patterns: Mapping[str, Layers], excluded: Mapping[str, Layers], layer: int) -> tuple[str, ...]:
    return tuple(
        pattern
        for pattern, layers in patterns.items()
        if layer in layers and layer not in excluded.get(pattern, frozenset())
    )
