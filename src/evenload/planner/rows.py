"""The constraints that do not change: layers placed, their order, memory. Each is linear and never too strict.

What is not linear in the counts is replaced by something weaker, so that the program's bound holds for every plan:
the largest of several moments becomes one row for each; of the working memory that comes on top only what the last
layer of a chunk needs is counted; buffers are replaced by lines below them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

import numpy as np

from evenload.planner.columns import Columns
from evenload.planner.costs import EndCosts, Floats, Ints
from evenload.planner.highs import Row
from evenload.planner.hull import lines_below

WORTH: Final = 0.002
"""Working memory below this share of the limit gets no row of its own."""


def layer_rows(columns: Columns) -> Iterator[Row]:
    """Every layer is placed once; chunks hold the fewest layers that they must."""
    for number, group in enumerate(columns.groups):
        mine = [index for index, column in enumerate(columns.counts) if column.group == number]
        yield Row(columns=mine, coefficients=[1.0] * len(mine), lower=group.layers, upper=group.layers)
    for mine, least in zip(columns.of_chunk, columns.problem.least, strict=True):
        if least:
            yield Row(columns=mine, coefficients=[1.0] * len(mine), lower=least)


def order_rows(columns: Columns) -> Iterator[Row]:
    """Layers of different kinds keep their order."""
    if len(columns.groups) == 1:
        return
    for chunk in range(columns.problem.chunks):
        so_far: list[list[int]] = [[] for _ in columns.groups]
        for index, column in enumerate(columns.counts):
            if column.chunk <= chunk:
                so_far[column.group].append(index)
        yield from _runs(columns, chunk, so_far) if columns.ordered else _kinds(columns, so_far)


def _runs(columns: Columns, chunk: int, so_far: list[list[int]]) -> Iterator[Row]:
    """A run begins no earlier than in the chunk where the run before it ends; a switch says that it has ended."""
    for number in range(len(columns.groups) - 1):
        switch = columns.switch(number, chunk)
        for mine, layers, bounds in (
            (so_far[number], columns.groups[number].layers, {"lower": 0.0}),
            (so_far[number + 1], columns.groups[number + 1].layers, {"upper": 0.0}),
        ):
            yield Row(columns=[*mine, switch], coefficients=[*([1.0] * len(mine)), -layers], **bounds)


def _kinds(columns: Columns, so_far: list[list[int]]) -> Iterator[Row]:
    """Of the first n layers, the number of each kind lies between lines: the hull of the sequence."""
    every = [index for mine in so_far for index in mine]
    for number, group in enumerate(columns.groups):
        reached = np.concatenate([[0], np.cumsum(columns.problem.kinds == group.kind)])
        mine = set(so_far[number])
        for sign in (1.0, -1.0):
            for slope, offset in lines_below((sign * reached).tolist()):
                coefficients = [sign * (index in mine) - slope for index in every]
                yield Row(columns=every, coefficients=coefficients, lower=offset)


class _Moment(NamedTuple):
    """A lower bound on what a rank holds above its base: counts @ kept + born + fixed + extra of each count."""

    counts: Floats
    """[chunk of the rank]."""
    born: Floats
    """[chunk of the rank]: 1 where the gradients of the chunk are there."""
    fixed: float
    extra: Floats
    """[count]: added for every layer."""


@dataclass(frozen=True, kw_only=True)
class MemoryRows:
    """What one rank holds at its fullest moments: loads @ counts <= room. There are many, and few ever bind."""

    counts: Ints
    """[column of the rank]: its number among all counts."""
    loads: Floats
    """[moment, column of the rank]."""
    room: Floats
    """[moment]."""

    def row(self, moment: int) -> Row:
        """One of them as a constraint."""
        counts: list[int] = self.counts.tolist()
        loads: list[float] = self.loads[moment].tolist()
        return Row(columns=counts, coefficients=loads, upper=float(self.room[moment]))

    def excess(self, values: Floats) -> Floats:
        """[moment]: by how much a solution is over."""
        return (self.loads * values[self.counts]).sum(axis=1) - self.room


def memory_rows(columns: Columns, *, scale: float) -> Iterator[MemoryRows]:
    """Every rank stays within the limit at each of its fullest moments."""
    problem = columns.problem
    room = problem.limit - problem.profile.outside - problem.profile.constant
    base, kept, born = columns.cost("base"), columns.cost("kept"), columns.cost("born")
    for stage in range(problem.pp):
        chunks = list(range(stage, problem.chunks, problem.pp))
        mine = np.flatnonzero(columns.chunk % problem.pp == stage)
        row_of = columns.chunk[mine] // problem.pp
        ends = [(row, end) for row, chunk in enumerate(chunks) for end in _ends(columns, chunk)]
        loads: list[Floats] = []
        left: list[float] = []
        for (slope, least), moment in product(_buffer_lines(columns, stage), list(_moments(columns, stage))):
            held = moment.counts[row_of] * kept[mine] + moment.born[row_of] * born[mine]
            loads.append(base[mine] + slope + held + moment.extra[mine])
            fixed = least + moment.fixed
            fixed += sum(end.base + moment.counts[row] * end.kept + moment.born[row] * end.born for row, end in ends)
            left.append(room - fixed)
        yield MemoryRows(counts=mine, loads=np.array(loads) * scale, room=np.array(left) * scale)


def _ends(columns: Columns, chunk: int) -> Iterator[EndCosts]:
    if chunk == 0:
        yield columns.problem.before
    if chunk == columns.problem.chunks - 1:
        yield columns.problem.after


def _buffer_lines(columns: Columns, stage: int) -> list[tuple[float, float]]:
    """Lines (per layer, fixed) below the buffers of a rank."""
    problem = columns.problem
    fewest = sum(problem.least[stage :: problem.pp])
    most = len(problem.kinds) - sum(problem.least) + fewest
    return lines_below([problem.buffers(stage, layers) for layers in range(fewest, most + 1)], first=fewest)


def _moments(columns: Columns, stage: int) -> Iterator[_Moment]:
    """What is certainly held at each of a rank's fullest moments, and by an optimizer step that finds gradients."""
    problem = columns.problem
    moments = problem.moments[stage]
    seen: set[tuple[bytes, bytes, float, bytes]] = set()
    for at, row in enumerate(moments.chunk.tolist()):
        chunk = row * problem.pp + stage
        forward, first = bool(moments.forward[at]), bool(moments.first[at])
        counts, born = moments.held[at].astype(float), moments.born[at].astype(float)
        counts[row] += forward
        runs = "forward" if forward else "first_backward" if first else "backward"
        for fixed, extra in _working(columns, chunk, runs):
            key = (counts.tobytes(), born.tobytes(), fixed, extra.tobytes())
            if key not in seen:
                seen.add(key)
                yield _Moment(counts, born, fixed, extra)
    if moments.first.any():
        nothing = np.zeros(problem.interleave)
        yield _Moment(nothing, nothing + 1, 0.0, np.zeros(len(columns.counts)))


def _working(columns: Columns, chunk: int, runs: str) -> Iterator[tuple[float, Floats]]:
    """What the last layer of a chunk needs beside what is kept: (fixed, added for every layer).

    `runs` is `forward`, `backward` or `first_backward`.

    If all layers of the chunk need at least w, then w is needed; and one layer that needs less takes the demand down
    to the least that any layer needs.
    """
    problem = columns.problem
    if chunk == problem.chunks - 1 and problem.profile.last:
        after = problem.after
        need = after.forward_peak - after.kept if runs == "forward" else getattr(after, f"{runs}_peak")
        yield need, np.zeros(len(columns.counts))
        return
    needs = columns.cost(f"{runs}_peak") - (columns.cost("kept") if runs == "forward" else 0.0)
    mine = np.array(columns.of_chunk[chunk])
    lowest = max(0.0, float(needs[mine].min())) if problem.least[chunk] else 0.0
    yield lowest, np.zeros(len(columns.counts))
    if not problem.least[chunk]:
        return
    for need in np.unique(needs[mine]).tolist():
        if need - lowest > WORTH * problem.limit:
            relief = np.zeros(len(columns.counts))
            relief[mine[needs[mine] < need]] = lowest - need
            yield need, relief
