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
    born: NDArray[np.int64]
    """[moment, chunk]: 1 where a backward of the chunk has ended, so that its gradients are there."""
    first: NDArray[np.bool_]
    """[moment]: the running action is the first backward of its chunk."""

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

    def level(
        self,
        kept: ArrayLike,
        forward_peak: ArrayLike,
        backward_peak: ArrayLike,
        *,
        first_backward_peak: ArrayLike | None = None,
        born: ArrayLike = 0.0,
    ) -> NDArray[np.float64]:
        """Highest memory above the static part at every moment.

        Args:
            kept: what one micro-batch keeps, [..., chunk].
            forward_peak: highest point of a forward above its start, [..., chunk].
            backward_peak: highest point of a backward above its start, [..., chunk].
            first_backward_peak: that of the first backward of a step; None: as of all others.
            born: gradients that come to be in it, [..., chunk].

        Returns:
            [..., moment].
        """
        usual = np.asarray(backward_peak, dtype=np.float64)
        first = usual if first_backward_peak is None else np.asarray(first_backward_peak, dtype=np.float64)
        backward = np.where(self.first, first[..., self.chunk], usual[..., self.chunk])
        running = np.where(self.forward, np.asarray(forward_peak, dtype=np.float64)[..., self.chunk], backward)
        made = np.asarray(born, dtype=np.float64)
        there = made @ self.born.T if made.ndim else made
        return np.asarray(kept, dtype=np.float64) @ self.held.T + there + running


def in_flight(order: Sequence[Action], *, interleave: int, births: bool = False) -> InFlight:
    """The fullest moments of one rank's actions. A micro-batch is held from its forward to the end of its backward.

    Args:
        order: what the rank does.
        interleave: chunks of the rank.
        births: tell moments apart by the chunks whose gradients are there, and the first backward of a chunk from the
            others; without, gradients are taken to be there all the time.
    """
    held, born = [0] * interleave, [0] * interleave
    moments: dict[tuple[bool, int, bool], set[tuple[int, ...]]] = {}
    for action in order:
        forward = action.op == Op.FORWARD
        first = births and not forward and not born[action.chunk]
        moments.setdefault((forward, action.chunk, first), set()).add((*held, *born))
        if forward:
            held[action.chunk] += 1
        elif action.op != Op.BACKWARD_INPUT:
            held[action.chunk] -= 1
            born[action.chunk] = int(births)
    rows = [(key, vector) for key in sorted(moments, reverse=True) for vector in _maximal(moments[key])]
    vectors = np.array([vector for _, vector in rows], dtype=np.int64).reshape(len(rows), 2 * interleave)
    return InFlight(
        held=vectors[:, :interleave],
        forward=np.array([key[0] for key, _ in rows], dtype=bool),
        chunk=np.array([key[1] for key, _ in rows], dtype=np.int64),
        born=vectors[:, interleave:],
        first=np.array([key[2] for key, _ in rows], dtype=bool),
    )


def _maximal(vectors: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The vectors that no other vector covers, largest first."""
    kept: list[tuple[int, ...]] = []
    for vector in sorted(vectors, key=lambda vector: (sum(vector), vector), reverse=True):
        if not any(all(a >= b for a, b in zip(other, vector, strict=True)) for other in kept):
            kept.append(vector)
    return kept
