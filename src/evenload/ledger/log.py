"""The growing table behind a recording: in memory, or in a file that survives the process."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from time import perf_counter_ns
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.errors import EvenloadError, Notice
from evenload.ledger import cells
from evenload.ledger.ledger import ALIVE, HostLine, Ledger, Mark, Metadata
from evenload.ledger.reading import decode
from evenload.ledger.words import Hold

FIRST_BYTES: Final = 2**20
LARGEST_STEP: Final = 2**26
"""The table doubles until it grows by this much at a time."""


class Log:
    """Writes a ledger while it happens.

    Positions of allocations are word offsets into `words`. The columns that change (`LAST_USED`, `FREED`, the upper
    half of `SOURCE_AND_ROLES`) may be written there directly: `log.words[position + cells.LAST_USED] = index`.
    Growing replaces `words`, so never keep it.
    """

    words: memoryview
    """The table as signed 64-bit words."""

    def __init__(self, metadata: Metadata, path: str | Path | None = None, *, force: bool = False):
        """Start a table.

        Args:
            metadata: where the ledger comes from.
            path: file to write; None keeps the table in memory.
            force: replace a file that exists.

        Raises:
            EvenloadError: the file exists and `force` is off, or it cannot be written.
        """
        self._place: _Place = _Memory() if path is None else _File(Path(path).absolute(), force=force)
        self.words = self._place.words
        self.problem: Notice | None = None
        """Why the file breaks off; the recording goes on in memory."""
        self._next = cells.WORDS
        self._strings: dict[str, int] = {}
        self._devices: dict[str, int] = {}
        self._frames: dict[tuple[str, int], int] = {}
        self._start = perf_counter_ns()
        self._put(2, np.array([cells.VERSION, cells.CELL, cells.BYTE_ORDER], dtype=np.int64).tobytes())
        self._put(0, cells.MAGIC)
        self._text(cells.META, msgspec.json.encode(metadata))

    def string(self, text: str) -> int:
        """Position of a string in the table of strings."""
        position = self._strings.get(text)
        if position is None:
            position = self._strings[text] = len(self._strings)
            self._text(cells.STRING, text.encode(errors="backslashreplace"))
        return position

    def text(self, position: int) -> str:
        """The string at a position."""
        return next(text for text, known in self._strings.items() if known == position)

    def device(self, name: str) -> int:
        """Code of a device."""
        code = self._devices.get(name)
        if code is None:
            code = self._devices[name] = len(self._devices)
            self._cell(cells.DEVICE, self.string(name))
        return code

    def frame(self, location: str, caller: int) -> int:
        """Position of a Python line, called from the frame at `caller` (-1: none)."""
        key = (location, caller)
        position = self._frames.get(key)
        if position is None:
            position = self._frames[key] = len(self._frames)
            self._cell(cells.FRAME, caller + 1, self.string(location))
        return position

    def now(self) -> int:
        """Nanoseconds since the recording began."""
        return perf_counter_ns() - self._start

    def allocation(self, head: int, nbytes: int, index: int, names: int, source_and_roles: int) -> int:
        """Add an allocation and return its position.

        Args:
            head: `head(...)` of its phase, device and micro-batch.
            nbytes: bytes of the storage.
            index: index of the event.
            names: `names(module, operator)`.
            source_and_roles: frame + 1 | roles << 32.
        """
        position = self._next
        following = position + cells.WORDS
        if following >= len(self.words):
            self._grow()
        words = self.words
        words[position + 1] = nbytes
        words[position + 2] = index
        words[position + 3] = perf_counter_ns() - self._start
        words[position + 4] = names
        words[position + 7] = source_and_roles
        words[position] = head
        self._next = following
        return position

    def mark(self, mark: Mark) -> int:
        """Add a mark and return its position."""
        tag = cells.MARK | mark.kind << cells.PHASE_SHIFT | (mark.micro_batch + 1) << cells.UPPER
        text = 0 if mark.text is None else self.string(mark.text) + 1
        return self._cell(tag, mark.index, mark.time, mark.value, text)

    def move(self, position: int, index: int) -> None:
        """Put a mark at a later event."""
        self.words[position + 1] = index

    def host(self, line: HostLine) -> None:
        """Add the host line of a step."""
        self._cell(
            cells.HOST, line.index, line.time, line.step, line.resident, line.pinned, line.reserved, line.idle + 1
        )

    def link(self, position: int, previous: int) -> None:
        """Say that an allocation replaced another one when their storage was resized."""
        self._cell(cells.LINK, position // cells.WORDS, previous // cells.WORDS)

    def reach(self, position: int, nbytes: int) -> None:
        """Say how many bytes of an allocation tensors still refer to."""
        self._cell(cells.REACH, position // cells.WORDS, nbytes)

    def owner(self, position: int, hold: Hold, chain: str, source: str | None = None) -> None:
        """Say who holds an allocation."""
        held = 0 if source is None else self.string(source) + 1
        self._cell(cells.OWNER | hold << cells.PHASE_SHIFT, position // cells.WORDS, self.string(chain), held)

    def made(self, position: int, index: int) -> None:
        """Say at which index the maker of an allocation ran."""
        self._cell(cells.MADE, position // cells.WORDS, index)

    def extend(self, table: NDArray[np.int64]) -> int:
        """Add ready-made cells, shaped [cells, 8], and return the position of the first."""
        position = self._next
        while position + table.size >= len(self.words):
            self._grow()
        self._put(position, table.tobytes())
        self._next = position + table.size
        return position

    def ledger(self, end: int) -> Ledger:
        """What has been recorded so far, up to the index `end`, as a value."""
        return decode(self.encoded(), end=end)

    def close(self, end: int) -> None:
        """End the recording; the file has its final size afterwards. Nothing may be written any more."""
        self._cell(cells.END, end)
        self._place.close(self._next * 8)

    def encoded(self) -> bytes:
        """The bytes of the table."""
        return self._place.content(self._next * 8)

    def _put(self, position: int, raw: bytes) -> None:
        self.words.cast("B")[position * 8 : position * 8 + len(raw)] = raw

    def _cell(self, tag: int, *values: int) -> int:
        position = self._next
        if position + cells.WORDS >= len(self.words):
            self._grow()
        for offset, value in enumerate(values, start=1):
            self.words[position + offset] = value
        self.words[position] = tag
        self._next = position + cells.WORDS
        return position

    def _text(self, tag: int, text: bytes) -> None:
        count = cells.text_cells(len(text))
        table = np.zeros((count, cells.WORDS), dtype=np.int64)
        payload = np.frombuffer(text.ljust(count * cells.TEXT, b"\0"), dtype=np.int64)
        table[:, 1:] = payload.reshape(count, cells.WORDS - 1)
        table[1:, 0] = cells.MORE
        position = self.extend(table)
        self.words[position] = tag | len(text) << cells.UPPER

    def _grow(self) -> None:
        try:
            self._place.grow()
        except OSError as error:  # what is recorded must not fail because the recording does
            self.problem = Notice(
                fact=f"the ledger breaks off, there is no room for more: {(error.strerror or str(error)).lower()}",
                where=self._place.name,
                fix="write it to a disk with more room",
            )
            content = self._place.content(len(self.words) * 8)
            self._place.abandon()
            self._place = _Memory(content)
        self.words = self._place.words


def head(*, phase: int, device: int, micro_batch: int = -1, category: int = -1) -> int:
    """Word 0 of an allocation; a category of -1 is derived when the ledger is read."""
    return (
        cells.ALLOCATION
        | phase << cells.PHASE_SHIFT
        | device << cells.DEVICE_SHIFT
        | (category + 1) << cells.CATEGORY_SHIFT
        | (micro_batch + 1) << cells.UPPER
    )


def names(module: int, operator: int) -> int:
    """Word 4 of an allocation: positions of strings, -1 for none."""
    return (module + 1) | (operator + 1) << cells.UPPER


def encode(ledger: Ledger) -> bytes:
    """The bytes of a ledger's file."""
    log = Log(ledger.metadata)
    for text in ledger.strings:
        log.string(text)
    for name in ledger.devices:
        log.device(name)
    for frame in ledger.frames:
        log.frame(frame.location, frame.caller)
    rows = ledger.allocations
    first = log.extend(_table(ledger))
    for mark in ledger.marks:
        log.mark(mark)
    for line in ledger.host:
        log.host(line)
    for row in np.flatnonzero(rows.previous >= 0).tolist():
        log.link(first + row * cells.WORDS, first + int(rows.previous[row]) * cells.WORDS)
    for row in np.flatnonzero(rows.reach >= 0).tolist():
        log.reach(first + row * cells.WORDS, int(rows.reach[row]))
    for row in np.flatnonzero(rows.made >= 0).tolist():
        log.made(first + row * cells.WORDS, int(rows.made[row]))
    for owner in ledger.owners:
        log.owner(first + owner.row * cells.WORDS, owner.hold, owner.chain, owner.source)
    if ledger.complete:
        log.close(ledger.end)
    return log.encoded()


def _table(ledger: Ledger) -> NDArray[np.int64]:
    rows = ledger.allocations
    wide = {
        name: getattr(rows, name).astype(np.int64)
        for name in ("phase", "device", "category", "micro_batch", "module", "operator", "source", "roles")
    }
    table = np.zeros((len(rows), cells.WORDS), dtype=np.int64)
    table[:, 0] = (
        cells.ALLOCATION
        | wide["phase"] << cells.PHASE_SHIFT
        | wide["device"] << cells.DEVICE_SHIFT
        | (wide["category"] + 1) << cells.CATEGORY_SHIFT
        | (wide["micro_batch"] + 1) << cells.UPPER
    )
    table[:, cells.NBYTES] = rows.nbytes
    table[:, cells.ALLOCATED] = rows.allocated
    table[:, cells.TIME] = rows.time
    table[:, cells.NAMES] = (wide["module"] + 1) | (wide["operator"] + 1) << cells.UPPER
    table[:, cells.LAST_USED] = rows.last_used
    table[:, cells.FREED] = np.where(rows.freed == ALIVE, 0, rows.freed)
    table[:, cells.SOURCE_AND_ROLES] = (wide["source"] + 1) | wide["roles"] << cells.UPPER
    return table


class _Place(Protocol):
    """Where the table lies."""

    words: memoryview
    name: str

    def grow(self) -> None: ...

    def content(self, nbytes: int) -> bytes: ...

    def close(self, nbytes: int) -> None: ...

    def abandon(self) -> None: ...


class _Memory:
    name = "memory"

    def __init__(self, content: bytes = b"") -> None:
        self.words = _enlarged(content)

    def grow(self) -> None:
        self.words = _enlarged(self.words.cast("B"))

    def content(self, nbytes: int) -> bytes:
        return bytes(self.words.cast("B")[:nbytes])

    def close(self, nbytes: int) -> None:
        pass

    def abandon(self) -> None:
        pass


class _File:
    """A file mapped into memory: what is written stays when the process is killed."""

    def __init__(self, path: Path, *, force: bool) -> None:
        self._path = path
        self.name = str(path)
        flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, flags, 0o666)
        except FileExistsError:
            raise EvenloadError(
                "the file exists and would be overwritten", where=str(path), fix="add --force, or name another file"
            ) from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise EvenloadError(f"cannot write the file: {(reason or str(error)).lower()}", where=str(path)) from None
        self._map: mmap.mmap | None = None
        try:
            self._resize(FIRST_BYTES)
        except OSError as error:
            os.close(self._handle)
            path.unlink(missing_ok=True)
            raise EvenloadError(
                f"cannot make room for the ledger: {(error.strerror or str(error)).lower()}",
                where=str(path),
                fix="write it to a disk with more room",
            ) from None

    def grow(self) -> None:
        self._resize(_next_size(len(self.words) * 8))

    def content(self, nbytes: int) -> bytes:
        if self._map is None:
            return self._path.read_bytes()
        return bytes(self.words.cast("B")[:nbytes])

    def close(self, nbytes: int) -> None:
        """Cut the file to its content."""
        self._unmap()
        os.ftruncate(self._handle, nbytes)
        os.close(self._handle)

    def abandon(self) -> None:
        """Leave the file as it is: readable up to here."""
        self._unmap()
        os.close(self._handle)

    def _resize(self, nbytes: int) -> None:
        _reserve(self._handle, nbytes)
        self._unmap()
        self._map = mmap.mmap(self._handle, nbytes)
        self.words = memoryview(self._map).cast("q")

    def _unmap(self) -> None:
        if self._map is not None:
            self.words.release()
            self._map.close()
            self._map = None


def _reserve(handle: int, nbytes: int) -> None:
    """Make the file larger, with its room on disk: a hole would end the process when the disk is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, nbytes)
    else:
        os.ftruncate(handle, nbytes)


def _enlarged(content: bytes | memoryview) -> memoryview:
    new = bytearray(_next_size(len(content)) if content else FIRST_BYTES)
    new[: len(content)] = content
    return memoryview(new).cast("q")


def _next_size(nbytes: int) -> int:
    return nbytes + min(nbytes, LARGEST_STEP)
