"""Plans that need no planner: layers dealt evenly, with no, full, or the least recompute that fits."""

from __future__ import annotations

from collections.abc import Iterator

from evenload.plan.layout import Layout
from evenload.planner.candidate import Candidate, candidate, of_options
from evenload.planner.costs import FULL, NONE
from evenload.planner.problem import Counts, Problem
from evenload.planner.ranks import Ranks
from evenload.planner.result import Baseline
from evenload.planner.timing import Timing


def even_counts(problem: Problem) -> list[Counts]:
    """Even layers, the remainder in the middle, at the start, at the end, over the first and last stages, or spread."""
    layers, chunks, pp = len(problem.kinds), problem.chunks, problem.pp
    base, extra = divmod(layers, chunks)
    middle = [count for row in Layout.even(layers, pp=pp, interleave=problem.interleave).table for count in row]
    placements = [
        range(extra),
        range(chunks - extra, chunks),
        sorted(range(chunks), key=lambda chunk: (chunk % pp, chunk))[:extra],
        sorted(range(chunks), key=lambda chunk: (-(chunk % pp), chunk))[:extra],
        [(2 * number + 1) * chunks // (2 * extra) for number in range(extra)],
        range(1, 1 + extra),
    ]
    found = [tuple(middle)]
    for places in placements:
        counts = [base] * chunks
        for place in places:
            counts[place % chunks] += 1
        found.append(tuple(counts))
    allowed = [
        counts
        for counts in dict.fromkeys(found)
        if all(count >= least for count, least in zip(counts, problem.least, strict=True))
    ]
    return allowed or [tuple(middle)]


def baselines(problem: Problem, ranks: Ranks, timing: Timing) -> dict[str, Baseline]:
    """The three baselines, each with the placement of the remainder that serves it best."""
    layouts = even_counts(problem)
    least = [found for counts in layouts if (found := candidate(ranks, counts)) is not None]
    return {
        "even_none": _best(problem, timing, [_forced(ranks, counts, NONE) for counts in layouts]),
        "even_full": _best(problem, timing, [_forced(ranks, counts, FULL) for counts in layouts]),
        "even_least": _best(problem, timing, least or [_leanest(ranks, counts) for counts in layouts]),
    }


def even_least(problem: Problem, ranks: Ranks) -> Iterator[Candidate]:
    """Candidates with even layers and the least recompute that fits: where a search can start."""
    for counts in even_counts(problem):
        found = candidate(ranks, counts)
        if found is not None:
            yield found


def _forced(ranks: Ranks, counts: Counts, choice: int) -> Candidate:
    """One choice on every layer, whether it fits or not."""
    contents = ranks.contents(counts)
    options = [ranks.forced(stage, ranks.of_rank(stage, contents), choice) for stage in range(ranks.problem.pp)]
    return of_options(counts, contents, options)


def _leanest(ranks: Ranks, counts: Counts) -> Candidate:
    contents = ranks.contents(counts)
    options = [ranks.leanest(stage, ranks.of_rank(stage, contents)) for stage in range(ranks.problem.pp)]
    return of_options(counts, contents, options)


def _best(problem: Problem, timing: Timing, tried: list[Candidate]) -> Baseline:
    """The quickest of those that fit, or else of all."""

    def fits(one: Candidate) -> bool:
        return max(one.peaks) + problem.profile.outside <= problem.limit

    step_time, _, best = min(
        ((timing.step_time(one), number, one) for number, one in enumerate(tried)),
        key=lambda entry: (not fits(entry[2]), entry[0], entry[1]),
    )
    return Baseline(
        step_time=step_time,
        peak=max(best.peaks),
        fits=fits(best),
        plan=problem.plan(best.counts, best.choices),
    )
