"""Rows that no other row beats in every column."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenload.planner.costs import Floats, Ints


def nondominated(rows: Floats) -> Ints:
    """Indices of the rows that no other row is below or equal to in all columns; of equal rows the first.

    Args:
        rows: [row, column], smaller is better.

    Examples:
        >>> nondominated(np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [1.0, 3.0]])).tolist()
        [0, 1]
    """
    order = np.lexsort((np.arange(len(rows)), *rows.T[::-1]))
    ordered = rows[order]
    if rows.shape[1] == 2:  # the second column must fall along the first
        lowest = np.minimum.accumulate(ordered[:, 1])
        keep = np.ones(len(rows), dtype=bool)
        keep[1:] = ordered[1:, 1] < lowest[:-1]
        return np.sort(order[keep])
    kept = np.empty((0, rows.shape[1]))
    picked: list[int] = []
    for index, row in zip(order.tolist(), ordered, strict=True):
        if len(kept) and (kept <= row).all(axis=1).any():
            continue
        kept = np.vstack([kept, row])
        picked.append(index)
    return np.array(sorted(picked), dtype=np.int64)


def lowest_by(keys: tuple[Floats, ...], among: NDArray[np.bool_]) -> int | None:
    """Index of the lexicographically smallest row of `keys` where `among` holds, or None."""
    indices = np.flatnonzero(among)
    if not len(indices):
        return None
    return int(indices[np.lexsort(tuple(key[indices] for key in reversed(keys)))[0]])
