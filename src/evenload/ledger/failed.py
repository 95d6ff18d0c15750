"""Allocations that failed: what was asked for, what was held then, and what of it nobody could reach any more."""

from __future__ import annotations

from dataclasses import dataclass

from evenload.ledger.curve import live
from evenload.ledger.held import doing
from evenload.ledger.ledger import Ledger
from evenload.ledger.words import MarkKind, Role
from evenload.units import human_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One allocation for which there was no room."""

    event: int
    """Index of the event before which it was asked for."""
    asked: int | None
    """Bytes; None: the message does not say."""
    text: str
    """Operator and message."""
    doing: str
    """What the program was doing."""
    held: int
    """Bytes held then on the followed device."""
    unreachable: int
    """Bytes of that which only the garbage collector still had to free, and later did."""

    def __str__(self) -> str:
        asked = "" if self.asked is None else f" for {human_bytes(self.asked)}"
        freed = f", of which gc.collect() would have freed {human_bytes(self.unreachable)}" if self.unreachable else ""
        operator = self.text.partition(":")[0]
        return f"no room{asked} in {operator} ({self.doing}): {human_bytes(self.held)} were held{freed}"


def failures(ledger: Ledger) -> tuple[Failure, ...]:
    """Allocations that failed, in order."""
    columns = ledger.allocations
    found: list[Failure] = []
    for mark in ledger.marks:
        if mark.kind is not MarkKind.FAILED:
            continue
        rows = live(ledger, mark.index - 1)
        gone = rows[(columns.roles[rows] & Role.COLLECTED.value != 0) & (columns.last_used[rows] < mark.index)]
        found.append(
            Failure(
                event=mark.index,
                asked=mark.value or None,
                text=mark.text or "an operator",
                doing=doing(ledger, mark.index - 1),
                held=int(columns.nbytes[rows].sum()),
                unreachable=int(columns.nbytes[gone].sum()),
            )
        )
    return tuple(found)
