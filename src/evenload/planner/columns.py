"""The columns of the program: how many layers of each group stand in each chunk under each choice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np

from evenload.planner.costs import CHOICES, Floats, Ints
from evenload.planner.problem import Problem

MOST_SWITCHES: Final = 256
"""Most 0/1 columns spent on the order of kinds; beyond it the order is relaxed."""


class Group(NamedTuple):
    """Layers that the program counts together: a run of equal layers, or all layers of a kind."""

    kind: int
    layers: int


class Column(NamedTuple):
    """One count."""

    chunk: int
    """In layer order."""
    group: int
    choice: int


@dataclass(frozen=True, eq=False)
class Columns:
    """Counts first, then the switches of the order, then the step time."""

    problem: Problem

    @cached_property
    def ordered(self) -> bool:
        """Groups are runs, whose order switches keep; else groups are kinds."""
        return (len(self._runs) - 1) * self.problem.chunks <= MOST_SWITCHES

    @cached_property
    def _runs(self) -> list[Group]:
        return [Group(kind, len(list(run))) for kind, run in groupby(self.problem.kinds.tolist())]

    @cached_property
    def groups(self) -> list[Group]:
        """What is counted together."""
        if self.ordered:
            return self._runs
        return [Group(kind, int((self.problem.kinds == kind).sum())) for kind in range(len(self.problem.costs))]

    @cached_property
    def counts(self) -> list[Column]:
        """Every count, chunk after chunk."""
        return [
            Column(chunk, number, choice)
            for chunk in range(self.problem.chunks)
            for number, group in enumerate(self.groups)
            for choice in np.flatnonzero(self.problem.costs[group.kind].available).tolist()
        ]

    @cached_property
    def of_chunk(self) -> list[list[int]]:
        """Counts of every chunk."""
        found: list[list[int]] = [[] for _ in range(self.problem.chunks)]
        for index, column in enumerate(self.counts):
            found[column.chunk].append(index)
        return found

    @cached_property
    def chunk(self) -> Ints:
        """Chunk of every count."""
        return np.array([column.chunk for column in self.counts], dtype=np.int64)

    @cached_property
    def kind(self) -> Ints:
        """Kind of every count."""
        return np.array([self.groups[column.group].kind for column in self.counts], dtype=np.int64)

    @property
    def switches(self) -> int:
        """Number of 0/1 columns."""
        return (len(self.groups) - 1) * self.problem.chunks if self.ordered else 0

    def switch(self, group: int, chunk: int) -> int:
        """The column that says that a run has ended by the end of a chunk."""
        return len(self.counts) + group * self.problem.chunks + chunk

    @property
    def step(self) -> int:
        """The column of the step time."""
        return len(self.counts) + self.switches

    def cost(self, name: str) -> Floats:
        """A cost of every count's layer, a field of `KindCosts`."""
        costs = self.problem.costs
        table = {kind: getattr(costs[kind], name) for kind in range(len(costs))}
        return np.array(
            [
                table[self.groups[column.group].kind]
                if np.ndim(table[self.groups[column.group].kind]) == 0
                else table[self.groups[column.group].kind][column.choice]
                for column in self.counts
            ]
        )

    def choices(self, values: Floats) -> Ints:
        """[chunk in layer order, choice]: layers of a whole solution."""
        found = np.zeros((self.problem.chunks, len(CHOICES)), dtype=np.int64)
        for column, value in zip(self.counts, np.rint(values).astype(int).tolist(), strict=False):
            found[column.chunk, column.choice] += value
        return found
