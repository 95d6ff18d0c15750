"""MindFormers' recompute lists, read into sets of layers.

`recompute`, `select_recompute`, `select_comm_recompute` and the two exclude lists each take true or false, counts per
stage, counts per [chunk][stage], and all but the first a list of patterns or a mapping pattern -> any of those. A count
n means the first n layers of its chunk. Source: MindFormers documentation, "Offset and recompute" (r1.5).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from evenload.errors import EvenloadError, Notice
from evenload.plan.checks import listed, mapped, named, shown, whole
from evenload.plan.layer_ranges import layer_ranges
from evenload.plan.layout import Layout, Table
from evenload.plan.patterns import compile_pattern
from evenload.plan.policy import (
    DEFAULT_COMM,
    DEFAULT_SELECT,
    LEVEL,
    Layers,
    Policy,
    counts,
    first_layers,
)

_FORMS: Final = "write true, false, one count per stage, or one row of counts per interleave"
_BARE_DOT: Final = re.compile(r"(?<=\w)\.(?=\w)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Switched:
    """The layers behind one switch."""

    layers: Layers
    table: Table
    """As counts of [chunk][stage], each at most the layers there. A negative count stays as written and means none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeLists:
    """What the recompute settings say, each switch on its own: an exclude is not yet taken off its select."""

    full: Switched
    select: Mapping[str, Switched]
    comm: Mapping[str, Switched]
    select_exclude: Mapping[str, Switched]
    comm_exclude: Mapping[str, Switched]
    notices: tuple[Notice, ...]

    def policy(self, *, optimizer_comm: bool = False, mp_comm: bool = True, slice_activation: bool = False) -> Policy:
        """The layers behind every switch, with the three flags that hold for the whole run."""
        return Policy(
            full=self.full.layers,
            select=_layers(self.select),
            comm=_layers(self.comm),
            select_exclude=_layers(self.select_exclude),
            comm_exclude=_layers(self.comm_exclude),
            optimizer_comm=optimizer_comm,
            mp_comm=mp_comm,
            slice_activation=slice_activation,
        )


def read_recompute_lists(
    layout: Layout,
    *,
    recompute: Any = False,
    select_recompute: Any = False,
    select_comm_recompute: Any = False,
    select_recompute_exclude: Any = False,
    select_comm_recompute_exclude: Any = False,
    layer_ids: bool = False,
) -> RecomputeLists:
    """Read the five settings.

    Args:
        layout: which layers every chunk holds.
        recompute: whole layers.
        select_recompute: operators; counts without a pattern mean `DEFAULT_SELECT`.
        select_comm_recompute: collectives; counts without a pattern mean `DEFAULT_COMM`.
        select_recompute_exclude: operators to leave out; there is no default pattern.
        select_comm_recompute_exclude: collectives to leave out; there is no default pattern.
        layer_ids: numbers are layers and not counts, as under MindFormers' `swap_config` with `swap: True`.

    Raises:
        EvenloadError: a wrong type, a wrong shape, a number that means nothing, or a pattern that is no pattern.
    """
    reader = _Reader(layout, layer_ids=layer_ids)
    full = reader.switch(recompute, "$.recompute")
    if recompute and named(recompute):
        reader.note(
            "names say nothing here: full recompute is by layer, and this recomputes every layer",
            "$.recompute",
            "write true, or name the operators under select_recompute",
        )
    select = reader.patterns(select_recompute, "$.select_recompute", DEFAULT_SELECT)
    comm = reader.patterns(select_comm_recompute, "$.select_comm_recompute", DEFAULT_COMM)
    select_exclude = reader.excludes(select_recompute_exclude, "$.select_recompute_exclude")
    comm_exclude = reader.excludes(select_comm_recompute_exclude, "$.select_comm_recompute_exclude")
    return RecomputeLists(
        full=full,
        select=select,
        comm=comm,
        select_exclude=select_exclude,
        comm_exclude=comm_exclude,
        notices=tuple(reader.notices),
    )


class _Reader:
    """Reads one setting after the other and collects what the user should know."""

    def __init__(self, layout: Layout, *, layer_ids: bool) -> None:
        self.layout = layout
        self.layer_ids = layer_ids
        self.notices: list[Notice] = []

    def note(self, fact: str, where: str, fix: str | None = None) -> None:
        self.notices.append(Notice(fact=fact, where=where, fix=fix))

    def patterns(self, value: Any, where: str, default: tuple[str, ...]) -> dict[str, Switched]:
        """Pattern -> layers, in the order of the settings."""
        if named(value):
            for entry in value:
                self._check_pattern(entry, where)
            return dict.fromkeys(map(str, value), self._all())
        if mapped(value):
            for pattern in value:
                self._check_pattern(pattern, where)
            return {str(pattern): self.switch(entry, f"{where}['{pattern}']") for pattern, entry in value.items()}
        return dict.fromkeys(default, self.switch(value, where))

    def excludes(self, value: Any, where: str) -> dict[str, Switched]:
        """As `patterns`; a value without a pattern names nothing."""
        if named(value) or mapped(value):
            return self.patterns(value, where, ())
        if value is not None and value is not False:
            self.note(f"{shown(value)} names no pattern, so nothing is excluded", where, "list the patterns to exclude")
        return {}

    def switch(self, value: Any, where: str) -> Switched:
        """The layers of one value that holds no pattern."""
        if isinstance(value, bool):
            return self._all() if value else self._none()
        if not listed(value):
            raise EvenloadError(f"{shown(value)} says nothing about layers", where=where, fix=_FORMS)
        if value and named(value):
            return self._all()
        if self.layer_ids:
            return self._ids(value, where)
        if any(listed(entry) for entry in value):
            return self._counted(self._per_chunk(value, where))
        return self._counted(self._per_stage(value, where))

    def _all(self) -> Switched:
        return self._counted(self.layout.table)

    def _none(self) -> Switched:
        return self._counted(tuple((0,) * self.layout.pp for _ in range(self.layout.interleave)))

    def _counted(self, table: Table) -> Switched:
        return Switched(layers=first_layers(table, self.layout), table=table)

    def _ids(self, value: Sequence[Any], where: str) -> Switched:
        last = self.layout.num_layers - 1
        layers: set[int] = set()
        for place, entry in enumerate(value):
            layer = whole(entry, f"{where}[{place}]", fix="with swap on, the list holds layer numbers")
            if not 0 <= layer <= last:
                raise EvenloadError(
                    f"there is no layer {layer}: with swap on, the list holds layer numbers, not counts",
                    where=f"{where}[{place}]",
                    fix=f"use layers 0 to {last}",
                )
            layers.add(layer)
        if layers:
            named = layer_ranges(frozenset(layers))
            self.note(f"with swap on, the numbers are layers, not counts: layers {named}", where)
        return Switched(layers=frozenset(layers), table=counts(frozenset(layers), self.layout))

    def _per_stage(self, value: Sequence[Any], where: str) -> Table:
        """Counts per stage, dealt one at a time over the interleaves, each capped at the layers of its chunk."""
        layout = self.layout
        if len(value) > layout.pp:
            raise EvenloadError(
                f"{len(value)} counts for {layout.pp} stages",
                where=where,
                fix=f"give {layout.pp} counts, one per stage",
            )
        if value and len(value) < layout.pp:
            self.note(
                f"{len(value)} counts for {layout.pp} stages: the other stages recompute nothing here",
                where,
                "give one count per stage",
            )
        above: list[str] = []
        columns: list[list[int]] = []
        for stage, held in enumerate(zip(*layout.table, strict=True)):
            entry = value[stage] if stage < len(value) else False
            count = _count(entry, sum(held), f"{where}[{stage}]")
            if count < 0:
                raise EvenloadError(
                    f"{count} layers cannot be recomputed", where=f"{where}[{stage}]", fix="write 0 for none of them"
                )
            if count > sum(held):
                above.append(f"[{stage}] asks for {count} layers, stage {stage} has {sum(held)}")
            columns.append(_deal(min(count, sum(held)), held))
        self._note_above(above, where)
        return tuple(zip(*columns, strict=True))

    def _per_chunk(self, value: Sequence[Any], where: str) -> Table:
        """Counts per [chunk][stage]; true or false in place of a row or of a count means all or none."""
        layout = self.layout
        if len(value) != layout.interleave:
            raise EvenloadError(
                f"{len(value)} rows of counts for {layout.interleave} interleaves",
                where=where,
                fix=f"give {layout.interleave} rows of {layout.pp} counts",
            )
        above: list[str] = []
        negative: list[str] = []
        rows: list[tuple[int, ...]] = []
        for chunk, (entry, held) in enumerate(zip(value, layout.table, strict=True)):
            row = [entry] * layout.pp if isinstance(entry, bool) else entry
            if not listed(row):
                raise EvenloadError(
                    f"{shown(entry)} stands where a row of counts should",
                    where=f"{where}[{chunk}]",
                    fix=f"give {layout.interleave} rows of {layout.pp} counts, or true or false for a whole row",
                )
            if len(row) != layout.pp:
                raise EvenloadError(
                    f"{len(row)} counts for {layout.pp} stages",
                    where=f"{where}[{chunk}]",
                    fix=f"give {layout.interleave} rows of {layout.pp} counts",
                )
            numbers: list[int] = []
            for stage, (item, most) in enumerate(zip(row, held, strict=True)):
                count = _count(item, most, f"{where}[{chunk}][{stage}]")
                if count > most:
                    above.append(f"[{chunk}][{stage}] asks for {count} layers, the chunk has {most}")
                if count < 0:
                    negative.append(f"[{chunk}][{stage}] is {count}")
                numbers.append(min(count, most))
            rows.append(tuple(numbers))
        self._note_above(above, where)
        if negative:
            self.note(f"{_first(negative)}: no layer is recomputed there", where, "write 0")
        return tuple(rows)

    def _note_above(self, above: list[str], where: str) -> None:
        if above:
            self.note(f"{_first(above)}: all of them are taken", where)

    def _check_pattern(self, pattern: Any, where: str) -> None:
        if not isinstance(pattern, str):
            raise EvenloadError(f"{shown(pattern)} is no pattern", where=where, fix=r"write text such as 'mlp\.act_fn'")
        try:
            compile_pattern(pattern)
        except EvenloadError as error:
            raise error.at(where) from None
        if LEVEL not in pattern and _BARE_DOT.search(pattern):
            escaped = _BARE_DOT.sub(lambda _: LEVEL, pattern)
            self.note(f"pattern '{pattern}' is a single level: a plain dot separates nothing", where, f"'{escaped}'?")


def _deal(count: int, held: tuple[int, ...]) -> list[int]:
    """Deal layers one at a time over the interleaves, none above what it holds."""
    turns = sorted((nth, chunk) for chunk, most in enumerate(held) for nth in range(most))
    dealt = [0] * len(held)
    for _, chunk in turns[:count]:
        dealt[chunk] += 1
    return dealt


def _count(entry: Any, most: int, where: str) -> int:
    if isinstance(entry, bool):
        return most if entry else 0
    return whole(entry, where, fix=_FORMS)


def _first(items: list[str]) -> str:
    return items[0] + (f" (and {len(items) - 1} more such)" if len(items) > 1 else "")


def _layers(patterns: Mapping[str, Switched]) -> dict[str, Layers]:
    return {pattern: switched.layers for pattern, switched in patterns.items()}
