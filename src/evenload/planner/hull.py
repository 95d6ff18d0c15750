"""Lines below a sequence: the lower convex hull."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def lines_below(values: Sequence[float], first: int = 0) -> list[tuple[float, float]]:
    """Lines (slope, offset) whose maximum is the largest convex function below the points (first + i, values[i]).

    Examples:
        >>> lines_below([0.0, 2.0, 1.0, 3.0])
        [(0.5, 0.0), (2.0, -3.0)]
        >>> lines_below([7.0], first=3)
        [(0.0, 7.0)]
    """
    corners: list[tuple[int, float]] = []
    for point in enumerate(values, start=first):
        while len(corners) >= 2 and _turns_down(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    if len(corners) == 1:
        return [(0.0, corners[0][1])]
    lines: list[tuple[float, float]] = []
    for (x0, y0), (x1, y1) in pairwise(corners):
        slope = (y1 - y0) / (x1 - x0)
        lines.append((slope, y0 - slope * x0))
    return lines


def _turns_down(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    """The middle point lies on or above the line between its neighbours."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
