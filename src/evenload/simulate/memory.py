"""The memory of one rank: its peak line by line, and its curve over the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.plan.schedule import Action, Op
from evenload.profile.profile import Line
from evenload.simulate.costs import ChunkCosts
from evenload.simulate.inflight import InFlight

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """What one rank holds at its peak, line by line."""

    rank: int
    parameters: float
    gradients: float
    """Those that are there at the peak."""
    optimizer: float
    constant: float
    """Memory of no layer, inside the peak (a table's stage constant)."""
    kept: float
    """For the backward of every micro-batch in flight, the running one included."""
    transient: float
    """Working memory of what runs at the peak, above what is kept."""
    buffers: float
    outside: float
    """Beside the peak: outside the allocator."""
    in_flight: tuple[int, ...]
    """Micro-batches in flight at the peak, by chunk, the running one included."""
    running: str
    """What runs at the peak: `forward of chunk 0`, `backward of chunk 1`, `optimizer step`."""

    @property
    def static(self) -> float:
        """Parameters + gradients + optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak_allocated(self) -> float:
        """Highest memory inside the allocator."""
        return self.static + self.constant + self.buffers + self.kept + self.transient

    @property
    def needed(self) -> float:
        """Peak and outside: what must fit."""
        return self.peak_allocated + self.outside

    @property
    def lines(self) -> dict[str, float]:
        """The house's memory lines at the peak; `constant` is there where a table has one."""
        lines = {line.value: float(getattr(self, line.value)) for line in Line}
        return lines | ({"constant": self.constant} if self.constant else {})


def rank_memory(moments: InFlight, costs: ChunkCosts, rank: int) -> RankMemory:
    """The peak of one rank: its fullest moment, or the optimizer step, when nothing is in flight."""
    kept, born = costs.kept[:, rank], costs.born[:, rank]
    levels = moments.level(
        kept,
        costs.forward_peak[:, rank],
        costs.backward_peak[:, rank],
        first_backward_peak=costs.first_backward_peak[:, rank],
        born=born,
    )
    top = int(levels.argmax())
    counts, chunk = moments.counts[top], int(moments.chunk[top])
    made = float(moments.born[top] @ born) + float(costs.first_born[chunk, rank] * moments.first[top])
    level = float(levels[top]) - made
    running = f"{'forward' if moments.forward[top] else 'backward'} of chunk {chunk}"
    held = min(level, float(counts @ kept))
    at_end = float(costs.optimizer_transient[rank] + born.sum())
    if at_end > level + made:
        made, counts, running, held = float(born.sum()), 0 * counts, "optimizer step", 0.0
        level = at_end - made
    return RankMemory(
        rank=rank,
        parameters=float(costs.parameters[rank]),
        gradients=float(costs.gradients[rank] - born.sum()) + made,
        optimizer=float(costs.optimizer[rank]),
        constant=float(costs.constant[rank]),
        kept=held,
        transient=level - held,
        buffers=float(costs.buffers[rank]),
        outside=float(costs.outside[rank]),
        in_flight=tuple(counts.tolist()),
        running=running,
    )


def curve(order: Sequence[Action], costs: ChunkCosts, rank: int, start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """(times, memory) of one rank, three points an action, two for the optimizer step; see `Timeline.curve`."""
    chunk = np.array([action.chunk for action in order])
    forward = np.array([action.op == Op.FORWARD for action in order])
    frees = np.array([action.op in {Op.BACKWARD, Op.BACKWARD_WEIGHT} for action in order])
    kept: Floats = costs.kept[chunk, rank]
    first = np.zeros(len(order), dtype=bool)
    first[np.unique(np.where(frees, chunk, -1), return_index=True)[1]] = True
    first &= frees
    change: Floats = np.where(forward, kept, np.where(frees, -kept, 0.0)) + np.where(
        first, costs.born[chunk, rank], 0.0
    )
    after: Floats = np.cumsum(change)
    before: Floats = after - change
    forward_peak: Floats = costs.forward_peak[chunk, rank]
    usual: Floats = costs.backward_peak[chunk, rank]
    others: Floats = costs.first_backward_peak[chunk, rank]
    backward_peak: Floats = np.where(first, others, usual)
    highest = before + np.where(forward, forward_peak, backward_peak)
    times = np.stack([start, (start + end) / 2, end], axis=1).ravel()
    levels = np.stack([before, highest, after], axis=1).ravel()
    born = costs.born[:, rank].sum()
    if costs.optimizer_transient[rank] or born:
        times = np.append(times, end[-1:].repeat(2))
        levels = np.append(levels, [born + costs.optimizer_transient[rank], 0.0])
    return times, costs.base[rank] + levels
