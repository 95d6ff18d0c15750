"""What a plan does: every action with start and end, where the time goes, and the memory of every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.errors import EvenloadError
from evenload.plan.plan import Plan
from evenload.plan.schedule import Op, find_schedule
from evenload.profile.profile import Profile
from evenload.simulate.costs import ChunkCosts, chunk_costs
from evenload.simulate.graph import ActionGraph
from evenload.simulate.memory import RankMemory, curve, rank_memory

Floats = NDArray[np.float64]


class TimedAction(NamedTuple):
    """One action of a rank, and when it runs."""

    rank: int
    op: Op
    chunk: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bubble:
    """Step time above the useful work, as shares of the useful work, which is the mean over ranks without recompute.

    `1 + real = step time / work`. The parts sum to `real`; `imbalance` is what the others leave, so it can be negative
    where a schedule beats the ideal of its kind.
    """

    ideal: float
    """(pp - 1) / (micro-batches * interleave): what equal chunks would wait."""
    imbalance: float
    """Waiting because chunks take different times."""
    recompute: float
    """Work done again, mean over ranks."""
    communication: float
    """What transfers between ranks add to the step."""

    @property
    def real(self) -> float:
        """All of it."""
        return self.ideal + self.imbalance + self.recompute + self.communication


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """A simulated step. Times and memory are in `time_unit` and `memory_unit`."""

    schedule: str
    """Name of the schedule that ran."""
    graph: ActionGraph
    costs: ChunkCosts
    start: Floats
    """[action]: actions rank after rank, in the order each rank runs them."""
    end: Floats
    """[action]."""
    bubble: Bubble
    memory: tuple[RankMemory, ...]
    """What every rank holds at its peak."""
    memory_unit: str = "bytes"
    time_unit: str = "seconds"
    notes: tuple[str, ...] = ()

    @property
    def step_time(self) -> float:
        """When the last action ends."""
        return float(self.end.max())

    @property
    def update(self) -> float:
        """Time of the optimizer after that, on the rank where it takes longest; 0: the profile does not know.

        It begins when all ranks are done: the norm of all gradients comes first.
        """
        return float(self.costs.update.max())

    @property
    def peak(self) -> tuple[float, ...]:
        """Highest memory of every rank, `outside` not included."""
        return tuple(rank.peak_allocated for rank in self.memory)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that every rank works, recompute included."""
        spent = np.bincount(self.graph.rank, weights=self.end - self.start, minlength=self.graph.pp)
        return tuple(spent.tolist())

    @cached_property
    def actions(self) -> tuple[TimedAction, ...]:
        """Every action, rank after rank, in the order each rank runs them."""
        flat = [(rank, action) for rank, order in enumerate(self.graph.actions) for action in order]
        return tuple(
            TimedAction(rank, action.op, action.chunk, action.micro_batch, start, end)
            for (rank, action), start, end in zip(flat, self.start.tolist(), self.end.tolist(), strict=True)
        )

    def fits(self, limit: float) -> bool:
        """Whether peak and outside memory stay within a limit on every rank."""
        return all(rank.needed <= limit for rank in self.memory)

    def curve(self, rank: int) -> tuple[Floats, Floats]:
        """Memory of one rank over the step, `outside` not included: (times, memory).

        Three points an action: what is held when it starts, its highest point (drawn half-way: a profile knows the
        order of memory events inside a layer, not their times), what is held when it ends.

        Raises:
            EvenloadError: no such rank.
        """
        if not 0 <= rank < self.graph.pp:
            raise EvenloadError(f"there is no rank {rank}: the pipeline has ranks 0 to {self.graph.pp - 1}")
        mine = self.graph.rank == rank
        return curve(self.graph.actions[rank], self.costs, rank, self.start[mine], self.end[mine])


def simulate(profile: Profile, plan: Plan) -> Timeline:
    """Run a plan with the costs of a profile.

    Times: an action starts when the one before it on its rank has ended and its input has arrived; a transfer takes
    `profile.transfer_time` and keeps neither rank busy. Memory: `peak = static + constant + buffers + highest point of
    what is in flight and transient`, over the same actions; see `docs/schedules.md`.

    Raises:
        EvenloadError: the plan does not match the profile, or its schedule does not allow its sizes.
    """
    return simulate_costs(
        chunk_costs(profile, plan),
        schedule=plan.schedule,
        micro_batches=plan.setup.micro_batches,
        transfer=profile.transfer_time,
        memory_unit=profile.memory_unit,
        time_unit=profile.time_unit,
        notes=profile.notes,
    )


def simulate_costs(
    costs: ChunkCosts,
    *,
    schedule: str,
    micro_batches: int,
    transfer: float = 0.0,
    memory_unit: str = "bytes",
    time_unit: str = "seconds",
    notes: tuple[str, ...] = (),
) -> Timeline:
    """Run a schedule with the costs of its chunks: the inner half of `simulate`.

    Raises:
        EvenloadError: no such schedule, or sizes it does not allow.
    """
    graph = ActionGraph.scheduled(schedule, pp=costs.pp, interleave=costs.interleave, micro_batches=micro_batches)
    run = graph.run(costs.forward, costs.backward, transfer)
    return Timeline(
        schedule=find_schedule(schedule, interleave=costs.interleave).name,
        graph=graph,
        costs=costs,
        start=run.start[0],
        end=run.end[0],
        bubble=_bubble(graph, costs, float(run.step_time[0]), transfer),
        memory=tuple(
            rank_memory(moments, costs, rank) for rank, moments in enumerate(graph.moments(births=costs.births))
        ),
        memory_unit=memory_unit,
        time_unit=time_unit,
        notes=notes,
    )


def _bubble(graph: ActionGraph, costs: ChunkCosts, step_time: float, transfer: float) -> Bubble:
    """Split a step's waiting. Source of the split: MindSpore toolkits, pipeline balancing simulator."""
    again = float(costs.recompute.sum()) * graph.micro_batches / graph.pp
    work = float((costs.forward + costs.backward).sum()) * graph.micro_batches / graph.pp - again
    if work <= 0:
        return Bubble(ideal=0.0, imbalance=0.0, recompute=0.0, communication=0.0)
    without = float(graph.step_times(costs.forward, costs.backward)[0]) if transfer else step_time
    ideal = (graph.pp - 1) / (graph.micro_batches * graph.interleave)
    recompute = again / work
    return Bubble(
        ideal=ideal,
        imbalance=without / work - 1 - ideal - recompute,
        recompute=recompute,
        communication=(step_time - without) / work,
    )
