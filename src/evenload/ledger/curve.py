"""The running bytes of a ledger, its peaks, and what is there at any point.

Three peaks are told apart, as MindSpore's memory tracker does:

- *needed*: every allocation counted from its maker to the end of its last use;
- *held*: counted until it is freed;
- *reserved*: what the device's allocator holds, where the recording or a trace says it.

Held above needed is memory that was dead but not released; reserved above held is rounding and fragmentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from evenload.ledger.ledger import ALIVE, Ledger
from evenload.ledger.words import CATEGORIES, PHASES, Category

Life = Literal["held", "needed"]
"""Until when an allocation counts: until it is freed, or until the end of its last use."""
Key = Literal["category", "module", "operator", "source", "phase", "micro_batch", "device"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Bytes as a step function of the order of events."""

    index: NDArray[np.int64]
    """Events at which the level changes, rising."""
    level: NDArray[np.int64]
    """Bytes from that event on."""

    @cached_property
    def peak(self) -> int:
        """Highest level."""
        return int(self.level.max(initial=0))

    @cached_property
    def peak_index(self) -> int:
        """First event at which the level is highest."""
        return int(self.index[self.level.argmax()]) if len(self.level) else 0

    def at(self, index: int) -> int:
        """Level when the event `index` has happened."""
        position = int(np.searchsorted(self.index, index, side="right")) - 1
        return int(self.level[position]) if position >= 0 else 0


def lives(ledger: Ledger, life: Life = "held") -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First index at which every allocation counts, and first index at which it does not any more."""
    rows = ledger.allocations
    if life == "held":
        return rows.allocated, rows.freed
    told = rows.made >= 0  # the makers and users of graphs run over blocks that are allocated as one
    begin = np.where(told, rows.made, rows.allocated)
    end = np.where(told, rows.last_used + 1, np.minimum(rows.last_used + 1, rows.freed))
    return begin, np.where(rows.last_used > 0, end, begin)


def curve(ledger: Ledger, life: Life = "held", rows: NDArray[np.bool_] | None = None) -> Curve:
    """Running bytes on the followed device.

    Args:
        ledger: what was recorded.
        life: until when an allocation counts.
        rows: mask of the allocations to count; None: those on the followed device.
    """
    mask = ledger.on_device if rows is None else rows
    begin, end = (column[mask] for column in lives(ledger, life))
    nbytes = ledger.allocations.nbytes[mask]
    counted = end > begin
    ends = counted & (end != ALIVE)
    index = np.concatenate([begin[counted], end[ends]])
    change = np.concatenate([nbytes[counted], -nbytes[ends]])
    order = np.argsort(index, kind="stable")
    index, level = index[order], np.cumsum(change[order])
    last = np.append(index[1:] != index[:-1], True)[: len(index)]
    return Curve(index=index[last], level=level[last])


def live(ledger: Ledger, index: int, life: Life = "held") -> NDArray[np.int64]:
    """Rows of the followed device that count when the event `index` has happened."""
    begin, end = lives(ledger, life)
    return np.flatnonzero(ledger.on_device & (begin <= index) & (index < end))


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """The three peaks in bytes; `reserved` is None where nothing tells it."""

    needed: int
    held: int
    reserved: int | None
    at: int
    """Event at which `held` is reached."""


def peaks(ledger: Ledger) -> Peaks:
    """Needed, held and reserved peak of the followed device."""
    held = curve(ledger)
    reserved = max((line.reserved for line in ledger.host), default=-1)
    return Peaks(
        needed=curve(ledger, "needed").peak,
        held=held.peak,
        reserved=reserved if reserved >= 0 else None,
        at=held.peak_index,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Allocations that are the same in the asked respects."""

    key: tuple[str | None, ...]
    """One value per asked key, in its order; None: not known."""
    nbytes: int
    count: int
    largest: int
    """Row of the largest of them."""


def shares(ledger: Ledger, rows: NDArray[Any], *by: Key) -> tuple[Share, ...]:
    """Allocations grouped by the keys, largest group first.

    Args:
        ledger: what was recorded.
        rows: rows to group, for example `live(ledger, peaks(ledger).at)`.
        by: what to group by.
    """
    columns = ledger.allocations
    codes = np.stack([getattr(columns, key)[rows].astype(np.int64) for key in by], axis=1)
    nbytes = columns.nbytes[rows]
    groups, inverse = np.unique(codes, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    order = np.argsort(nbytes, kind="stable")
    largest = np.zeros(len(groups), dtype=np.int64)
    largest[inverse[order]] = rows[order]
    sums = np.zeros(len(groups), dtype=np.int64)
    np.add.at(sums, inverse, nbytes)
    counts = np.bincount(inverse, minlength=len(groups))
    found = [
        Share(
            key=tuple(_WORDS[key](ledger, int(largest[group])) for key in by),
            nbytes=int(sums[group]),
            count=int(counts[group]),
            largest=int(largest[group]),
        )
        for group in range(len(groups))
    ]
    return tuple(sorted(found, key=lambda share: -share.nbytes))


def by_category(ledger: Ledger, rows: NDArray[Any]) -> dict[Category, int]:
    """Bytes of every category among `rows`, all categories present."""
    sums = np.zeros(len(CATEGORIES), dtype=np.int64)
    np.add.at(sums, ledger.allocations.category[rows], ledger.allocations.nbytes[rows])
    return {category: int(sums[category.code]) for category in Category}


def _category(ledger: Ledger, row: int) -> str:
    return CATEGORIES[int(ledger.allocations.category[row])].value


def _phase(ledger: Ledger, row: int) -> str:
    return PHASES[int(ledger.allocations.phase[row])].value


def _device(ledger: Ledger, row: int) -> str:
    return ledger.devices[int(ledger.allocations.device[row])]


def _micro_batch(ledger: Ledger, row: int) -> str | None:
    number = int(ledger.allocations.micro_batch[row])
    return str(number) if number >= 0 else None


_WORDS: dict[Key, Callable[[Ledger, int], str | None]] = {
    "category": _category,
    "phase": _phase,
    "device": _device,
    "micro_batch": _micro_batch,
    "module": Ledger.module,
    "operator": Ledger.operator,
    "source": Ledger.source,
}
