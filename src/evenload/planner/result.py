"""What the planner answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evenload.plan.layout import Table
from evenload.plan.plan import Plan
from evenload.plan.policy import Recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A plan that needs no planner."""

    step_time: float
    peak: float
    """Highest memory of any rank, `outside` not included."""
    fits: bool
    plan: Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the planner is."""

    phase: str
    """What it does now, in words."""
    done: float
    """Share of all work, 0 to 1."""
    step_time: float | None
    """The best plan so far, or None."""
    bound: float


@dataclass(frozen=True, kw_only=True)
class PlannerResult:
    """A plan that fits, how good it is, and what it is compared with. Units are those of the profile."""

    plan: Plan
    limit: float
    step_time: float
    bound: float
    """No plan of the space searched has a lower step time."""
    peaks: tuple[float, ...]
    """Highest memory of every rank, `outside` not included."""
    layers_per_stage: Table
    """Layers of [chunk][stage]."""
    recompute: Mapping[Recompute, Table]
    """Layers of [chunk][stage] under each choice; a layer is counted under one choice."""
    baselines: Mapping[str, Baseline]
    """`even_none`, `even_full`, `even_least`: even layers without recompute, with full recompute, with the least that
    fits."""
    seconds: float
    interrupted: bool
    """Ctrl-C came before the end: the plan is the best one found by then."""
    evaluations: int
    """Plans simulated."""
    nodes: int
    """Branch and bound nodes of the solver."""
    memory_unit: str
    time_unit: str

    @property
    def gap(self) -> float:
        """Share of the step time by which the plan could at most be improved."""
        return (self.step_time - self.bound) / self.step_time if self.step_time > 0 else 0.0

    @property
    def proved(self) -> bool:
        """The plan is as quick as any."""
        return self.bound >= self.step_time
