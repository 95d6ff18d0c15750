"""`solve`: layers per chunk and recompute per layer, as quick as can be found within the limit, with a lower bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from evenload.plan.plan import Plan
from evenload.plan.policy import DEFAULT_COMM, DEFAULT_SELECT, Policy
from evenload.planner.baselines import baselines, even_counts, even_least
from evenload.planner.branch import Branching
from evenload.planner.candidate import Candidate, candidate
from evenload.planner.costs import CHOICES, Floats
from evenload.planner.effort import Effort, find_effort
from evenload.planner.hulls import hulls
from evenload.planner.incumbent import Incumbent
from evenload.planner.lean import repair
from evenload.planner.master import Master
from evenload.planner.problem import Problem
from evenload.planner.ranks import Ranks
from evenload.planner.result import Baseline, PlannerResult, Progress
from evenload.planner.search import Search
from evenload.planner.timing import Timing
from evenload.planner.verdict import nothing_fits
from evenload.profile.profile import Profile
from evenload.setup import Setup

TOLERANCE: Final = 1e-9
"""Relative difference below which a bound and a step time are the same number."""
CLOSE: Final = 1e-5
"""Relative distance from its limit at which the bound of the relaxation is left alone."""

LEAST_RUNS: Final = 20
"""With fewer runs of the solver than this the last phase is not begun."""
LONGEST: Final = 120
"""Paths that the last phase begins with: the longest at the solution of the relaxation."""
FIRST: Final = 0.1
"""Share of the local search that runs before the exact solver."""
LEAST_NODES: Final = 250
"""With fewer nodes than this left the exact solver hardly gets beyond the first, which is dear in large programs."""

Tell = Callable[[Progress], None]


def solve(
    profile: Profile,
    setup: Setup,
    limit: float,
    *,
    seed: int = 0,
    effort: str = "normal",
    select: Sequence[str] = DEFAULT_SELECT,
    comm: Sequence[str] = DEFAULT_COMM,
    switches: Policy | None = None,
    start: Plan | None = None,
    progress: Tell | None = None,
) -> PlannerResult:
    """Find the quickest plan within a memory limit, for given degrees, interleave, micro-batches and schedule.

    Args:
        profile: what layers cost.
        setup: degrees, interleave, micro-batches, schedule.
        limit: memory of one rank in the profile's unit; peak and `outside` memory must stay within it.
        seed: of the search; the same seed gives the same plan.
        effort: `quick`, `normal` or `thorough`.
        select: patterns behind the choice `select`.
        comm: patterns behind the choice `comm`.
        switches: a policy whose switches for the whole run (`mp_comm` and its like) the plan takes over.
        start: a plan to begin with, such as an earlier answer; it must be for the same degrees.
        progress: told now and then how far the planner is.

    Raises:
        EvenloadError: wrong input, or (exit code 1) no plan fits; `evenload.planner.verdict` says why.
    """
    problem = Problem(
        profile=profile,
        setup=setup,
        limit=limit,
        select=tuple(select),
        comm=tuple(comm),
        switches=switches or Policy(),
    )
    return Planner(problem, seed=seed, effort=find_effort(effort), progress=progress).solve(start)


class Planner:
    """One run: relaxation, exact solver and local search, until the gap is closed or the budget is spent."""

    def __init__(self, problem: Problem, *, seed: int, effort: Effort, progress: Tell | None = None) -> None:
        self.problem = problem
        self.effort = effort.for_chunks(problem.interleave)
        self.bound = 0.0
        self.nodes = 0
        self.incumbent = Incumbent(problem)
        self.ranks = Ranks(problem)
        self.timing = Timing(problem)
        self.search = Search(problem, self.ranks, self.timing, seed)
        self._seed = seed
        self._tell = progress
        self._in_master = 0
        self._impossible = False
        self._relaxed: tuple[Floats, Floats] | None = None

    def solve(self, first: Plan | None = None) -> PlannerResult:
        """Run; Ctrl-C ends it early with the best plan so far."""
        began, interrupted = time.perf_counter(), False
        compared = baselines(self.problem, self.ranks, self.timing)
        for start in (*even_least(self.problem, self.ranks), *self._given(first)):
            self._offer(start)
        try:
            self._run(scale=compared["even_full"].step_time)
        except KeyboardInterrupt:
            if self.incumbent.best is None:
                raise
            interrupted = True
        return self._result(compared, time.perf_counter() - began, interrupted=interrupted)

    def _run(self, scale: float) -> None:
        master = Master(self.problem, time_scale=scale or 1.0, seed=self._seed)
        self._impossible = not self._relax(master)
        if self._impossible:
            return
        if self.incumbent.best is None:
            self._start()
        self._local(FIRST)
        ended = self._exact(master)
        self._local(1 - FIRST)
        if not ended:
            self._branch()

    def _given(self, plan: Plan | None) -> Iterator[Candidate]:
        """The plan to begin with, where it is for this problem and its layers can fit."""
        if plan is None or plan.layout.num_layers != len(self.problem.kinds):
            return
        counts = tuple(count for row in plan.layout.table for count in row)
        least = self.problem.least
        if len(counts) == len(least) and all(count >= few for count, few in zip(counts, least, strict=True)):
            found = candidate(self.ranks, counts, self.problem.choices(plan))
            if found is not None:
                yield found

    def _start(self) -> None:
        """Layouts near the even ones, where these do not fit."""
        for counts in even_counts(self.problem):
            found = repair(self.ranks, counts)
            if found is not None and (start := candidate(self.ranks, found)) is not None:
                self._offer(start)

    @property
    def _closed(self) -> bool:
        return self.bound >= self.incumbent.step_time * (1 - TOLERANCE)

    def _relax(self, master: Master) -> bool:
        """Without whole numbers: rows for critical paths until the bound is what it can be; false if nothing fits.

        Paths are taken half-way between the program's solution and the quickest point so far, which needs fewer of
        them than at the solution alone (the program's solutions jump about).
        """
        inner: Floats | None = None
        lowest, spent = float("inf"), 0.0
        while spent < self.effort.relaxation:
            self._say("relaxation", spent / self.effort.relaxation)
            spent += master.entries
            outcome, bound = master.solve(whole=False)
            if outcome.values is None:
                return False
            self.bound = max(self.bound, bound)
            if master.refine(outcome.values):
                continue
            outer = np.stack(master.durations(outcome.values))
            for share in (1.0,) if inner is None else (0.5, 1.0):
                point: Floats = outer if inner is None else share * outer + (1 - share) * inner
                step_time, path = self._step_time(point[0], point[1]), self.timing.learn(point[0], point[1])
                if step_time < lowest:
                    inner, lowest = point, step_time
                    self._relaxed = point[0], point[1]
                if path is not None and float(path.length(outer[0], outer[1], self.timing.transfer)) > bound * (
                    1 + CLOSE
                ):
                    break  # the program's solution is cut off
            if lowest <= bound * (1 + CLOSE):
                break
            self._sync(master)
        return True

    def _exact(self, master: Master) -> bool:
        """With whole numbers: as before, and every solution is a start; whether the program itself is solved.

        Where it is and the gap stays open, its solution is a plan that settings cannot express or that needs more
        memory than the program knows of.
        """
        left = self.effort.exact
        for number in range(self.effort.rounds):
            nodes = int(left / master.entries)
            if self._closed or nodes < LEAST_NODES:
                break
            self._say("exact solver", number / self.effort.rounds)
            self._sync(master)
            if self.incumbent.best is not None:
                master.below(self.incumbent.step_time * (1 - TOLERANCE))
            before = self.bound
            outcome, bound = master.solve(whole=True, nodes=nodes)
            left -= max(outcome.nodes, 1) * master.entries
            self.nodes += outcome.nodes
            self.bound = max(self.bound, min(bound, self.incumbent.step_time))
            if outcome.values is None:
                return outcome.solved
            new = master.refine(outcome.values)
            new |= self.timing.learn(*master.durations(outcome.values)) is not None
            choices = master.choices(outcome.values)
            found = candidate(self.ranks, tuple(choices.sum(axis=1).tolist()), choices)
            better = found is not None and self._offer(found)
            if not (new or better) or (not outcome.solved and self._stuck(before)):
                return outcome.solved
        return self._closed

    def _branch(self) -> None:
        """What the exact solver left open: branch on whole ranks and chunks, for the bound alone."""
        if self._closed or self.incumbent.best is None:
            return
        step_time = self.incumbent.step_time
        master = Master(self.problem, time_scale=step_time, seed=self._seed)  # a new one: the old has too many rows
        if self.effort.branch < LEAST_RUNS * master.entries:
            return
        if self._relaxed is not None:
            forward, backward = self._relaxed
            lengths = [float(path.length(forward, backward, self.timing.transfer)) for path in self.timing.paths]
            longest: list[int] = np.argsort(-np.array(lengths), kind="stable")[:LONGEST].tolist()
            for number in longest:
                master.add(self.timing.paths[number])
        branching = Branching(
            master,
            self.timing,
            hulls(self.problem, self.ranks, quicker_than=step_time, seed=self._seed),
            quicker_than=step_time * (1 - TOLERANCE),
        )

        def tick(done: float, bound: float) -> None:
            self.bound = max(self.bound, bound)
            self._say("bound", done)

        self.bound = max(self.bound, branching.bound(self.effort.branch, tick))
        self.nodes += branching.nodes

    def _stuck(self, before: float) -> bool:
        """The solver ends at its limit and the bound hardly moves: more rounds would be the same."""
        return self.bound - before < 0.05 * (self.incumbent.step_time - before)

    def _local(self, share: float) -> None:
        if self.incumbent.best is None or self._closed:
            return
        actions = 2 * self.problem.chunks * self.problem.setup.micro_batches
        batches = max(1, int(share * self.effort.batches_for(actions)))
        self.search.improve(
            self.incumbent.best,
            self.incumbent.step_time,
            batches=batches,
            target=self.bound * (1 + TOLERANCE),
            found=self.incumbent.offer,
            tick=lambda batch: self._say("search", batch / batches),
        )

    def _offer(self, found: Candidate) -> bool:
        """Time a candidate, settle its recompute, and keep it if it is the best."""
        settled, step_time = self.search.settle(found, self._step_time(found.forward, found.backward))
        return self.incumbent.offer(settled, step_time)

    def _step_time(self, forward: Floats, backward: Floats) -> float:
        return float(self.timing.step_times(forward[None], backward[None])[0])

    def _sync(self, master: Master) -> None:
        """Give the program the paths that are new."""
        for path in self.timing.paths[self._in_master :]:
            master.add(path)
        self._in_master = len(self.timing.paths)

    def _say(self, phase: str, done: float) -> None:
        if self._tell is not None:
            best = None if self.incumbent.best is None else self.incumbent.step_time
            self._tell(Progress(phase=phase, done=done, step_time=best, bound=self.bound))

    def _result(self, compared: dict[str, Baseline], seconds: float, *, interrupted: bool) -> PlannerResult:
        problem, best, step_time = self.problem, self.incumbent.best, self.incumbent.step_time
        if best is None:
            raise nothing_fits(self.ranks, proved=self._impossible)
        choices = best.choices
        return PlannerResult(
            plan=problem.plan(best.counts, choices),
            limit=problem.limit,
            step_time=step_time,
            bound=step_time if self._closed else self.bound * (1 - TOLERANCE),
            peaks=best.peaks,
            layers_per_stage=problem.table(best.counts),
            recompute={choice: problem.table(choices[:, at].tolist()) for at, choice in enumerate(CHOICES)},
            baselines=compared,
            seconds=seconds,
            interrupted=interrupted,
            evaluations=self.timing.evaluations,
            nodes=self.nodes,
            memory_unit=problem.profile.memory_unit,
            time_unit=problem.profile.time_unit,
        )
