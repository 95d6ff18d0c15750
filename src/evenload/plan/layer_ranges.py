"""Sets of layers as short text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

NONE: Final = "none"
"""The empty set."""


def layer_ranges(layers: Iterable[int]) -> str:
    """A set of layers as text, `none` for the empty set.

    Examples:
        >>> layer_ranges({0, 1, 2, 5}), layer_ranges([])
        ('0-2,5', 'none')
    """
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return ",".join("-".join(map(str, run)) for run in runs) or NONE
