"""From a step of few layers to the same step of many: layers that are alike do alike, so their memory events repeat.

A traced step is a row of *pieces*: stretches of memory events that belong to one layer, or to none. Wherever the pieces
visit layers one after the other, in rising or falling order, the step sweeps over its layers: forward does, backward
does, and so does an optimizer whenever it touches all parameters. In a step with more layers every sweep visits more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from evenload.errors import EvenloadError
from evenload.profile.profile import Segment

NO_LAYER: Final = -1
_LONGEST: Final = 12
"""Longest period of layer kinds that is looked for."""
UNITS: Final = 4
"""Periods of a run that are traced: the first, the last, and two between them that must do the same."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """Which layers are traced, and which of them stands for every layer."""

    traced: tuple[int, ...]
    """Numbers of the layers that are traced, rising."""
    source: tuple[int, ...]
    """For every layer, the position in `traced` of the one that stands for it."""
    twins: tuple[tuple[int, int], ...]
    """Positions in `traced` of layers that must do the same for the reduction to hold."""
    reach: tuple[int, ...]
    """For every traced layer, how many layers away a neighbour may be to be told from the ends of its run."""

    @property
    def reduces(self) -> bool:
        """Whether anything is left out."""
        return len(self.traced) < len(self.source)


def reduction(kinds: Sequence[object], *, units: int = UNITS) -> Reduction:
    """The layers to trace so that the kind of every layer, and of its neighbours, is among them.

    Args:
        kinds: kind of every layer; equal ones are alike.
        units: periods of a run that are traced, 4 or more: the first, the last, and those next to them.

    Examples:
        >>> reduction("a" * 8).traced, reduction("a" * 8).source
        ((0, 1, 6, 7), (0, 1, 1, 1, 1, 1, 2, 3))
        >>> reduction("abababababab").traced
        (0, 1, 2, 3, 8, 9, 10, 11)
    """
    traced: list[int] = []
    source: list[int] = []
    twins: list[tuple[int, int]] = []
    reach: list[int] = []
    begin = 0
    while begin < len(kinds):
        period, count = _run(kinds, begin)
        kept = min(count, units)
        first = len(traced)
        for unit in range(kept):
            number = unit if unit < kept // 2 else count - kept + unit
            traced += range(begin + number * period, begin + (number + 1) * period)
        for unit in range(count):
            stands = unit if unit < 2 or count <= units else max(1, unit - (count - kept))
            source += range(first + stands * period, first + (stands + 1) * period)
        if count > units:
            middle = first + period
            twins += [(middle + i, middle + i + period) for i in range((kept - 3) * period)]
        reach += [period if count > units else len(kinds)] * (kept * period)
        begin += count * period
    return Reduction(traced=tuple(traced), source=tuple(source), twins=tuple(twins), reach=tuple(reach))


def _run(kinds: Sequence[object], begin: int) -> tuple[int, int]:
    """(period, count) of the repetition that covers most from `begin` on; the shortest period of equal ones."""
    best = (1, 1)
    for period in range(1, min(_LONGEST, (len(kinds) - begin) // 2) + 1):
        unit = list(kinds[begin : begin + period])
        count = 1
        while list(kinds[begin + count * period : begin + (count + 1) * period]) == unit:
            count += 1
        if count * period > best[0] * best[1] and count > 1:
            best = (period, count)
    return best


@dataclass(frozen=True, kw_only=True, eq=False)
class Composition:
    """The pieces of a step with all layers, in the order in which they run."""

    piece: Ints
    """[instance]: position of the traced piece that runs."""
    layer: Ints
    """[instance]: the layer that it runs for, `NO_LAYER` for none."""
    sweep: Ints
    """[traced piece]: number of its sweep, `NO_LAYER` outside sweeps."""
    own: Ints
    """[traced layer]: the layer that it is."""

    @cached_property
    def instances(self) -> Ints:
        """[sweep, layer] -> instance; `NO_LAYER` where a sweep leaves a layer out."""
        inside = self.layer != NO_LAYER
        table = np.full((int(self.sweep.max(initial=-1)) + 1, int(self.layer.max(initial=-1)) + 1), NO_LAYER)
        table[self.sweep[self.piece[inside]], self.layer[inside]] = np.flatnonzero(inside)
        return table

    @cached_property
    def single(self) -> Ints:
        """[traced piece] -> its only instance; `NO_LAYER` for pieces of sweeps."""
        table = np.full(len(self.sweep), NO_LAYER)
        outside = self.layer == NO_LAYER
        table[self.piece[outside]] = np.flatnonzero(outside)
        return table

    def events(self, segments: Sequence[Segment]) -> NDArray[np.float64]:
        """The memory events of the whole step, from those of every traced piece."""
        columns = [np.array(segment.events, dtype=np.float64) for segment in segments]
        run = [columns[int(piece)] for piece in self.piece]
        return np.concatenate(run) if run else np.zeros(0)


def compose(layers: Sequence[int], reduced: Reduction) -> Composition:
    """Put the step of all layers together from a traced step.

    Args:
        layers: for every traced piece in order, the position of its traced layer, or `NO_LAYER`.
        reduced: which layers were traced.

    Raises:
        EvenloadError: a sweep leaves out one of two layers that stand for the same ones.
    """
    pieces: list[int] = []
    runs_for: list[int] = []
    sweep = np.full(len(layers), NO_LAYER, dtype=np.int64)
    source = np.array(reduced.source, dtype=np.int64)
    number = position = 0
    while position < len(layers):
        if layers[position] == NO_LAYER:
            pieces.append(position)
            runs_for.append(NO_LAYER)
            position += 1
            continue
        end = _sweep_end(layers, position)
        at = {layers[i]: i for i in range(position, end)}
        for one, other in reduced.twins:
            if (one in at) != (other in at):
                raise EvenloadError("layers that look alike do not do the same", fix="run all of them with --full")
        visited = np.flatnonzero(np.isin(source, list(at)))
        falling = end - position > 1 and layers[position + 1] < layers[position]
        for layer in (visited[::-1] if falling else visited).tolist():
            pieces.append(at[int(source[layer])])
            runs_for.append(layer)
        sweep[position:end] = number
        number += 1
        position = end
    return Composition(
        piece=np.array(pieces, dtype=np.int64),
        layer=np.array(runs_for, dtype=np.int64),
        sweep=sweep,
        own=np.array(reduced.traced, dtype=np.int64),
    )


def _sweep_end(layers: Sequence[int], begin: int) -> int:
    """Position after the last piece of the sweep that begins at `begin`: rising or falling, no layer twice."""
    end = begin + 1
    if end < len(layers) and layers[end] != NO_LAYER:
        rising = layers[end] > layers[begin]
        while end < len(layers) and layers[end] != NO_LAYER and layers[end] != layers[end - 1]:
            if (layers[end] > layers[end - 1]) != rising:
                break
            end += 1
    return end
