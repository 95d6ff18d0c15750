"""How many micro-batches of each chunk a rank holds for backward, at the moments that can set its peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload.plan.schedule import Action, Op


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """The fullest moments of a rank: while each action runs, the micro-batches held before it, by chunk.

    Only moments that no other moment of the same operation and chunk covers (Pareto-maximal), so that for any costs
    the highest point of the rank over the whole step is the highest point over these moments.
    """

    held: NDArray[np.int64]
    """[moment, chunk]: micro-batches in flight when the action starts."""
    forward: NDArray[np.bool_]
    """[moment]: the running action is a forward (else a backward or a part of it)."""
    chunk: NDArray[np.int64]
    """[moment]: chunk of the running action."""

    @property
    def counts(self) -> NDArray[np.int64]:
        """[moment, chunk]: micro-batches in flight with the running one, forward or backward."""
        counts = self.held.copy()
        counts[self.forward, self.chunk[self.forward]] += 1
        return counts

    @property
    def fullest(self) -> NDArray[np.int64]:
        """[vector, chunk]: the maximal `counts` whatever runs: all that matters where nothing is transient."""
        return np.array(_maximal({tuple(row) for row in self.counts.tolist()}), dtype=np.int64)

    def level(self, kept: ArrayLike, forward_peak: ArrayLike, backward_peak: ArrayLike) -> NDArray[np.float64]:
        """Highest memory above the static part at every moment.

        Args:
            kept: what one micro-batch keeps, [..., chunk].
            forward_peak: highest point of a forward above its start, [..., chunk].
            backward_peak: highest point of a backward above its start, [..., chunk].

        Returns:
            [..., moment].
        """
        running = np.where(
            self.forward,
            np.asarray(forward_peak, dtype=np.float64)[..., self.chunk],
            np.asarray(backward_peak, dtype=np.float64)[..., self.chunk],
        )
        return np.asarray(kept, dtype=np.float64) @ self.held.T + running


def in_flight(order: Sequence[Action], *, interleave: int) -> InFlight:
    """The fullest moments of one rank's actions. A micro-batch is held from its forward to the end of its backward."""
    held = [0] * interleave
    moments: dict[tuple[bool, int], set[tuple[int, ...]]] = {}
    for action in order:
        moments.setdefault((action.op == Op.FORWARD, action.chunk), set()).add(tuple(held))
        if action.op == Op.FORWARD:
            held[action.chunk] += 1
        elif action.op != Op.BACKWARD_INPUT:
            held[action.chunk] -= 1
    rows = [(key, vector) for key in sorted(moments, reverse=True) for vector in _maximal(moments[key])]
    return InFlight(
        held=np.array([vector for _, vector in rows], dtype=np.int64).reshape(len(rows), interleave),
        forward=np.array([key[0] for key, _ in rows], dtype=bool),
        chunk=np.array([key[1] for key, _ in rows], dtype=np.int64),
    )


def _maximal(vectors: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The vectors that no other vector covers, largest first."""
    kept: list[tuple[int, ...]] = []
    for vector in sorted(vectors, key=lambda vector: (sum(vector), vector), reverse=True):
        if not any(all(a >= b for a, b in zip(other, vector, strict=True)) for other in kept):
            kept.append(vector)
    return kept
