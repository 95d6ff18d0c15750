"""Cuts the ledger of a step into pieces: stretches of events that belong to one layer, or to none.

While forward or backward runs, an event belongs to the layer that runs. Outside them, where an optimizer goes through
all parameters, it belongs to the layer of the module whose memory it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.ledger.ledger import ALIVE, Ledger
from evenload.ledger.words import MarkKind, Phase, Role
from evenload.profile.profile import Segment
from evenload.simulate.composition import NO_LAYER

_RUNS: Final = frozenset(phase.code for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE))
_LASTING: Final = Role.PARAMETER | Role.GRADIENT | Role.OPTIMIZER
_BACK: Final = frozenset(phase.code for phase in (Phase.BACKWARD, Phase.RECOMPUTE))
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """The pieces of a ledger, in order."""

    layer: tuple[int, ...]
    """[piece]: number of its layer in the list, `NO_LAYER` for none."""
    begin: Ints
    """[piece]: index of its first event; 0 for pieces of what was there before."""
    end: Ints
    """[piece]: index after it, which is where the next one begins."""
    first: Ints
    """[piece]: row of its first allocation; [piece + 1] is the row after its last."""

    def at(self, index: Ints) -> Ints:
        """Piece that an event lies in."""
        return np.searchsorted(self.begin, index, side="right") - 1


def in_order(ledger: Ledger) -> Ledger:
    """The same ledger, with what is freed at one point freed in the order in which it was allocated.

    Python and autograd clear tables and lists in any order. No level of memory between two other events changes.
    """
    rows = ledger.allocations
    gone = np.flatnonzero(rows.freed != ALIVE)
    by_index = gone[np.argsort(rows.freed[gone], kind="stable")]
    index = rows.freed[by_index]
    run = np.cumsum(np.append(True, np.diff(index) != 1)) if len(index) else index
    freed = rows.freed.copy()
    freed[by_index[np.lexsort((by_index, run))]] = index
    return replace(ledger, allocations=replace(rows, freed=freed))


def below(path: str) -> str:
    """What module paths below a path begin with; nothing, below the model itself."""
    return f"{path}." if path else ""


def layer_numbers(ledger: Ledger, path: str) -> Ints:
    """[string]: the layer of a module path below the list of layers at `path`, `NO_LAYER` for others."""
    layer = re.compile(rf"{re.escape(below(path))}(\d+)(?:\.|$)")
    found = (layer.match(text) for text in ledger.strings)
    return np.array([int(match[1]) if match else NO_LAYER for match in found] or [NO_LAYER], dtype=np.int64)


def cut(ledger: Ledger, path: str) -> Pieces:
    """Cut a ledger into pieces.

    Args:
        ledger: what was recorded, host memory included.
        path: module path of the list of layers.
    """
    rows = ledger.allocations
    of_string = layer_numbers(ledger, path)
    owner = np.where(rows.module >= 0, of_string[rows.module], NO_LAYER)
    before = int(np.searchsorted(rows.allocated, 0, side="right"))
    builder = _Builder()
    for row, layer in enumerate(owner[:before].tolist()):
        builder.event(_Event(0, row, layer, makes=True, frees=False, lasting=True), layer, runs=False)
    builder.close()
    running = tail = NO_LAYER
    previous = Phase.OTHER.code
    for event, phase in _events(ledger, owner, before):
        if _kind(phase) != _kind(previous):
            tail = running if phase not in _RUNS else NO_LAYER
            running, previous = NO_LAYER, phase
            builder.close()
        layer = event.layer
        if event.makes:
            running, tail = (layer if phase in _RUNS else NO_LAYER), NO_LAYER
        elif phase in _RUNS and (running != NO_LAYER or not event.frees):
            layer = running
        elif event.frees and tail != NO_LAYER and not event.lasting:
            layer = tail  # what the last layer of the pass left behind
        elif not event.frees:
            tail = NO_LAYER
        builder.event(event, layer, runs=running != NO_LAYER)
    return builder.pieces(len(rows), ledger.end)


class _Event(NamedTuple):
    at: int
    row: int
    """Row that is allocated or freed; -1 for the end of an operator."""
    layer: int
    """Layer that owns the memory."""
    makes: bool
    frees: bool
    lasting: bool
    """The memory is a parameter, a gradient or a state of an optimizer."""


def _events(ledger: Ledger, owner: Ints, before: int) -> Iterator[tuple[_Event, int]]:
    """Everything that happens, in order, and the phase in which it does.

    The end of an operator is an event too, where something was used last: of the layer that owns all of that.
    """
    rows = ledger.allocations
    gone = np.flatnonzero(rows.freed != ALIVE)
    used, of_used = _common(rows.last_used, owner)
    made = np.arange(before, len(rows))
    index = np.concatenate([rows.allocated[before:], rows.freed[gone], used])
    row = np.concatenate([made, gone, np.full(len(used), -1, dtype=np.int64)])
    layer = np.concatenate([owner[made], owner[gone], of_used])
    what = np.repeat([0, 1, 2], [len(made), len(gone), len(used)])
    lasting = (rows.roles[row] & _LASTING.value) != 0
    order = np.argsort(index, kind="stable")
    columns = (index, row, layer, what == 0, what == 1, lasting)
    listed = zip(*(column[order].tolist() for column in columns), strict=True)
    yield from zip(map(_Event._make, listed), _phases(ledger, index[order]).tolist(), strict=True)


def _common(index: Ints, owner: Ints) -> tuple[Ints, Ints]:
    """(different indexes above 0, the layer that is the owner at all rows with this index or `NO_LAYER`)."""
    rows = np.flatnonzero(index > 0)
    if not len(rows):
        return rows, rows
    rows = rows[np.argsort(index[rows], kind="stable")]
    starts = np.flatnonzero(np.append(True, np.diff(index[rows]) != 0))
    least, most = np.minimum.reduceat(owner[rows], starts), np.maximum.reduceat(owner[rows], starts)
    return index[rows][starts], np.where(least == most, least, NO_LAYER)


def segments(ledger: Ledger, pieces: Pieces) -> list[Segment]:
    """Memory events of every piece on the followed device: signed bytes."""
    rows, mask = ledger.allocations, ledger.on_device
    changes: list[list[tuple[int, float]]] = [[] for _ in pieces.layer]
    for piece, (start, stop) in enumerate(zip(pieces.first[:-1].tolist(), pieces.first[1:].tolist(), strict=True)):
        for row in range(start, stop):
            if mask[row]:
                changes[piece].append((int(rows.allocated[row]), float(rows.nbytes[row])))
    gone = np.flatnonzero(mask & (rows.freed != ALIVE))
    for row, piece in zip(gone.tolist(), pieces.at(rows.freed[gone]).tolist(), strict=True):
        changes[int(piece)].append((int(rows.freed[row]), -float(rows.nbytes[row])))
    return [Segment(events=tuple(change for _, change in sorted(events, key=lambda e: e[0]))) for events in changes]


class _Builder:
    """Opens a piece where the layer of an event is another one."""

    def __init__(self) -> None:
        self._open: list[_Piece] = []
        self._rows = 0
        self._pass = 0
        self._closed = True

    def close(self) -> None:
        """The next event begins a piece whatever its layer, in another pass over the layers."""
        self._closed = True
        self._pass += 1

    def event(self, event: _Event, layer: int, *, runs: bool) -> None:
        """Something happens for a layer; `runs`: the layer is running, not only the owner of the memory."""
        if self._closed and self._open and NO_LAYER not in {layer, self._open[-1].layer}:
            self._begin(event, NO_LAYER, runs=False)  # passes are told apart by a piece of no layer between them
        if self._closed or self._open[-1].layer != layer:
            self._begin(event, layer, runs=runs)
        self._closed = False
        if event.makes:
            self._rows = event.row + 1

    def _begin(self, event: _Event, layer: int, *, runs: bool) -> None:
        self._open.append(_Piece(layer=layer, begin=event.at, first=self._rows, runs=runs, number=self._pass))

    def pieces(self, count: int, end: int) -> Pieces:
        """All pieces, with what runs between the layers of a pass joined to the layer before."""
        kept: list[_Piece] = []
        inside = False
        for position, piece in enumerate(self._open):
            if inside and (kept[-1].layer, kept[-1].number) == (piece.layer, piece.number):
                inside = False
                continue  # the other half of a layer that something ran in
            after = self._open[position + 1] if position + 1 < len(self._open) else None
            inside = bool(kept and after and (_between(kept[-1], piece, after) or _late(kept[-1], piece, after)))
            if not inside:
                kept.append(piece)
        begin = np.array([piece.begin for piece in kept], dtype=np.int64)
        return Pieces(
            layer=tuple(piece.layer for piece in kept),
            begin=begin,
            end=np.append(begin[1:], end),
            first=np.array([*(piece.first for piece in kept), count], dtype=np.int64),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    layer: int
    begin: int
    first: int
    runs: bool
    """The layer runs here; otherwise it is only the owner of the memory, or there is none."""
    number: int
    """Of the pass over the layers."""


def _between(before: _Piece, piece: _Piece, after: _Piece) -> bool:
    """Whether a piece of no layer lies inside a layer that runs, or between two neighbours in one pass."""
    return (
        piece.layer == NO_LAYER
        and before.runs
        and after.runs
        and before.number == piece.number == after.number
        and abs(before.layer - after.layer) <= 1
    )


def _late(before: _Piece, piece: _Piece, after: _Piece) -> bool:
    """Whether a piece only frees what the neighbour of a layer left behind, as a loop over parameters does."""
    return (
        before.layer == after.layer != NO_LAYER
        and before.number == piece.number == after.number
        and piece.first == after.first
        and piece.layer in {NO_LAYER, before.layer - 1, before.layer + 1}
    )


def _phases(ledger: Ledger, index: Ints) -> Ints:
    """Code of the phase in which events lie."""
    marks = sorted((mark.index, mark.value) for mark in ledger.marks if mark.kind is MarkKind.PHASE)
    begins = np.array([0, *(begin for begin, _ in marks)], dtype=np.int64)
    codes = np.array([Phase.OTHER.code, *(code for _, code in marks)], dtype=np.int64)
    return codes[np.searchsorted(begins, index, side="right") - 1]


def _kind(phase: int) -> int:
    """Phases that one pass over the layers consists of share a kind."""
    return Phase.BACKWARD.code if phase in _BACK else phase
