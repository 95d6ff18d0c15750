"""Everything that one chunk can do: its layers under every order of recompute choices that settings can express."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from typing import Final

import numpy as np

from evenload.planner.costs import BOTH, CHOICES, COMM, FULL, NONE, SELECT, EndCosts, Floats, Ints, KindCosts
from evenload.planner.pareto import nondominated

ALL_MIXES: Final = 40
"""Up to so many layers every mix of choices is listed; above, mixes of two choices and a few layers of the others."""
FEW: Final = 3


@dataclass(frozen=True, kw_only=True)
class ChunkOptions:
    """The options of one chunk, arrays over the options."""

    layers: int
    base: float
    """What the chunk's layers hold all through the step."""
    born: float
    """Gradients that come to be in the chunk's first backward of a step."""
    parameters: float
    counts: Ints
    """[option, choice]: layers under each of `CHOICES`, in their order in the chunk."""
    forward: Floats
    backward: Floats
    recompute: Floats
    kept: Floats
    """What one micro-batch leaves for backward."""
    forward_peak: Floats
    """Highest point of a forward above its start."""
    backward_peak: Floats
    """Highest point of a backward above its start."""
    first_backward_peak: Floats
    """That of the first backward of a step."""

    def __len__(self) -> int:
        return len(self.counts)

    def take(self, rows: Ints) -> ChunkOptions:
        """Some of the options."""
        return ChunkOptions(
            layers=self.layers,
            base=self.base,
            born=self.born,
            parameters=self.parameters,
            counts=self.counts[rows],
            forward=self.forward[rows],
            backward=self.backward[rows],
            recompute=self.recompute[rows],
            kept=self.kept[rows],
            forward_peak=self.forward_peak[rows],
            backward_peak=self.backward_peak[rows],
            first_backward_peak=self.first_backward_peak[rows],
        )

    def best(self) -> ChunkOptions:
        """The options that no other beats in time and memory."""
        peaks = [self.forward_peak, self.backward_peak]
        peaks += [self.first_backward_peak] if self.born else []
        rows = np.stack([self.forward, self.backward, self.kept, *peaks], axis=1)
        varied = rows[:, [0, *(column for column in range(1, rows.shape[1]) if np.ptp(rows[:, column]) > 0)]]
        same = np.array_equal(self.forward_peak, self.kept) and not any(peak.any() for peak in peaks[1:])
        return self.take(nondominated(rows[:, 1:3] if same and np.ptp(self.forward) == 0 else varied))


def mixes(layers: int, available: Sequence[int]) -> Ints:
    """Layers under each choice, [mix, choice], for all mixes that "the first n layers" can express.

    A chunk has select-only or comm-only layers, never both. Only choices in `available` get layers.

    Examples:
        >>> mixes(2, [FULL, NONE]).tolist()
        [[0, 0, 0, 0, 2], [1, 0, 0, 0, 1], [2, 0, 0, 0, 0]]
    """
    rows: set[tuple[int, ...]] = set()
    for half in (SELECT, COMM):
        groups = [choice for choice in (FULL, BOTH, half, NONE) if choice in available]
        for parts in _parts(layers, len(groups)):
            row = [0] * len(CHOICES)
            for choice, count in zip(groups, parts, strict=True):
                row[choice] = count
            rows.add(tuple(row))
    return np.array(sorted(rows), dtype=np.int64).reshape(-1, len(CHOICES))


def _parts(total: int, groups: int) -> set[tuple[int, ...]]:
    """Ways to divide a number into an ordered row of groups."""
    if groups == 0:
        return set() if total else {()}
    if total <= ALL_MIXES:
        heads = product(range(total + 1), repeat=groups - 1)
        return {(*head, total - sum(head)) for head in heads if sum(head) <= total}
    few = FEW if total <= 4 * ALL_MIXES else 1
    found: set[tuple[int, ...]] = set()
    for many, rest in permutations(range(groups), min(2, groups)) if groups > 1 else [(0, 0)]:
        others = [group for group in range(groups) if group not in {many, rest}]
        for small in product(range(few + 1), repeat=len(others)):
            left = total - sum(small)
            for count in range(left + 1) if groups > 1 else [total]:
                row = [0] * groups
                row[many], row[rest] = (count, left - count) if groups > 1 else (total, total)
                for group, size in zip(others, small, strict=True):
                    row[group] = size
                found.add(tuple(row))
    return found


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Costs of the layers of one chunk, summed from its start, [choice, layers + 1]."""

    costs: Sequence[KindCosts]
    """One entry per layer."""
    bounds: Ints
    """[option, choice + 1]: where each choice's layers begin and end."""
    kept: Floats = field(init=False)
    born: Floats = field(init=False)
    """[layers + 1]: gradients that come to be in the first n layers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", self.running("kept"))
        object.__setattr__(self, "born", np.concatenate([[0.0], np.cumsum([cost.born for cost in self.costs])]))

    def running(self, name: str) -> Floats:
        """Sum of a cost over the first n layers, [choice, n]."""
        table = np.zeros((len(CHOICES), len(self.costs) + 1))
        if self.costs:
            table[:, 1:] = np.cumsum([getattr(cost, name) for cost in self.costs], axis=0).T
        return table

    def total(self, name: str) -> Floats:
        """Sum of a cost over the chunk, [option]."""
        table = self.running(name)
        return sum((self.part(table, choice) for choice in range(len(CHOICES))), np.zeros(len(self.bounds)))

    def part(self, table: Floats, choice: int) -> Floats:
        """Sum over the layers of one choice, [option]."""
        return table[choice, self.bounds[:, choice + 1]] - table[choice, self.bounds[:, choice]]

    def peaks(self, choice: int) -> tuple[Floats, Floats, Floats]:
        """Highest points while the layers of one choice run, above their start: forward, backward, first backward."""
        layers = len(self.costs)
        begin, end = self.bounds[:, choice], self.bounds[:, choice + 1]
        kept = self.kept[choice]
        rest = kept - self.born
        rising = np.array([cost.forward_peak[choice] for cost in self.costs]) + kept[:-1]
        falling = np.array([cost.backward_peak[choice] for cost in self.costs]) + kept[1:]
        for_the_first_time = np.array([cost.first_backward_peak[choice] for cost in self.costs]) + rest[1:]
        highest = np.full((3, layers + 1, layers + 1), -np.inf)
        for first in range(layers):
            for row, values in enumerate((rising, falling, for_the_first_time)):
                highest[row, first, first + 1 :] = np.maximum.accumulate(values[first:])
        return (
            highest[0, begin, end] - kept[begin],
            highest[1, begin, end] - kept[end],
            highest[2, begin, end] - rest[end],
        )


def chunk_options(costs: Sequence[KindCosts], before: EndCosts, after: EndCosts) -> ChunkOptions:
    """All options of a chunk.

    Args:
        costs: costs of every block that the chunk holds, in order.
        before: layers that run before them (the embedding, in the first chunk).
        after: layers that run after them (the head, in the last chunk).
    """
    known = [choice for choice in range(len(CHOICES)) if any(cost.available[choice] for cost in costs)]
    counts = mixes(len(costs), known)
    sums = _Sums(costs=costs, bounds=np.concatenate([np.zeros((len(counts), 1), int), counts.cumsum(axis=1)], axis=1))
    missing = np.zeros((len(CHOICES), len(costs) + 1))
    if costs:
        missing[:, 1:] = np.cumsum([~cost.available for cost in costs], axis=0).T
    possible = sum((sums.part(missing, choice) for choice in known), np.zeros(len(counts))) == 0
    forward_peak, backward_peak, first_backward_peak = _peaks(sums, before, after)
    kept = before.kept + sums.total("kept") + after.kept
    options = ChunkOptions(
        layers=len(costs),
        base=before.base + sum(cost.base for cost in costs) + after.base,
        born=before.born + sum(cost.born for cost in costs) + after.born,
        parameters=before.parameters + sum(cost.parameters for cost in costs) + after.parameters,
        counts=counts,
        forward=before.forward + sums.total("forward") + after.forward,
        backward=before.backward + sums.total("backward") + after.backward,
        recompute=sums.total("recompute"),
        kept=kept,
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        first_backward_peak=first_backward_peak,
    )
    return options.take(np.flatnonzero(possible))


def _peaks(sums: _Sums, before: EndCosts, after: EndCosts) -> tuple[Floats, Floats, Floats]:
    """Highest points of a forward, a backward and a step's first backward of the chunk above their starts, [option]."""
    options = len(sums.bounds)
    parts = [sums.part(sums.kept, choice) for choice in range(len(CHOICES))]
    births = [
        sums.born[sums.bounds[:, choice + 1]] - sums.born[sums.bounds[:, choice]] for choice in range(len(CHOICES))
    ]
    highs = [sums.peaks(choice) for choice in range(len(CHOICES))] if sums.costs else []
    forward = np.full(options, before.forward_peak)
    level = np.full(options, before.kept)
    for choice, high in enumerate(highs):
        forward = np.maximum(forward, level + high[0])
        level = level + parts[choice]
    forward = np.maximum(forward, level + after.forward_peak)
    backward, first = np.full(options, after.backward_peak), np.full(options, after.first_backward_peak)
    level, there = np.full(options, -after.kept), np.full(options, after.born)
    for choice in range(len(highs) - 1, -1, -1):
        backward = np.maximum(backward, level + highs[choice][1])
        first = np.maximum(first, level + there + highs[choice][2])
        level, there = level - parts[choice], there + births[choice]
    backward = np.maximum(backward, level + before.backward_peak)
    return forward, backward, np.maximum(first, level + there + before.first_backward_peak)
