"""How much work the planner does: counted, never timed, so that a seed gives the same plan everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from evenload.errors import EvenloadError, did_you_mean
from evenload.planner.search import SIMULATED

MORE_CHUNKS: Final = 2
"""Batches of the local search with several chunks per stage, over those with one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """A budget."""

    actions: float
    """Actions simulated in the local search: plans times actions of a plan."""
    batches: int
    """Most batches of neighbours, however short the schedule."""
    exact: float
    """Branch and bound nodes of the exact solver over all its runs, times the entries of its matrix."""
    branch: float
    """Runs of the solver for the bound of large programs, times the entries of its matrix."""
    relaxation: float
    """Runs of the solver without whole numbers, times the entries of its matrix."""
    rounds: int
    """Runs of the solver with whole numbers."""

    def for_chunks(self, interleave: int) -> Effort:
        """The budget with so many chunks per stage: several make a larger problem, on which more work pays."""
        return self if interleave == 1 else replace(self, batches=MORE_CHUNKS * self.batches)

    def batches_for(self, actions: int) -> int:
        """Batches of neighbours that the budget pays for when a plan has so many actions."""
        return max(20, min(self.batches, int(self.actions / (SIMULATED * actions))))


EFFORTS: Final[Mapping[str, Effort]] = MappingProxyType(
    {
        "quick": Effort(actions=5e6, batches=200, exact=3e6, branch=3e6, relaxation=1e7, rounds=10),
        "normal": Effort(actions=1e8, batches=1500, exact=1e7, branch=3e7, relaxation=4e7, rounds=30),
        "thorough": Effort(actions=1e9, batches=20000, exact=6e8, branch=6e8, relaxation=1e9, rounds=200),
    }
)
"""Budgets by name."""


def find_effort(name: str) -> Effort:
    """The budget of a name.

    Raises:
        EvenloadError: no such budget.
    """
    effort = EFFORTS.get(name)
    if effort is None:
        fix = did_you_mean(name, list(EFFORTS)) or f"use one of {', '.join(EFFORTS)}"
        raise EvenloadError(f"there is no effort {name!r}", where="$.effort", fix=fix)
    return effort
