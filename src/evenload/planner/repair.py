"""From a layout that does not fit to one that does: layers leave the ranks that are over the limit."""

from __future__ import annotations

from collections.abc import Iterator

from evenload.planner.problem import Counts
from evenload.planner.ranks import Ranks


def repair(ranks: Ranks, counts: Counts) -> Counts | None:
    """Move single layers, each time the move that lowers the excess most, until every rank can fit.

    Returns:
        A layout for which every rank has a combination that fits, or None where the descent gets stuck.
    """
    excess = _excess(ranks, counts)
    while sum(excess) > 0:
        moves = [(sum(_excess(ranks, moved)), moved) for moved in _moves(ranks, counts, excess)]
        if not moves or min(moves)[0] >= sum(excess):
            return None
        counts = min(moves)[1]
        excess = _excess(ranks, counts)
    return counts


def _excess(ranks: Ranks, counts: Counts) -> list[float]:
    """[stage]: memory over the limit with the leanest combination."""
    problem, contents = ranks.problem, ranks.contents(counts)
    room = problem.limit - problem.profile.outside
    return [
        max(0.0, float(ranks.leanest(stage, ranks.of_rank(stage, contents)).peak[0]) - room)
        for stage in range(problem.pp)
    ]


def _moves(ranks: Ranks, counts: Counts, excess: list[float]) -> Iterator[Counts]:
    """Layouts with one layer moved away from a rank that is over the limit."""
    problem = ranks.problem
    for giver in range(problem.chunks):
        if not excess[giver % problem.pp] or counts[giver] <= problem.least[giver]:
            continue
        for taker in range(problem.chunks):
            if taker % problem.pp != giver % problem.pp:
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)
