"""From the cells of a ledger to the value: strict, except that a recording may have been cut off by a signal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.errors import EvenloadError, Notice
from evenload.ledger import cells
from evenload.ledger.categories import derive
from evenload.ledger.ledger import ALIVE, Allocations, Frame, HostLine, Ledger, Mark, Metadata, Owner
from evenload.ledger.words import CATEGORIES, PHASES, Hold, MarkKind, Phase

Table = NDArray[np.int64]
_SMALLEST: Final = 2 * cells.CELL
"""A header and the metadata."""


def decode(raw: bytes, *, place: str = "ledger", end: int | None = None) -> Ledger:
    """The ledger that a table of cells holds.

    Args:
        raw: the table.
        place: what errors call it.
        end: index after the last event, for a recording that is still running.

    Raises:
        EvenloadError: it is no ledger, a newer version wrote it, it is truncated, or its content contradicts itself.
    """
    return _Reader(raw, place).ledger(end)


class _Reader:
    def __init__(self, raw: bytes, place: str) -> None:
        self._place = place
        self._check_header(raw)
        table = np.frombuffer(raw, dtype=np.int64, count=len(raw) // 8 // cells.WORDS * cells.WORDS)
        table = table.reshape(-1, cells.WORDS)
        tags = (table[:, 0] & 0xFF).astype(np.uint8)
        zero = np.flatnonzero(tags[1:] == 0)
        self._padded = len(zero) > 0
        used = int(zero[0]) + 1 if self._padded else len(table)
        self._aligned = len(raw) % cells.CELL == 0
        self._table, self._tags = table[1:used], tags[1:used]

    def ledger(self, running: int | None) -> Ledger:
        table, tags = self._table, self._tags
        if len(unknown := np.flatnonzero(~np.isin(tags, list(cells.TAGS)))):
            self._damaged(f"a cell of the unknown kind {tags[unknown[0]]}")
        ends = np.flatnonzero(tags == cells.END)
        complete = len(ends) > 0
        if complete and ends[0] != len(tags) - 1:
            self._damaged("data after its end")
        if running is None and not complete and not self._padded:
            raise EvenloadError(
                "the ledger is truncated: it breaks off before the end of the file",
                where=self._place,
                fix="copy it again, or record again",
            )
        metadata = self._metadata()
        strings = tuple(self._text(int(position)) for position in np.flatnonzero(tags == cells.STRING))
        rows = np.flatnonzero(tags == cells.ALLOCATION)
        marks = tuple(self._mark(cell, strings) for cell in table[tags == cells.MARK].tolist())
        last = int(table[ends[0], 1]) if complete else self._last(rows, marks) if running is None else running
        ledger = Ledger(
            metadata=metadata,
            allocations=_in_order(self._allocations(rows, marks)),
            end=last,
            strings=strings,
            devices=tuple(self._pick(strings, cell[1]) for cell in table[tags == cells.DEVICE].tolist()),
            frames=self._frames(strings),
            marks=marks,
            host=tuple(self._host(cell) for cell in table[tags == cells.HOST].tolist()),
            owners=self._owners(rows, strings),
            complete=complete or running is not None,
            notices=() if complete or running is not None else (self._cut_off(len(rows)),),
        )
        self._check(ledger)
        return ledger

    def _check_header(self, raw: bytes) -> None:
        if not raw:
            raise EvenloadError("the file is empty", where=self._place)
        if not raw.startswith(cells.MAGIC):
            raise EvenloadError("this is not a ledger", where=self._place, fix="name a file that evenload recorded")
        if len(raw) < _SMALLEST:
            raise EvenloadError("the ledger is truncated: only its beginning is there", where=self._place)
        version, size, order = np.frombuffer(raw, dtype=np.int64, count=3, offset=len(cells.MAGIC)).tolist()
        if order != cells.BYTE_ORDER:
            raise EvenloadError("the ledger was written on a machine of another byte order", where=self._place)
        if version > cells.VERSION:
            raise EvenloadError(
                f"the ledger has format {version}, and this evenload reads formats up to {cells.VERSION}",
                where=self._place,
                fix="read it with the evenload that wrote it, or update this one",
            )
        if version < 1 or size != cells.CELL:
            self._damaged(f"format {version} with cells of {size} bytes")

    def _metadata(self) -> Metadata:
        found = np.flatnonzero(self._tags == cells.META)
        if not len(found):
            self._damaged("no metadata")
        try:
            return msgspec.json.decode(self._text(int(found[0])), type=Metadata)
        except msgspec.MsgspecError as error:
            self._damaged(f"metadata that cannot be read ({error})")

    def _text(self, position: int) -> str:
        length = int(self._table[position, 0]) >> cells.UPPER
        count = cells.text_cells(length)
        follow = self._tags[position + 1 : position + count]
        if length < 0 or len(follow) != count - 1 or np.any(follow != cells.MORE):
            self._damaged("a text without its end")
        payload = self._table[position : position + count, 1:].tobytes()[:length]
        return payload.decode(errors="backslashreplace")

    def _pick(self, strings: tuple[str, ...], position: int) -> str:
        if not 0 <= position < len(strings):
            self._damaged(f"a reference to string {position} of {len(strings)}")
        return strings[position]

    def _frames(self, strings: tuple[str, ...]) -> tuple[Frame, ...]:
        frames: list[Frame] = []
        for cell in self._table[self._tags == cells.FRAME].tolist():
            if not -1 <= cell[1] - 1 < len(frames):
                self._damaged("a Python line that is called from a later one")
            frames.append(Frame(location=self._pick(strings, cell[2]), caller=cell[1] - 1))
        return tuple(frames)

    def _mark(self, cell: list[int], strings: tuple[str, ...]) -> Mark:
        try:
            kind = MarkKind(cell[0] >> cells.PHASE_SHIFT & 0xFF)
        except ValueError:
            self._damaged(f"a mark of unknown kind {cell[0] >> cells.PHASE_SHIFT & 0xFF}")
        if kind is MarkKind.PHASE and not 0 <= cell[3] < len(PHASES):
            self._damaged(f"a mark of the unknown phase {cell[3]}")
        return Mark(
            kind=kind,
            index=cell[1],
            time=cell[2],
            value=cell[3],
            micro_batch=(cell[0] >> cells.UPPER) - 1,
            text=self._pick(strings, cell[4] - 1) if cell[4] else None,
        )

    @staticmethod
    def _host(cell: list[int]) -> HostLine:
        index, time, step, resident, pinned, reserved, idle = cell[1:]
        return HostLine(
            index=index, time=time, step=step, resident=resident, pinned=pinned, reserved=reserved, idle=idle - 1
        )

    def _allocations(self, rows: NDArray[Any], marks: tuple[Mark, ...]) -> Allocations:
        table = self._table[rows]
        first = table[:, 0]
        freed = np.where(table[:, cells.FREED] == 0, ALIVE, table[:, cells.FREED])
        allocated = table[:, cells.ALLOCATED].copy()
        phase = (first >> cells.PHASE_SHIFT & 0xFF).astype(np.uint8)
        roles = (table[:, cells.SOURCE_AND_ROLES] >> cells.UPPER & 0xFFFF).astype(np.uint16)
        given = first >> cells.CATEGORY_SHIFT & 0xFF
        begins = [m.index for m in marks if m.kind is MarkKind.PHASE and m.value == Phase.BACKWARD.code]
        derived = derive(
            roles=roles,
            phase=phase,
            allocated=allocated,
            freed=freed,
            backward_begins=np.array(sorted(begins), dtype=np.int64),
        )
        return Allocations(
            nbytes=table[:, cells.NBYTES].copy(),
            allocated=allocated,
            last_used=table[:, cells.LAST_USED].copy(),
            freed=freed,
            time=table[:, cells.TIME].copy(),
            phase=phase,
            category=np.where(given > 0, given - 1, derived).astype(np.uint8),
            roles=roles,
            device=(first >> cells.DEVICE_SHIFT & 0xFF).astype(np.uint8),
            micro_batch=((first >> cells.UPPER) - 1).astype(np.int32),
            module=((table[:, cells.NAMES] & cells.HALF) - 1).astype(np.int32),
            operator=((table[:, cells.NAMES] >> cells.UPPER) - 1).astype(np.int32),
            source=((table[:, cells.SOURCE_AND_ROLES] & cells.HALF) - 1).astype(np.int32),
            previous=self._pairs(cells.LINK, rows, rows=True),
            reach=self._pairs(cells.REACH, rows, rows=False),
            made=self._pairs(cells.MADE, rows, rows=False),
        )

    def _owners(self, positions: NDArray[Any], strings: tuple[str, ...]) -> tuple[Owner, ...]:
        table = self._table[self._tags == cells.OWNER]
        if np.any((kinds := table[:, 0] >> cells.PHASE_SHIFT & 0xFF) >= len(Hold)):
            self._damaged("an owner of unknown kind")
        return tuple(
            Owner(
                row=row,
                hold=Hold(kind),
                chain=self._pick(strings, cell[2]),
                source=self._pick(strings, cell[3] - 1) if cell[3] else None,
            )
            for row, kind, cell in zip(
                self._rows(table[:, 1], positions).tolist(), kinds.tolist(), table.tolist(), strict=True
            )
        )

    def _pairs(self, tag: int, positions: NDArray[Any], *, rows: bool) -> NDArray[np.int64]:
        """Column of what LINK or REACH cells say about allocations, -1 elsewhere; `rows`: they say another one."""
        column = np.full(len(positions), -1, dtype=np.int64)
        pairs = self._table[self._tags == tag][:, 1:3]
        if len(pairs):
            column[self._rows(pairs[:, 0], positions)] = self._rows(pairs[:, 1], positions) if rows else pairs[:, 1]
        return column

    def _rows(self, numbers: NDArray[Any], positions: NDArray[Any]) -> NDArray[Any]:
        """Rows of allocations given as numbers of cells in the whole table, header included."""
        found = np.searchsorted(positions, numbers - 1)
        if np.any(found >= len(positions)) or np.any(positions[found] != numbers - 1):
            self._damaged("a reference to an allocation that is not there")
        return found

    def _last(self, rows: NDArray[Any], marks: tuple[Mark, ...]) -> int:
        """Index after the last event that can be seen in a recording that was cut off."""
        table = self._table[rows][:, [cells.ALLOCATED, cells.LAST_USED, cells.FREED]]
        return max([int(table.max()) + 1 if len(rows) else 0, *(mark.index for mark in marks)])

    def _check(self, ledger: Ledger) -> None:
        """References and orders that no recording breaks."""
        rows = ledger.allocations
        limits = (
            (rows.module, -1, len(ledger.strings), "string"),
            (rows.operator, -1, len(ledger.strings), "string"),
            (rows.source, -1, len(ledger.frames), "Python line"),
            (rows.device, 0, len(ledger.devices), "device"),
            (rows.phase, 0, len(PHASES), "phase"),
            (rows.category, 0, len(CATEGORIES), "category"),
            (rows.nbytes, 0, ALIVE, "size"),
        )
        for column, low, high, word in limits:
            if np.any((column < low) | (column >= high)):
                self._damaged(f"a {word} that is not there")
        if np.any(rows.freed < rows.allocated) or np.any(rows.allocated < 0):
            self._damaged("allocations that end before they begin")

    def _cut_off(self, count: int) -> Notice:
        return Notice(
            fact=f"the recording did not end by itself; everything up to there is read: {count} allocations",
            where=self._place,
        )

    def _damaged(self, what: str) -> NoReturn:
        raise EvenloadError(f"the ledger is damaged: it has {what}", where=self._place, fix="record again")


def _in_order(rows: Allocations) -> Allocations:
    """Allocations in order of allocation: those that were there before are noted when they are first used."""
    if not np.any(np.diff(rows.allocated) < 0):
        return rows
    order = np.argsort(rows.allocated, kind="stable")
    position = np.empty(len(rows), dtype=np.int64)
    position[order] = np.arange(len(rows))
    ordered = rows.take(order)
    return replace(ordered, previous=np.where(ordered.previous >= 0, position[ordered.previous], -1))
