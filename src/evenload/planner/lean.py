"""The least memory that a plan needs: where to begin when even layers do not fit, what to say when nothing does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from evenload.planner.candidate import Candidate, of_options
from evenload.planner.problem import Counts
from evenload.planner.ranks import Ranks

LIGHT: Final = 4
"""Ranks that layers are moved to: those that hold least."""


def repair(ranks: Ranks, counts: Counts) -> Counts | None:
    """Move single layers off the ranks that are over the limit, the move that lowers the excess most first.

    Returns:
        A layout for which every rank has a combination that fits, or None where the descent gets stuck.
    """
    room = ranks.problem.limit - ranks.problem.profile.outside

    def excess(peaks: list[float]) -> float:
        return sum(max(0.0, peak - room) for peak in peaks)

    peaks = _peaks(ranks, counts)
    while (over := excess(peaks)) > 0:
        heavy = {stage for stage, peak in enumerate(peaks) if peak > room}
        moves = [(excess(_peaks(ranks, moved)), moved) for moved in _moves(ranks, counts, heavy, peaks)]
        if not moves or min(moves)[0] >= over:
            return None
        counts = min(moves)[1]
        peaks = _peaks(ranks, counts)
    return counts


def leanest(ranks: Ranks, counts: Counts) -> Candidate:
    """A plan whose fullest rank holds little: all is recomputed, layers leave the fullest rank while that helps."""
    while True:
        peaks = _peaks(ranks, counts)
        heavy = {peaks.index(max(peaks))}
        moves = [(max(_peaks(ranks, moved)), moved) for moved in _moves(ranks, counts, heavy, peaks)]
        if not moves or min(moves)[0] >= max(peaks):
            break
        counts = min(moves)[1]
    contents = ranks.contents(counts)
    options = [ranks.leanest(stage, ranks.of_rank(stage, contents)) for stage in range(ranks.problem.pp)]
    return of_options(counts, contents, options)


def _peaks(ranks: Ranks, counts: Counts) -> list[float]:
    """[stage]: memory of the leanest combination."""
    contents = ranks.contents(counts)
    return [float(ranks.leanest(stage, ranks.of_rank(stage, contents)).peak[0]) for stage in range(ranks.problem.pp)]


def _moves(ranks: Ranks, counts: Counts, heavy: set[int], peaks: list[float]) -> Iterator[Counts]:
    """Layouts with one layer moved from a heavy rank to a light one or to the next chunk."""
    problem = ranks.problem
    light = set(sorted(range(problem.pp), key=lambda stage: peaks[stage])[:LIGHT]) - heavy
    for giver in range(problem.chunks):
        if giver % problem.pp not in heavy or counts[giver] <= problem.least[giver]:
            continue
        for taker in range(problem.chunks):
            near = abs(taker - giver) == 1 and taker % problem.pp != giver % problem.pp
            if near or taker % problem.pp in light:
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)
