"""Builds a ledger row by row, for formats that are imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Final

import numpy as np

from evenload.errors import Notice
from evenload.ledger.ledger import ALIVE, Allocations, Frame, HostLine, Ledger, Mark, Metadata
from evenload.ledger.words import Category, Phase, Role
from evenload.units import printable

_TYPES: Final[dict[str, Any]] = {
    **dict.fromkeys(("phase", "category", "device"), np.uint8),
    **dict.fromkeys(("micro_batch", "module", "operator", "source"), np.int32),
    "roles": np.uint16,
}
"""Columns that are not of 64 bits."""


class Builder:
    """Rows, strings and frames of a ledger that is being put together."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._strings: dict[str, int] = {}
        self._devices: dict[str, int] = {}
        self._frames: dict[tuple[str, int], int] = {}

    def device(self, name: str) -> int:
        """Code of a device."""
        return self._devices.setdefault(printable(name), len(self._devices))

    def stack(self, lines: Sequence[str]) -> int:
        """Position of the innermost of some Python lines, `file:line function`, given innermost first; -1: none."""
        position = -1
        for location in reversed(lines):
            position = self._frames.setdefault((printable(location), position), len(self._frames))
        return position

    def allocation(
        self,
        *,
        nbytes: int,
        allocated: int,
        last_used: int = 0,
        freed: int = ALIVE,
        time: int = 0,
        phase: Phase = Phase.OTHER,
        category: Category = Category.UNKNOWN,
        roles: Role = Role.NONE,
        device: int = 0,
        module: str | None = None,
        operator: str | None = None,
        source: int = -1,
        made: int = -1,
    ) -> int:
        """Add a row and return its number in the order in which rows are added; fields as in `Allocations`."""
        self._rows.append(
            (
                nbytes,
                allocated,
                last_used,
                freed,
                time,
                phase.code,
                category.code,
                roles.value,
                device,
                -1,
                self._string(module),
                self._string(operator),
                source,
                -1,
                -1,
                made,
            )
        )
        return len(self._rows) - 1

    def __len__(self) -> int:
        return len(self._rows)

    def ledger(
        self,
        metadata: Metadata,
        *,
        end: int,
        marks: Iterable[Mark] = (),
        host: Iterable[HostLine] = (),
        notices: Iterable[Notice] = (),
    ) -> Ledger:
        """The ledger, its rows in order of allocation."""
        table = np.array(self._rows, dtype=np.int64).reshape(len(self._rows), len(fields(Allocations)))
        table = table[np.argsort(table[:, 1], kind="stable")]
        columns: dict[str, Any] = {
            column.name: table[:, position].astype(_TYPES.get(column.name, np.int64))
            for position, column in enumerate(fields(Allocations))
        }
        return Ledger(
            metadata=metadata,
            allocations=Allocations(**columns),
            end=end,
            strings=tuple(self._strings),
            devices=tuple(self._devices),
            frames=tuple(Frame(location=location, caller=caller) for location, caller in self._frames),
            marks=tuple(marks),
            host=tuple(host),
            notices=tuple(notices),
        )

    def _string(self, text: str | None) -> int:
        return self._strings.setdefault(printable(text), len(self._strings)) if text else -1
