"""Local search over layouts against the exact simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from evenload.planner.candidate import Candidate, Key
from evenload.planner.costs import Floats
from evenload.planner.problem import Problem
from evenload.planner.ranks import RankOptions, Ranks
from evenload.planner.timing import Timing, stack

BATCH: Final = 64
"""Neighbours made at a time."""
SIMULATED: Final = 16
"""Neighbours of a batch that are simulated: those with the lowest bounds."""
PATIENCE: Final = 80
"""Batches without a better plan before the search goes back to the best one."""
BARREN: Final = 100
"""Batches in a row without any neighbour that could be quick enough: the search has seen all there is."""
VAIN: Final = 0.5
"""Share of the batches that may bring nothing before the search ends."""
HEAT: Final = 0.01
"""Share of the step time by which the search may climb at its start."""
EASE: Final = 1.1
"""Factor on that share after every batch in which nothing could be reached: layers may be dear."""
STEEPEST: Final = 0.2
"""Most that it may climb."""

Found = Callable[[Candidate, float], object]
"""Told of every candidate that is quicker than all before it."""


class Search:
    """Moves layers between chunks and recompute between the chunks of a rank, always within the limit."""

    def __init__(self, problem: Problem, ranks: Ranks, timing: Timing, seed: int) -> None:
        self.problem = problem
        self.ranks = ranks
        self.timing = timing
        self.random = np.random.default_rng(seed)

    def settle(self, start: Candidate, step_time: float) -> tuple[Candidate, float]:
        """The best recompute combination of every rank in turn, until none helps; the layers stay."""
        best: Candidate = start
        improved = True
        while improved:
            improved = False
            for stage, options in enumerate(start.ranks):
                if len(options) == 1:
                    continue
                tried: list[Candidate] = [best.with_pick(stage, pick) for pick in range(len(options))]
                forward, backward = stack(tried)
                hopeful = np.flatnonzero(self.timing.lower(forward, backward) < step_time)
                if not len(hopeful):
                    continue
                times = self.timing.step_times(forward[hopeful], backward[hopeful])
                at = int(times.argmin())
                if times[at] < step_time:
                    best, step_time, improved = tried[int(hopeful[at])], float(times[at]), True
        return best, step_time

    def improve(
        self,
        start: Candidate,
        step_time: float,
        *,
        batches: int,
        target: float,
        found: Found,
        tick: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Tabu search: to the best neighbour not seen before, with an allowance to climb that shrinks to nothing.

        Args:
            start: where to begin.
            step_time: its step time.
            batches: how many batches of neighbours to try.
            target: stop when a plan is as quick as this (a lower bound).
            found: told of every better plan.
            tick: told the number of every batch.
        """
        best: Candidate = start
        lowest = step_time
        now, current, idle = best, lowest, 0
        seen: set[Key] = {now.key}
        weights = self._weights(now)
        barren, vain, extra = 0, 0, 1.0
        for batch in range(batches):
            if lowest <= target or barren > BARREN or vain > VAIN * batches:
                return
            tick(batch)
            heat = HEAT * extra * (1 - batch / batches) ** 2
            step = self._step(now, current + min(heat, STEEPEST) * lowest, weights, seen)
            idle += 1
            vain += 1
            barren += 1
            extra *= EASE
            if step is not None:
                barren, extra = 0, max(1.0, extra / EASE**4)
                now, current = step
                weights = self._weights(now)
                if current < lowest:
                    best, lowest, idle, vain, extra = now, current, 0, 0, 1.0
                    found(best, lowest)
            if idle > PATIENCE:
                now, current, idle, extra = best, lowest, 0, 1.0
                seen = {now.key}
                weights = self._weights(now)

    def _step(self, now: Candidate, ceiling: float, weights: Floats, seen: set[Key]) -> tuple[Candidate, float] | None:
        """The quickest of some new neighbours, where it stays below the ceiling."""
        several = [stage for stage, options in enumerate(now.ranks) if len(options) > 1]
        made = (self._neighbour(now, weights, several) for _ in range(BATCH))
        tried: list[Candidate] = list(
            {one.key: one for one in made if one is not None and one.key not in seen}.values()
        )
        if not tried:
            return None
        forward, backward = stack(tried)
        lower = self.timing.lower(forward, backward)
        hopeful = np.argsort(lower, kind="stable")[:SIMULATED]
        hopeful = hopeful[lower[hopeful] < ceiling]
        if not len(hopeful):
            return None
        times = self.timing.step_times(forward[hopeful], backward[hopeful])
        simulated: list[int] = hopeful.tolist()
        seen.update(tried[index].key for index in simulated)
        at = int(times.argmin())
        quickest = simulated[at]
        self.timing.learn(forward[quickest], backward[quickest])
        return (tried[quickest], float(times[at])) if times[at] <= ceiling else None

    def _weights(self, now: Candidate) -> Floats:
        """[chunk, stage]: how often a chunk's backward is on the critical path."""
        path = self.timing.critical_path(now.forward, now.backward)
        return path.backward.astype(np.float64) + 0.1

    def _neighbour(self, now: Candidate, weights: Floats, several: list[int]) -> Candidate | None:
        random = self.random
        if several and random.random() < 0.25:
            stage = several[int(random.random() * len(several))]
            return now.with_pick(stage, int(random.random() * len(now.ranks[stage])))
        layers = 1 + (random.random() < 0.4) + (random.random() < 0.15)
        return self._shift(now, layers, weights)

    def _shift(self, now: Candidate, layers: int, weights: Floats) -> Candidate | None:
        """Move some layers, each from one chunk to another; the chunks between pass theirs on."""
        draw, chunks, least = self.random.random(3 * layers).tolist(), self.problem.chunks, self.problem.least
        counts = list(now.counts)
        low, high = chunks, -1
        for layer in range(layers):
            giver, taker = int(draw[3 * layer] * chunks), int(draw[3 * layer + 1] * chunks)
            if draw[3 * layer + 2] < 0.4:
                taker = giver + (1 if draw[3 * layer + 2] < 0.2 else -1)
            if giver == taker or not 0 <= taker < chunks or counts[giver] <= least[giver]:
                continue
            counts[giver] -= 1
            counts[taker] += 1
            low, high = min(low, giver, taker), max(high, giver, taker)
        if high < 0:
            return None
        return self._rebuild(now, tuple(counts), low, high, weights)

    def _rebuild(
        self, now: Candidate, counts: tuple[int, ...], low: int, high: int, weights: Floats
    ) -> Candidate | None:
        """The candidate with other layers in chunks `low` to `high`; None where a rank cannot fit."""
        contents, pp = list(now.contents), self.problem.pp
        start = sum(counts[:low])
        changed: set[int] = set()
        for chunk in range(low, high + 1):
            content = self.ranks.content(start, start + counts[chunk])
            start += counts[chunk]
            if content != contents[chunk]:
                contents[chunk] = content
                changed.add(chunk % pp)
        new: dict[int, tuple[RankOptions, int]] = {}
        for stage in sorted(changed):
            options = self.ranks.options(stage, tuple(contents[stage::pp]))
            if not len(options):
                return None
            new[stage] = options, self._pick(options, weights[:, stage])
        return now.changed(new, counts, contents)

    def _pick(self, options: RankOptions, weights: Floats) -> int:
        if len(options) == 1:
            return 0
        draw = self.random.random()
        if draw < 0.5:
            return int((options.times[:, 1] @ weights).argmin())
        return int((draw - 0.5) * 2 * len(options))
