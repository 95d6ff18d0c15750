"""Why a plan is what it is, and what a change would do; every number is that of a plan that can be run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from evenload.errors import EvenloadError
from evenload.plan.plan import Plan
from evenload.plan.schedule import default_schedule
from evenload.planner.candidate import candidate
from evenload.planner.effort import Effort
from evenload.planner.problem import Counts, Problem
from evenload.planner.result import PlannerResult
from evenload.planner.solve import Planner
from evenload.planner.timing import stack
from evenload.planner.verdict import NothingFitsError, amount, fullest
from evenload.profile.profile import Profile
from evenload.setup import Setup
from evenload.simulate.memory import RankMemory
from evenload.simulate.timeline import Timeline, simulate
from evenload.units import GIB

COMPARISON: Final = Effort(actions=3e6, batches=100, exact=0.0, branch=0.0, relaxation=0.0, rounds=0)
"""Work spent on each plan that is only compared with."""
SETTLED: Final = 8
"""Plans with a layer moved whose recompute is settled anew."""
OTHER_INTERLEAVES: Final = (1, 2, 3)
"""Chunks per stage that are compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What one change would do."""

    name: str
    """The change, in words."""
    step_time: float
    plan: Plan
    """The changed plan: simulated again, it takes `step_time`."""
    limit: float
    """The limit that it keeps."""
    needed: float
    """What its fullest rank needs, `outside` included."""
    difference: float
    """Step time of the changed plan minus that of the plan; below zero it is quicker."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a plan is what it is."""

    memory: RankMemory
    """What the rank holds at its peak that is nearest to the limit."""
    free: float
    """Memory that this rank has left."""
    largest: tuple[tuple[str, float], ...]
    """Its three largest memory lines."""
    slowest: int
    """The rank that works most on the critical path."""
    share: float
    """Its part of the critical path."""
    busy: float
    """Share of the step in which that rank works."""
    changes: tuple[Change, ...]
    """More and less memory, one layer moved."""
    interleaves: tuple[Change, ...]
    """The best plan found with other numbers of chunks per stage."""
    notes: tuple[str, ...] = ()
    """What could not be compared, and why."""


ProfileOf = Callable[[Setup], Profile]


def explain(
    result: PlannerResult, problem: Problem, *, profile_of: ProfileOf | None = None, seed: int = 0
) -> Explanation:
    """Explain an answer of `solve`.

    Args:
        result: the answer.
        problem: what was solved.
        profile_of: the profile under another setup, for comparisons with other interleaves; None: the same profile.
        seed: of the searches that comparisons need.
    """
    timeline = simulate(problem.profile, result.plan)
    memory = max(timeline.memory, key=lambda rank: rank.needed)
    rank, share = _on_critical_path(timeline, problem)
    interleaves, notes = _interleaves(result, problem, profile_of, seed)
    return Explanation(
        memory=memory,
        free=result.limit - memory.needed,
        largest=tuple(sorted(memory.lines.items(), key=lambda line: -line[1])[:3]),
        slowest=rank,
        share=share,
        busy=timeline.busy[rank] / timeline.step_time if timeline.step_time else 0.0,
        changes=(*_memory_changes(result, problem, seed), *_moved(result, problem)),
        interleaves=interleaves,
        notes=notes,
    )


def _on_critical_path(timeline: Timeline, problem: Problem) -> tuple[int, float]:
    """The rank with the most time on the critical path, and its share of the path."""
    costs = timeline.costs
    path = timeline.graph.critical_path(costs.forward, costs.backward, problem.profile.transfer_time)
    work = (path.forward * costs.forward + path.backward * costs.backward).sum(axis=0)
    rank = int(work.argmax())
    return rank, float(work[rank] / timeline.step_time) if timeline.step_time else 0.0


def one_more(unit: str, limit: float) -> tuple[float, str]:
    """A step of memory that people think in: 1 GiB, 1000 MB, or a hundredth of the limit."""
    steps = {
        "bytes": (float(GIB), "1 GiB"),
        "MB": (1000.0, "1000 MB"),
        "MiB": (1024.0, "1024 MiB"),
        "GB": (1.0, "1 GB"),
    }
    return steps.get(unit, (limit / 100, f"1 % ({amount(limit / 100, unit)})"))


def _memory_changes(result: PlannerResult, problem: Problem, seed: int) -> Iterator[Change]:
    """The best plan found with a little more and a little less memory."""
    step, name = one_more(result.memory_unit, result.limit)
    for sign, word in ((1, "more"), (-1, "less")):
        limit = result.limit + sign * step
        if limit <= 0:
            continue
        changed = replace(problem, limit=limit)
        try:
            found = _compared(changed, seed, result.plan)
        except NothingFitsError:
            continue
        yield _change(f"{name} {word} memory on every rank", changed, found.plan, found.step_time, result)


def _compared(problem: Problem, seed: int, start: Plan | None = None) -> PlannerResult:
    found = Planner(problem, seed=seed, effort=COMPARISON).solve(start)
    if found.interrupted:
        raise KeyboardInterrupt
    return found


def _moved(result: PlannerResult, problem: Problem) -> Iterator[Change]:
    """The best of the plans that differ by one layer moved, recompute settled anew on the ranks concerned."""
    planner = Planner(problem, seed=0, effort=COMPARISON)
    counts = tuple(count for row in result.layers_per_stage for count in row)
    moves = [
        (giver, taker, found)
        for giver, taker, moved in _neighbours(counts, problem)
        if (found := candidate(planner.ranks, moved)) is not None
    ]
    if not moves:
        return
    times = planner.timing.step_times(*stack([found for _, _, found in moves]))
    hopeful: list[int] = np.argsort(times, kind="stable")[:SETTLED].tolist()
    settled = [(*planner.search.settle(moves[index][2], float(times[index])), index) for index in hopeful]
    found, step_time, index = min(settled, key=lambda entry: entry[1])
    giver, taker, _ = moves[index]
    name = f"one layer moved from {_place(giver, problem)} to {_place(taker, problem)}"
    yield _change(name, problem, problem.plan(found.counts, found.choices), step_time, result)


def _neighbours(counts: Counts, problem: Problem) -> Iterator[tuple[int, int, Counts]]:
    """Layouts with one layer moved to a neighbouring chunk, or from or to the chunks of other stages."""
    for giver in range(problem.chunks):
        if counts[giver] <= problem.least[giver]:
            continue
        for taker in range(problem.chunks):
            if taker != giver and (problem.chunks <= 16 or abs(taker - giver) == 1):
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                yield giver, taker, tuple(moved)


def _place(chunk: int, problem: Problem) -> str:
    row, stage = divmod(chunk, problem.pp)
    return f"stage {stage}" + (f" chunk {row}" if problem.interleave > 1 else "")


def _interleaves(
    result: PlannerResult, problem: Problem, profile_of: ProfileOf | None, seed: int
) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    setup = problem.setup
    if setup.pp == 1:
        return (), ("Several chunks per stage help only with more than one stage.",)
    changes: list[Change] = []
    notes: list[str] = []
    for interleave in OTHER_INTERLEAVES:
        if interleave == setup.interleave:
            continue
        other = replace(setup, interleave=interleave, schedule=default_schedule(interleave))
        try:
            profile = problem.profile if profile_of is None else profile_of(other)
            changed = replace(problem, profile=profile, setup=other)
            found = _compared(changed, seed)
        except EvenloadError as error:
            notes.append(f"{_chunks(interleave)} a stage: {error.fact}")
            continue
        name = f"{_chunks(interleave)} a stage ({other.schedule})"
        changes.append(_change(name, changed, found.plan, found.step_time, result))
    if not problem.profile.transfer_time:
        notes.append("the profile has no time for transfers between stages, of which more chunks make more")
    return tuple(changes), tuple(notes)


def _chunks(interleave: int) -> str:
    return "one chunk" if interleave == 1 else f"{interleave} chunks"


def _change(name: str, problem: Problem, plan: Plan, step_time: float, result: PlannerResult) -> Change:
    return Change(
        name=name,
        step_time=step_time,
        plan=plan,
        limit=problem.limit,
        needed=fullest(problem, plan).needed,
        difference=step_time - result.step_time,
    )
