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
from evenload.planner.hulls import HalfSpace
from evenload.planner.problem import Problem
from evenload.planner.rows import layer_rows, memory_rows, order_rows
from evenload.simulate.graph import CriticalPath

SCALE: Final = 1e4
"""Step time and memory limit as the solver sees them: its tolerances are absolute."""


SLACK: Final = 1e-6
"""Excess over a memory constraint, on that scale, that is rounding."""


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
            seed=seed,
        )
        self._solver.price(np.eye(columns.step + 1)[columns.step])
        self._solver.add([*layer_rows(columns), *order_rows(columns)])
        self._memory = list(memory_rows(columns, scale=SCALE / problem.limit))
        self._totals: int | None = None
        self._held: set[tuple[int, int]] = set()

    def add(self, path: CriticalPath) -> None:
        """The step takes at least as long as this path."""
        problem, chunk = self.problem, self._columns.chunk
        forwards, backwards = path.forward.ravel(), path.backward.ravel()
        work = forwards[chunk] * self._forward + backwards[chunk] * self._backward
        fixed = path.transfers * problem.profile.transfer_time
        fixed += float(forwards @ problem.fixed[0] + backwards @ problem.fixed[1])
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

    def refine(self, values: Floats) -> bool:
        """Add the memory constraint of every rank that a solution breaks most; false where it keeps all of them."""
        new: list[tuple[int, int]] = []
        for stage, rows in enumerate(self._memory):
            excess = rows.excess(values)
            worst = int(excess.argmax())
            if excess[worst] > SLACK and (stage, worst) not in self._held:
                new.append((stage, worst))
        self._solver.add([self._memory[stage].row(moment) for stage, moment in new])
        self._held.update(new)
        return bool(new)

    @property
    def entries(self) -> int:
        """Size of the program: rows times columns."""
        return self._solver.entries

    def totals(self, values: Floats) -> Floats:
        """Layers of every rank, then of every chunk in layer order, in a solution."""
        problem, chunk = self.problem, self._columns.chunk
        counts = values[: len(chunk)]
        found = np.zeros(problem.pp + problem.chunks)
        np.add.at(found, chunk % problem.pp, counts)
        np.add.at(found, problem.pp + chunk, counts)
        return found

    def bound_totals(self, lower: Floats, upper: Floats) -> None:
        """Allow only solutions whose `totals` are within bounds."""
        if self._totals is None:
            self._totals = self._solver.rows
            pp, chunk = self.problem.pp, self._columns.chunk
            groups = [np.flatnonzero(chunk % pp == stage) for stage in range(pp)]
            groups += [np.array(columns) for columns in self._columns.of_chunk]
            self._solver.add([Row(columns=group.tolist(), coefficients=[1.0] * len(group)) for group in groups])
        self._solver.bound_rows(self._totals, lower, upper)

    def point(self, stage: int, values: Floats) -> tuple[Floats, Floats]:
        """Layers [chunk, kind] and backward times [chunk] of a rank in a solution."""
        columns, problem = self._columns, self.problem
        counts = np.zeros((problem.chunks, len(problem.costs)))
        np.add.at(counts, (columns.chunk, columns.kind), values[: len(columns.chunk)])
        return counts[stage :: problem.pp], self.durations(values)[1][:, stage]

    def cut(self, stage: int, half: HalfSpace) -> None:
        """Keep a rank on one side of a half-space."""
        columns, problem = self._columns, self.problem
        mine = np.flatnonzero(columns.chunk % problem.pp == stage)
        row = columns.chunk[mine] // problem.pp
        weights = half.weights[row] * self._backward[mine] + half.layers[row, columns.kind[mine]]
        fixed = float(half.weights @ problem.fixed[1][stage :: problem.pp])
        scale = SCALE / max(float(np.abs(weights).max()), 1e-300) / 100
        self._solver.add(
            [Row(columns=mine.tolist(), coefficients=(weights * scale).tolist(), lower=(half.least - fixed) * scale)]
        )

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
        for fixed, cost in zip(problem.fixed, (self._forward, self._backward), strict=True):
            flat = fixed + np.bincount(self._columns.chunk, weights=counts * cost, minlength=problem.chunks)
            times.append(np.maximum(flat, 0.0).reshape(problem.interleave, problem.pp))
        return times[0], times[1]

    def choices(self, values: Floats) -> Ints:
        """[chunk in layer order, choice]: layers of a whole solution."""
        return self._columns.choices(values)
