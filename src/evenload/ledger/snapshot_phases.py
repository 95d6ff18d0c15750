"""Phases, steps and categories of a snapshot, from what PyTorch's own functions on the stacks tell."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from evenload.ledger.ledger import ALIVE, Mark
from evenload.ledger.snapshot_frames import Frames
from evenload.ledger.words import Category, MarkKind, Phase, Role

_STEP: Final = re.compile(r"ProfilerStep#(\d+)")


@dataclass(slots=True)
class Row:
    """An allocation while the events of a snapshot are replayed."""

    nbytes: int
    allocated: int
    time: int
    frames: int
    """Position in the stacks; -1: none."""
    phase: Phase = Phase.OTHER
    freed: int = ALIVE
    metadata: str | None = None
    """What the program noted beside it."""
    roles: Role = Role.NONE


def microseconds(value: object) -> int | None:
    """A time as snapshots have it, since 1970; None: it is none."""
    return value if type(value) is int and 0 <= value < 2**53 else None


def marks_of(rows: Sequence[Row], annotations: Sequence[Mapping[str, Any]], device: int, start: int) -> list[Mark]:
    """Marks at which phases and steps begin.

    Allocations of backward on a device come from a thread of PyTorch that has no Python lines: between others that have
    some, a row without is backward's. Steps begin where the annotations of a profiler say so, else after an optimizer.
    """
    marks: list[Mark] = []
    current = Phase.OTHER
    steps = _annotated_steps(rows, annotations, device, start)
    count, due = 0, True
    stacks = any(row.frames >= 0 for row in rows)
    for row in rows:
        if row.allocated == 0:
            continue
        if stacks and row.frames < 0:
            row.phase = Phase.BACKWARD
        phase = row.phase
        if phase is current or phase is Phase.OTHER:
            continue
        if current is Phase.OPTIMIZER:
            due = True
        if phase is Phase.FORWARD and due and not steps:
            marks.append(Mark(kind=MarkKind.STEP, index=row.allocated, time=row.time, value=count))
            count, due = count + 1, False
        marks.append(Mark(kind=MarkKind.PHASE, index=row.allocated, time=row.time, value=phase.code))
        current = phase
    return sorted([*steps, *marks], key=lambda mark: mark.index)


def _annotated_steps(
    rows: Sequence[Row], annotations: Sequence[Mapping[str, Any]], device: int, start: int
) -> list[Mark]:
    """Steps that a profiler marked."""
    times = [row.time for row in rows if row.allocated]
    indexes = [row.allocated for row in rows if row.allocated]
    found: dict[int, Mark] = {}
    for annotation in annotations:
        named = _STEP.fullmatch(str(annotation.get("name")))
        time = microseconds(annotation.get("time_us"))
        if not named or annotation.get("stage") not in ("START", "start") or time is None:
            continue
        if annotation.get("device", device) != device or not indexes:
            continue
        position = bisect_left(times, (time - start) * 1000)
        index = indexes[position] if position < len(indexes) else indexes[-1] + 1
        number = int(named[1])
        found.setdefault(number, Mark(kind=MarkKind.STEP, index=index, time=(time - start) * 1000, value=number))
    return sorted(found.values(), key=lambda mark: mark.index)


def assign_categories(rows: Sequence[Row], marks: Sequence[Mark], frames: Frames) -> list[Category]:
    """Category of every row, `UNKNOWN` where nothing tells."""
    changes = [mark for mark in marks if mark.kind is MarkKind.PHASE]
    begins = [mark.index for mark in changes]
    backward = [mark.index for mark in changes if mark.value == Phase.BACKWARD.code]
    return [_category(row, begins, backward, frames) for row in rows]


def _category(row: Row, begins: Sequence[int], backward: Sequence[int], frames: Frames) -> Category:
    if frames.building(row.frames):
        return Category.PARAMETER
    if row.roles & Role.BEFORE or row.phase is Phase.OTHER:
        return Category.UNKNOWN
    if row.phase in (Phase.FORWARD, Phase.RECOMPUTE):
        return Category.ACTIVATION if _alive_at(row, backward) else Category.TEMPORARY
    if not _alive_at(row, begins):  # gone before the next phase
        return Category.TEMPORARY
    return Category.OPTIMIZER if row.phase is Phase.OPTIMIZER else Category.GRADIENT


def _alive_at(row: Row, indexes: Sequence[int]) -> bool:
    """Whether a row is alive at the next of some indexes after its allocation."""
    position = bisect_right(indexes, row.allocated)
    if position == len(indexes):
        return row.freed == ALIVE and row.phase is not Phase.FORWARD
    return row.freed > indexes[position]
