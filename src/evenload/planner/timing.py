"""Step times of many candidates, and the lower bounds that critical paths give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from evenload.planner.candidate import Candidate
from evenload.planner.costs import Floats
from evenload.planner.problem import Problem
from evenload.simulate.graph import CriticalPath

MOST_PATHS: Final = 128
"""Paths held for the quick bound; the oldest go first."""


class Timing:
    """Times candidates by simulation, counts how many, and remembers critical paths.

    The step time is the longest path through the schedule's graph, and every path exists for every candidate: so the
    longest of some paths is a lower bound that costs one matrix product.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.evaluations = 0
        self.paths: list[CriticalPath] = []
        self._known: set[bytes] = set()
        self._matrix = np.empty((0, 2 * problem.chunks))
        self._transfers = np.empty(0)

    @property
    def transfer(self) -> float:
        """Time from one rank to another."""
        return self.problem.profile.transfer_time

    def step_times(self, forward: Floats, backward: Floats) -> Floats:
        """Exact step times of K candidates, [K, chunk, stage] -> [K]."""
        self.evaluations += len(forward)
        return self.problem.graph.step_times(forward, backward, self.transfer)

    def step_time(self, candidate: Candidate) -> float:
        """Exact step time of one candidate."""
        return float(self.step_times(candidate.forward[None], candidate.backward[None])[0])

    def lower(self, forward: Floats, backward: Floats) -> Floats:
        """Lower bounds on the step times of K candidates from the paths known so far, [K]."""
        if not self.paths:
            return np.zeros(len(forward))
        rows = np.concatenate([forward.reshape(len(forward), -1), backward.reshape(len(forward), -1)], axis=1)
        # not a matrix product: its threads would fight over the processors, and round differently with their number
        lengths = np.einsum("kd,pd->kp", rows, self._matrix) + self._transfers
        longest: Floats = lengths.max(axis=1)
        return longest

    def learn(self, forward: Floats, backward: Floats) -> CriticalPath | None:
        """Remember a critical path of one candidate [chunk, stage]; None where it is known already."""
        path = self.critical_path(forward, backward)
        return path if self.add(path) else None

    def critical_path(self, forward: Floats, backward: Floats) -> CriticalPath:
        """A critical path of one candidate [chunk, stage]."""
        return self.problem.graph.critical_path(forward, backward, self.transfer)

    def add(self, path: CriticalPath) -> bool:
        """Remember a path; false where it is known already."""
        row = np.concatenate([path.forward.ravel(), path.backward.ravel()])
        key = np.append(row, path.transfers).tobytes()
        if key in self._known:
            return False
        self._known.add(key)
        self.paths.append(path)
        self._matrix = np.vstack([self._matrix, row])[-MOST_PATHS:]
        self._transfers = np.append(self._transfers, path.transfers * self.transfer)[-MOST_PATHS:]
        return True


def stack(candidates: Sequence[Candidate]) -> tuple[Floats, Floats]:
    """Forward and backward times of candidates, [K, chunk, stage] each."""
    times = np.stack([one.times for one in candidates])
    return times[:, 0], times[:, 1]
