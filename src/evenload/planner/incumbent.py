"""The best plan so far: checked with the simulator's own memory model before it is accepted."""

from __future__ import annotations

from evenload.plan.plan import Plan
from evenload.planner.candidate import Candidate
from evenload.planner.problem import Problem
from evenload.simulate.costs import chunk_costs
from evenload.simulate.memory import rank_memory


class Incumbent:
    """Keeps the quickest candidate that fits; of equally quick ones that with the least recompute."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.best: Candidate | None = None
        self.step_time = float("inf")

    def offer(self, candidate: Candidate, step_time: float) -> bool:
        """Take a candidate if it is better and certainly fits; whether it was taken."""
        if self.best is not None and (step_time, candidate.recompute) >= (self.step_time, self.best.recompute):
            return False
        if not fits(self.problem, self.problem.plan(candidate.counts, candidate.choices)):
            return False  # rounding: the sums of the options and those of the simulator differ in the last digit
        self.best, self.step_time = candidate, step_time
        return True


def fits(problem: Problem, plan: Plan) -> bool:
    """Whether a plan stays within the limit on every rank, as `evenload.simulate` counts memory."""
    costs = chunk_costs(problem.profile, plan)
    return all(
        rank_memory(moments, costs, rank).needed <= problem.limit
        for rank, moments in enumerate(problem.graph.moments(births=costs.births))
    )
