"""A better bound for large programs: branch on the layers of whole ranks and chunks, and leave the rest relaxed.

The exact solver branches on single counts, of which a large program has many that hardly matter. How many layers a
rank holds matters most, then how many a chunk holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import numpy as np

from evenload.planner.costs import Floats
from evenload.planner.hulls import Hull
from evenload.planner.master import Master
from evenload.planner.timing import Timing

WHOLE: Final = 1e-6
"""Distance from a whole number that is rounding."""
CLOSE: Final = 1e-4
"""Relative excess of a path over the bound that is worth a row."""
PATHS: Final = 3
"""Rows for paths added at one node."""


@dataclass(order=True)
class _Node:
    bound: float
    number: int
    lower: Floats = field(compare=False)
    upper: Floats = field(compare=False)
    totals: Floats = field(compare=False)


class Branching:
    """Best-first branch and bound over `Master.totals`; every row it adds holds everywhere."""

    def __init__(self, master: Master, timing: Timing, hulls: list[Hull | None], *, quicker_than: float) -> None:
        """Prepare.

        Args:
            master: the program.
            timing: times solutions and knows paths.
            hulls: what ranks can do, for plans quicker than `quicker_than`.
            quicker_than: the step time of the best plan: subtrees that cannot beat it are closed.
        """
        self.nodes = 0
        self._master, self._timing, self._hulls = master, timing, hulls
        self._ceiling = quicker_than
        self._pp = master.problem.pp
        self._left = 0.0

    def bound(self, entries: float, tick: Callable[[float, float], None]) -> float:
        """A step time that no plan beats; `quicker_than` where no plan can be quicker.

        Args:
            entries: budget: runs of the solver times the entries of its matrix.
            tick: told the share of the budget that is spent, and the bound so far.
        """
        self._left = entries
        totals = self._pp + self._master.problem.chunks
        numbers = count()
        heap: list[_Node] = []
        self._open(heap, 0.0, np.zeros(totals), np.full(totals, np.inf), numbers)
        while heap and self._left > 0:
            tick(1 - self._left / entries, heap[0].bound)
            node = heapq.heappop(heap)
            split = self._split(node.totals)
            if split is None:  # every total is whole: nothing left to branch on
                return node.bound
            for side in (0, 1):
                lower, upper = node.lower.copy(), node.upper.copy()
                if side == 0:
                    upper[split] = np.floor(node.totals[split])
                else:
                    lower[split] = np.ceil(node.totals[split])
                self._open(heap, node.bound, lower, upper, numbers)
        return heap[0].bound if heap else self._ceiling

    def _open(self, heap: list[_Node], least: float, lower: Floats, upper: Floats, numbers: count[int]) -> None:
        """Put a node on the heap unless it cannot hold a better plan."""
        self.nodes += 1
        self._master.bound_totals(lower, upper)
        bound, values = self._solve()
        if values is not None and bound < self._ceiling:
            totals = self._master.totals(values)
            heapq.heappush(heap, _Node(max(bound, least), next(numbers), lower, upper, totals))

    def _solve(self) -> tuple[float, Floats | None]:
        """Bound and solution of the program as it is, after rows that cut the first solutions off."""
        paths = 0
        while True:
            self._left -= self._master.entries
            outcome, bound = self._master.solve(whole=False)
            if outcome.values is None or bound >= self._ceiling:
                return bound, None
            if self._left <= 0:
                return bound, outcome.values
            if self._master.refine(outcome.values):
                continue
            new = self._cut_off(outcome.values)
            forward, backward = self._master.durations(outcome.values)
            step_time = float(self._timing.step_times(forward[None], backward[None])[0])
            if paths < PATHS and step_time > bound * (1 + CLOSE):
                self._master.add(self._timing.critical_path(forward, backward))
                new, paths = True, paths + 1
            if not new:
                return bound, outcome.values

    def _cut_off(self, values: Floats) -> bool:
        """Add the half-space of every rank that a solution violates."""
        new = False
        for stage, hull in enumerate(self._hulls):
            half = None if hull is None else hull.outside(*self._master.point(stage, values))
            if half is not None:
                self._master.cut(stage, half)
                new = True
        return new

    def _split(self, totals: Floats) -> int | None:
        """The total to branch on: that of a rank before that of a chunk, the most fractional first."""
        away = np.abs(totals - np.rint(totals))
        for part in (slice(0, self._pp), slice(self._pp, None)):
            if away[part].max() > WHOLE:
                return int(away[part].argmax()) + (part.start or 0)
        return None
