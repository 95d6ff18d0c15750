"""When nothing fits: which rank, which term, and the smallest limit that would do."""

from __future__ import annotations

from dataclasses import dataclass

from evenload.errors import ANSWER_NO, EvenloadError
from evenload.plan.plan import Plan
from evenload.planner.baselines import even_counts
from evenload.planner.lean import leanest
from evenload.planner.problem import Problem
from evenload.planner.ranks import Ranks
from evenload.simulate.costs import chunk_costs
from evenload.simulate.memory import RankMemory, rank_memory
from evenload.units import gib


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """Why nothing fits: the plan that needs least, and what its fullest rank holds."""

    plan: Plan
    """The leanest plan found; it fits when the limit is `needed`."""
    memory: RankMemory
    """What its fullest rank holds at its peak."""
    limit: float
    unit: str

    @property
    def needed(self) -> float:
        """The limit that the leanest plan needs."""
        return self.memory.needed

    @property
    def always(self) -> float:
        """What the rank holds whatever is recomputed."""
        memory = self.memory
        return memory.static + memory.constant + memory.buffers + memory.outside

    @property
    def static_alone(self) -> bool:
        """Recomputing more cannot help: what the rank holds always is over the limit."""
        return self.always > self.limit

    @property
    def term(self) -> str:
        """The term that breaks the limit, in words."""
        memory = self.memory
        if self.static_alone:
            return (
                f"parameters, gradients, optimizer states and buffers of rank {memory.rank} alone take "
                f"{amount(self.always, self.unit)}"
            )
        return (
            f"rank {memory.rank} holds {amount(self.always, self.unit)} always, and with everything recomputed that "
            f"can be, {amount(memory.kept, self.unit)} kept for {'+'.join(map(str, memory.in_flight))} micro-batches "
            f"in flight and {amount(memory.transient, self.unit)} of working memory ({memory.running})"
        )


def shortage(ranks: Ranks) -> Shortage:
    """The leanest plan that a descent from even layers finds, and what its fullest rank holds."""
    problem = ranks.problem
    lean = min((leanest(ranks, counts) for counts in even_counts(problem)), key=lambda found: max(found.peaks))
    plan = problem.plan(lean.counts, lean.choices)
    return Shortage(plan=plan, memory=fullest(problem, plan), limit=problem.limit, unit=problem.profile.memory_unit)


def fullest(problem: Problem, plan: Plan) -> RankMemory:
    """What the rank that needs most holds at its peak."""
    costs = chunk_costs(problem.profile, plan)
    memories = [
        rank_memory(moments, costs, rank) for rank, moments in enumerate(problem.graph.moments(births=costs.births))
    ]
    return max(memories, key=lambda memory: memory.needed)


def nothing_fits(ranks: Ranks, *, proved: bool) -> NothingFitsError:
    """The answer "no".

    Args:
        ranks: the options of the problem.
        proved: no plan can fit, rather than none was found.
    """
    return NothingFitsError(shortage(ranks), proved=proved)


class NothingFitsError(EvenloadError):
    """No plan fits (exit code 1).

    Attributes:
        shortage: which rank, which term, and the limit that would do.
        proved: no plan can fit, rather than none was found.
    """

    def __init__(self, shortage: Shortage, *, proved: bool):
        limit, needed = amount(shortage.limit, shortage.unit), amount(shortage.needed, shortage.unit)
        super().__init__(
            f"no plan fits in {limit}{'' if proved else ' (none was found)'}: {shortage.term}",
            where="$.memory",
            fix=f"a limit of {needed} fits, with everything recomputed on the fullest rank; "
            "or divide the model further: more pp or tp, a sharded optimizer",
            exit_code=ANSWER_NO,
        )
        self.shortage = shortage
        self.proved = proved


def amount(memory: float, unit: str) -> str:
    """Memory in words: GiB for bytes, else the unit of the table.

    Examples:
        >>> amount(53000.0, "MB"), amount(2**31, "bytes")
        ('53,000 MB', '2.00 GiB')
    """
    return gib(memory) if unit == "bytes" else f"{memory:,.10g} {unit}"
