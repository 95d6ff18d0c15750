"""From the ledger of few layers to that of all: every layer that was not run gets the rows of the one like it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from evenload.errors import EvenloadError
from evenload.ledger.ledger import ALIVE, Ledger, Mark
from evenload.record.pieces import Pieces, below, cut, in_order, layer_numbers
from evenload.simulate.composition import NO_LAYER, Composition, Reduction, compose

Ints = NDArray[np.int64]
_FIX: Final = "run all of them with --full"
_UNLIKE: Final = "layers that look alike do not do the same"


def expand(ledger: Ledger, path: str, reduced: Reduction, *, sizes: bool = True) -> Ledger:
    """The ledger of a step with all layers, from the ledger of the traced ones.

    Args:
        ledger: what was recorded of the model with the traced layers only.
        path: module path of the list of layers.
        reduced: which layers were traced.
        sizes: layers that stand for the same ones must agree in the bytes of what they make, too.

    Raises:
        EvenloadError: layers that should be alike were not.
    """
    ledger = in_order(ledger)
    pieces = cut(ledger, path)
    if missing := set(range(len(reduced.traced))) - set(pieces.layer):
        raise EvenloadError(f"layer {reduced.traced[min(missing)]} allocates nothing of its own", fix=_FIX)
    composition = compose(pieces.layer, reduced)
    return _Expansion(ledger, pieces, composition, reduced, path, sizes=sizes).ledger()


class _Expansion:
    """Builds the ledger of all layers.

    An instance is one run of a traced piece for one layer. What happens in a piece happens in every instance of it, to
    the memory of the same neighbours: so frees and last uses are repeated where they happen, not where the memory was
    made.
    """

    def __init__(
        self,
        ledger: Ledger,
        pieces: Pieces,
        composition: Composition,
        reduced: Reduction,
        path: str,
        *,
        sizes: bool,
    ) -> None:
        self._ledger = ledger
        self._sizes = sizes
        self._pieces = pieces
        self._made = composition
        self._path = path
        self._layer = np.array(pieces.layer, dtype=np.int64)
        self._source = np.array(reduced.source, dtype=np.int64)
        self._reach = np.array(reduced.reach, dtype=np.int64)
        rows = ledger.allocations
        self._of_row = np.searchsorted(pieces.first, np.arange(len(rows)), side="right") - 1
        """[row]: piece that it was allocated in."""
        length = (pieces.end - pieces.begin)[composition.piece]
        ends = np.cumsum(length)
        self._begin = ends - length + pieces.begin[0]
        """[instance]: index of its first event."""
        self._end = int(ends[-1] + pieces.begin[0]) if len(ends) else ledger.end
        counts = np.diff(pieces.first)[composition.piece]
        self._starts = np.cumsum(counts) - counts
        """[instance]: its first row."""
        self._frees = _Events.of(np.flatnonzero(rows.freed != ALIVE), rows.freed, pieces)
        self._uses = _Events.of(np.flatnonzero(rows.last_used > 0), rows.last_used, pieces)
        self._check_twins(reduced)

    def ledger(self) -> Ledger:
        rows = self._ledger.allocations
        instance, source = _repeated(np.diff(self._pieces.first), self._made.piece)
        source += self._pieces.first[self._made.piece[instance]]
        piece, layer = self._made.piece[instance], self._made.layer[instance]
        moved = rows.allocated[source] - self._pieces.begin[piece] + self._begin[instance]
        columns = rows.take(source)
        return replace(
            self._ledger,
            allocations=replace(
                columns,
                allocated=np.where(rows.allocated[source] == 0, 0, moved),
                freed=self._linked(self._frees, len(source), rows.freed[source] != ALIVE, ALIVE),
                last_used=self._linked(self._uses, len(source), rows.last_used[source] > 0, 0),
                module=self._modules(columns.module, layer),
                previous=self._previous(rows.previous[source], piece, layer),
            ),
            end=self._end,
            strings=tuple(self._strings),
            marks=self._marks(),
        )

    def _linked(self, events: _Events, count: int, expected: NDArray[np.bool_], never: int) -> Ints:
        """Index at which something happens to every row; `never` for rows to which it does not."""
        instance, position = _repeated(np.diff(events.first), self._made.piece)
        position += events.first[self._made.piece[instance]]
        row, index = events.row[position], events.index[position]
        piece, layer = self._made.piece[instance], self._made.layer[instance]
        at = index - self._pieces.begin[piece] + self._begin[instance]
        shared = (self._layer[piece] == NO_LAYER) & (self._layer[self._of_row[row]] != NO_LAYER)
        column = np.full(count, never, dtype=np.int64)
        target = self._row(row[~shared], piece[~shared], layer[~shared])
        column[target] = at[~shared]
        for traced, when in zip(row[shared].tolist(), at[shared].tolist(), strict=True):
            column[self._copies(traced)] = when
        if np.any((column != never) != expected) or len(np.unique(target)) != len(target):
            raise EvenloadError(_UNLIKE, fix=_FIX)
        return column

    def _row(self, row: Ints, piece: Ints, layer: Ints) -> Ints:
        """Rows of the new ledger, seen from instances of pieces that do something to them."""
        home = self._of_row[row]
        return self._starts[self._instance(home, piece, layer)] + row - self._pieces.first[home]

    def _copies(self, row: int) -> Ints:
        """All rows that a row stands for."""
        home = int(self._of_row[row])
        instances = self._made.instances[self._made.sweep[home], self._source == self._layer[home]]
        return self._starts[instances] + row - self._pieces.first[home]

    def _instance(self, target: Ints, piece: Ints, layer: Ints) -> Ints:
        """Instance of a piece `target`, seen from the instance of `piece` for `layer`.

        A layer that is near is meant as seen from there; from outside the layers, each is meant as itself.
        """
        of_target, of_piece = self._layer[target], self._layer[piece]
        apart = of_target - of_piece
        inside = (of_target != NO_LAYER) & (of_piece != NO_LAYER)
        limit = np.minimum(self._reach[np.maximum(of_target, 0)], self._reach[np.maximum(of_piece, 0)])
        if np.any(inside & (np.abs(apart) > limit)):
            raise EvenloadError(
                "a layer uses the memory of a distant one, and not every layer has such a one", fix=_FIX
            )
        wanted = np.where(inside, layer + apart, self._made.own[np.maximum(of_target, 0)])
        table, sweep = self._made.instances, self._made.sweep[target]
        outside = sweep == NO_LAYER
        if np.any(~outside & ((wanted < 0) | (wanted >= table.shape[1]))):
            raise EvenloadError(_UNLIKE, fix=_FIX)
        of_sweep = table[np.maximum(sweep, 0), np.where(outside, 0, wanted)] if table.size else sweep
        found = np.where(outside, self._made.single[target], of_sweep)
        if np.any(found == NO_LAYER):
            raise EvenloadError(_UNLIKE, fix=_FIX)
        return found

    def _previous(self, previous: Ints, piece: Ints, layer: Ints) -> Ints:
        """Rows that resized rows replaced."""
        column = np.full(len(previous), -1, dtype=np.int64)
        has = np.flatnonzero(previous >= 0)
        if len(has):
            column[has] = self._row(previous[has], piece[has], layer[has])
        return column

    def _modules(self, module: NDArray[np.int32], layer: Ints) -> NDArray[np.int32]:
        """Module paths with the numbers of the layers that they stand for."""
        numbers = layer_numbers(self._ledger, self._path)
        self._strings = list(self._ledger.strings)
        known: dict[tuple[int, int], int] = {}
        prefix = re.compile(rf"({re.escape(below(self._path))})\d+")
        column = module.copy()
        own = np.where(module >= 0, numbers[module], NO_LAYER)
        traced = self._made.own[np.maximum(own, 0)]
        meant = np.where((layer == NO_LAYER) | (own == NO_LAYER), traced, layer)
        for row in np.flatnonzero((own != NO_LAYER) & (meant != own)).tolist():
            key = (int(module[row]), int(meant[row]))
            if key not in known:
                known[key] = len(self._strings)
                self._strings.append(prefix.sub(rf"\g<1>{key[1]}", self._ledger.strings[key[0]], count=1))
            column[row] = known[key]
        return column

    def _marks(self) -> tuple[Mark, ...]:
        """Marks, once for every instance of the piece that they lie in."""
        of_piece: dict[int, list[Mark]] = {}
        for mark in self._ledger.marks:
            piece = max(int(self._pieces.at(np.array([mark.index]))[0]), 0)
            of_piece.setdefault(piece, []).append(mark)
        marks: list[Mark] = []
        for instance, piece in enumerate(self._made.piece.tolist()):
            shift = int(self._begin[instance] - self._pieces.begin[piece])
            marks += [replace(mark, index=mark.index + shift) for mark in of_piece.get(piece, ())]
        return tuple(marks)

    def _check_twins(self, reduced: Reduction) -> None:
        """Layers that stand for the same ones did the same, event for event."""
        for one, other in reduced.twins:
            positions = [np.flatnonzero(self._layer == layer).tolist() for layer in (one, other)]
            if len(positions[0]) != len(positions[1]) or any(
                self._what(first) != self._what(second) for first, second in zip(*positions, strict=True)
            ):
                first, second = self._made.own[[one, other]].tolist()
                raise EvenloadError(f"layers {first} and {second} look alike and do not do the same", fix=_FIX)

    def _what(self, piece: int) -> tuple[object, ...]:
        """What happens in a piece, as its layer sees it."""
        rows = self._ledger.allocations
        begin, stop = int(self._pieces.begin[piece]), int(self._pieces.end[piece])
        mine = slice(int(self._pieces.first[piece]), int(self._pieces.first[piece + 1]))
        made = [
            tuple((column[mine] - shift).tolist())
            for column, shift in (
                (rows.allocated, begin),
                *((column, 0) for column in (rows.operator, rows.device, rows.phase, rows.roles)),
                *(((rows.nbytes, 0),) if self._sizes else ()),
            )
        ]
        marks = [(mark.index - begin, mark.kind) for mark in self._ledger.marks if begin <= mark.index < stop]
        return (stop - begin, made, self._done(self._frees, piece), self._done(self._uses, piece), marks)

    def _done(self, events: _Events, piece: int) -> list[tuple[int, ...]]:
        """(when, to a row of how far a layer, which row there) of everything in a piece."""
        mine = slice(int(events.first[piece]), int(events.first[piece + 1]))
        row, index = events.row[mine], events.index[mine]
        home = self._of_row[row]
        layer = self._layer[home]
        apart = np.where(layer == NO_LAYER, len(self._source) + home, layer - self._layer[piece])
        columns = (index - self._pieces.begin[piece], apart, row - self._pieces.first[home])
        return sorted(zip(*(column.tolist() for column in columns), strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Events:
    """Things that happen to rows, piece by piece."""

    row: Ints
    index: Ints
    first: Ints
    """[piece]: position of its first event; [piece + 1] is the position after its last."""

    @classmethod
    def of(cls, rows: Ints, index: Ints, pieces: Pieces) -> _Events:
        """What happens to some rows at the indexes in a column."""
        piece = np.maximum(pieces.at(index[rows]), 0)
        order = np.lexsort((index[rows], piece))
        first = np.searchsorted(piece[order], np.arange(len(pieces.layer) + 1))
        return cls(row=rows[order], index=index[rows][order], first=first)


def _repeated(counts: Ints, chosen: Ints) -> tuple[Ints, Ints]:
    """(position in `chosen`, number within it) for everything in chosen groups of which group i has counts[i]."""
    lengths = counts[chosen]
    group = np.repeat(np.arange(len(chosen)), lengths)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
