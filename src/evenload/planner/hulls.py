"""What a rank can do, as a cloud of points: layers and backward times of its chunks, and the half-spaces around it.

The program knows memory as a straight line and lets a rank recompute half a layer. The points that a rank can really
take are few when chunks hold few layers; every half-space that holds all of them is a valid row, and cuts such
solutions off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from evenload.planner.costs import Floats
from evenload.planner.highs import Row, Solver
from evenload.planner.problem import Problem
from evenload.planner.ranks import Content, Ranks

MOST_CONTENTS: Final = 1000
"""Ranks that can hold more combinations of layers than this get no half-spaces."""
STEEP: Final = 100.0
"""Bound on the weight of a layer against that of a time; times are divided by the largest."""
FAR: Final = 1e4
"""Bound on the distance of a half-space, on that scale."""
CUT: Final = 1e-4
"""Least excess, on that scale, that is worth a row."""


@dataclass(frozen=True, kw_only=True)
class HalfSpace:
    """weights @ backward times + layers @ counts >= least, for everything that the rank can do."""

    weights: Floats
    """[chunk of the rank], at least 0."""
    layers: Floats
    """[chunk of the rank, kind]."""
    least: float


class Hull:
    """The points of one rank."""

    def __init__(self, counts: Floats, backward: Floats, seed: int) -> None:
        """Take the points.

        Args:
            counts: [point, chunk, kind] layers.
            backward: [point, chunk] backward times.
            seed: for the solver.
        """
        self._chunks, self._kinds = counts.shape[1:]
        self._scale = float(backward.max()) or 1.0
        width = self._chunks * self._kinds
        self._middle = counts.reshape(len(counts), -1).mean(axis=0)
        layers = counts.reshape(len(counts), -1) - self._middle
        # minimize weights @ times + layers @ counts - least; free columns are differences of two
        upper = [*([1.0] * self._chunks), *([STEEP] * 2 * width), FAR, FAR]
        self._solver = Solver(upper, seed=seed)
        rows = np.concatenate(
            [backward / self._scale, layers, -layers, -np.ones((len(counts), 1)), np.ones((len(counts), 1))], axis=1
        )
        every = range(rows.shape[1])
        self._solver.add([Row(columns=every, coefficients=row.tolist(), lower=0.0) for row in rows])
        self._solver.add([Row(columns=range(self._chunks), coefficients=[1.0] * self._chunks, lower=1.0, upper=1.0)])

    def outside(self, counts: Floats, backward: Floats) -> HalfSpace | None:
        """The half-space that a point [chunk, kind], [chunk] violates most; None where it is inside or nearly so."""
        layers = counts.ravel() - self._middle
        self._solver.price(np.concatenate([backward / self._scale, layers, -layers, [-1.0, 1.0]]))
        outcome = self._solver.run(whole=False)
        if outcome.values is None or outcome.bound > -CUT:
            return None
        weights, up, down, least = np.split(outcome.values, np.cumsum([self._chunks, len(layers), len(layers)]))
        slopes = (up - down) * self._scale
        return HalfSpace(
            weights=weights,
            layers=slopes.reshape(self._chunks, self._kinds),
            least=float(least[0] - least[1]) * self._scale + float(slopes @ self._middle),
        )


def hulls(problem: Problem, ranks: Ranks, *, quicker_than: float, seed: int) -> list[Hull | None]:
    """The hull of every rank over what plans quicker than a step time can do; None where there is too much of it."""
    if any(np.ptp(cost.forward[cost.available]) for cost in problem.costs):
        return [None] * problem.pp  # a choice changes forward times too, which the points do not say
    return [_hull(problem, ranks, stage, quicker_than, seed) for stage in range(problem.pp)]


def _hull(problem: Problem, ranks: Ranks, stage: int, quicker_than: float, seed: int) -> Hull | None:
    if 4**problem.interleave > MOST_CONTENTS:
        return None
    found = list(islice(_contents(problem, ranks, stage, quicker_than), MOST_CONTENTS + 1))
    if not found or len(found) > MOST_CONTENTS:
        return None
    counts: list[Floats] = []
    backward: list[Floats] = []
    for contents in found:
        options = ranks.options(stage, contents)
        if not options.complete:
            return None
        counts += [np.array([ranks.kinds_of(content) for content in contents], dtype=float)] * len(options)
        backward += list(options.times[:, 1])
    return Hull(np.array(counts), np.array(backward), seed) if counts else None


def _contents(
    problem: Problem, ranks: Ranks, stage: int, quicker_than: float, before: tuple[Content, ...] = ()
) -> Iterator[tuple[Content, ...]]:
    """What the chunks of a rank can hold together, chunk after chunk."""
    row = len(before)
    if row == problem.interleave:
        yield before
        return
    chunk = row * problem.pp + stage
    for layers in range(problem.least[chunk], len(problem.kinds) + 1):
        found = False
        for content in ranks.distinct(chunk, layers):
            held = (*before, content)
            if _possible(problem, ranks, stage, held, quicker_than):
                found = True
                yield from _contents(problem, ranks, stage, quicker_than, held)
        if not found:
            return  # more layers only take more memory and time


def _possible(problem: Problem, ranks: Ranks, stage: int, held: tuple[Content, ...], quicker_than: float) -> bool:
    """Whether chunks with these contents, and the rank's other chunks empty, fit and leave the rank time enough."""
    work = sum(ranks.least_work(row * problem.pp + stage, content) for row, content in enumerate(held))
    if problem.setup.micro_batches * work > quicker_than:
        return False
    rest = (b"",) * (problem.interleave - len(held))
    return float(ranks.leanest(stage, (*held, *rest)).peak[0]) + problem.profile.outside <= problem.limit
