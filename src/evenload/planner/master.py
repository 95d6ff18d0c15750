"""The mixed-integer program behind the bound: layers by kind and choice in every chunk, the step time above paths.

With a fixed schedule the step time is the longest of many paths, each a sum of chunk durations, and a chunk's durations
are sums over its layers. So "the step takes at least as long as this path" is one linear row, and with the rows of some
critical paths the program's optimum is a step time that no plan can beat.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from evenload.planner.columns import Columns
from evenload.planner.costs import Floats, Ints
from evenload.planner.highs import INFINITY, Outcome, Row, Solver
from evenload.planner.problem import Problem
from evenload.planner.rows import layer_rows, memory_rows, order_rows
from evenload.simulate.graph import CriticalPath

SCALE: Final = 1e4
"""Step time and memory limit as the solver sees them: its tolerances are absolute."""


class Master:
    """The program of one problem, growing by a row for every path."""

    def __init__(self, problem: Problem, *, time_scale: float, seed: int) -> None:
        """Make the program without any path.

        Args:
            problem: what is planned.
            time_scale: a step time of about the right size.
            seed: for the solver's own choices.
        """
        self.problem = problem
        self._time = SCALE / time_scale
        self._columns = Columns(problem)
        self._forward, self._backward = self._columns.cost("forward"), self._columns.cost("backward")
        columns = self._columns
        self._solver = Solver(
            [*(columns.groups[column.group].layers for column in columns.counts), *([1] * columns.switches), INFINITY],
            integers=range(columns.step),
            objective=columns.step,
            seed=seed,
        )
        rows = [*layer_rows(columns), *order_rows(columns), *memory_rows(columns, scale=SCALE / problem.limit)]
        self._solver.add(rows)

    def add(self, path: CriticalPath) -> None:
        """The step takes at least as long as this path."""
        problem, chunk = self.problem, self._columns.chunk
        forwards, backwards = path.forward.ravel(), path.backward.ravel()
        work = forwards[chunk] * self._forward + backwards[chunk] * self._backward
        fixed = path.transfers * problem.profile.transfer_time
        for place, end in ((0, problem.before), (-1, problem.after)):
            fixed += forwards[place] * end.forward + backwards[place] * end.backward
        used = np.flatnonzero(work)
        self._solver.add(
            [
                Row(
                    columns=[*used.tolist(), self._columns.step],
                    coefficients=[*(-work[used] * self._time).tolist(), 1.0],
                    lower=fixed * self._time,
                )
            ]
        )

    @property
    def entries(self) -> int:
        """Size of the program: rows times columns."""
        return self._solver.entries

    def below(self, step_time: float) -> None:
        """Look for plans that are quicker than this only."""
        self._solver.limit(self._columns.step, step_time * self._time)

    def solve(self, *, whole: bool, nodes: int = 0) -> tuple[Outcome, float]:
        """Run the solver; returns its outcome and the bound in the profile's time unit."""
        outcome = self._solver.run(whole=whole, nodes=nodes)
        return outcome, outcome.bound / self._time

    def durations(self, values: Floats) -> tuple[Floats, Floats]:
        """Forward and backward times of a solution, [chunk, stage]."""
        problem = self.problem
        counts = values[: len(self._columns.counts)]
        times: list[Floats] = []
        for name, cost in (("forward", self._forward), ("backward", self._backward)):
            flat = np.bincount(self._columns.chunk, weights=counts * cost, minlength=problem.chunks)
            flat[0] += getattr(problem.before, name)
            flat[-1] += getattr(problem.after, name)
            times.append(np.maximum(flat, 0.0).reshape(problem.interleave, problem.pp))
        return times[0], times[1]

    def choices(self, values: Floats) -> Ints:
        """[chunk in layer order, choice]: layers of a whole solution."""
        return self._columns.choices(values)
