"""Dead but held: what nobody uses any more at some point of a step, and what is freed only later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from evenload.ledger.curve import live, peaks
from evenload.ledger.ledger import ALIVE, Ledger
from evenload.ledger.words import CATEGORIES, PHASES, Category, MarkKind, Phase

BETWEEN: Final = "between phases"
_USED_AGAIN: Final = (Category.PARAMETER, Category.OPTIMIZER, Category.GRADIENT)
"""What the next step uses again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldAfterUse:
    """Allocations of one place in the program that were dead and still held."""

    nbytes: int
    count: int
    category: Category
    module: str | None
    operator: str | None
    source: str | None
    dead_since: str
    """What the program was doing when they were used for the last time: `forward`; several, where they differ."""
    freed_in: str
    """What the program was doing when they were freed; `a later step`, `the end` of the recording, or `never`."""
    owner: str | None
    """Who held it, where the recording looked."""


def held_after_use(ledger: Ledger, index: int | None = None, *, share: float = 0.01) -> tuple[HeldAfterUse, ...]:
    """What was dead and still held at some event, largest first.

    Args:
        ledger: what was recorded.
        index: event; None: the peak of what is held.
        share: leave out places that hold less than this share of all that was held then.
    """
    at = peaks(ledger).at if index is None else index
    rows = ledger.allocations
    dead = dead_at(ledger, at)
    total = int(rows.nbytes[live(ledger, at)].sum())
    owners = {_place(ledger, owner.row): owner.chain for owner in ledger.owners}
    found: list[HeldAfterUse] = []
    keys = np.stack([rows.category[dead], rows.module[dead], rows.operator[dead], rows.source[dead]], axis=1)
    _, inverse = np.unique(keys, axis=0, return_inverse=True)
    for group in range(int(inverse.max(initial=-1)) + 1):
        members = dead[inverse.reshape(-1) == group]
        nbytes = int(rows.nbytes[members].sum())
        if nbytes < share * total:
            continue
        largest = int(members[rows.nbytes[members].argmax()])
        found.append(
            HeldAfterUse(
                nbytes=nbytes,
                count=len(members),
                category=CATEGORIES[int(rows.category[largest])],
                module=ledger.module(largest),
                operator=ledger.operator(largest),
                source=ledger.source(largest),
                dead_since=_phases(ledger, rows.last_used[members]),
                freed_in=_freed(ledger, members),
                owner=owners.get(_place(ledger, largest)),
            )
        )
    return tuple(sorted(found, key=lambda one: -one.nbytes))


def dead_at(ledger: Ledger, at: int) -> NDArray[np.int64]:
    """Rows that are held at an event, were used before it for the last time, and are not there for the next step."""
    rows = ledger.allocations
    there = live(ledger, at)
    dead = there[(rows.last_used[there] > 0) & (rows.last_used[there] <= at)]
    return dead[~np.isin(rows.category[dead], [category.code for category in _USED_AGAIN])]


def _place(ledger: Ledger, row: int) -> tuple[int, int, int]:
    """What made a row: module, operator and line. Steps repeat themselves: a holder in one is told of all."""
    rows = ledger.allocations
    return int(rows.module[row]), int(rows.operator[row]), int(rows.source[row])


def _phases(ledger: Ledger, indexes: NDArray[np.int64]) -> str:
    """Names of the phases that some events fall into, each once."""
    return " or ".join(sorted({_phase_at(ledger, index) for index in indexes.tolist()}))


def _freed(ledger: Ledger, members: NDArray[np.int64]) -> str:
    """When some rows were freed: of what is kept for more than a step, the phase says nothing."""
    rows = ledger.allocations
    born, died = ledger.step_of(rows.allocated[members]), ledger.step_of(rows.freed[members])
    names: set[str] = set()
    for freed, before, after in zip(rows.freed[members].tolist(), born.tolist(), died.tolist(), strict=True):
        if freed == ALIVE:
            names.add("never")
        elif ledger.steps > 0 and after >= ledger.steps:
            names.add("the end")
        else:
            names.add(_phase_at(ledger, freed) if after <= max(before, 0) else "a later step")
    return " or ".join(sorted(names))


def _phase_at(ledger: Ledger, index: int) -> str:
    changes = [mark for mark in ledger.marks if mark.kind is MarkKind.PHASE and mark.index <= index]
    phase = PHASES[changes[-1].value] if changes else Phase.OTHER
    return BETWEEN if phase is Phase.OTHER else phase.value


def doing(ledger: Ledger, index: int) -> str:
    """What the program was doing at an event: `backward of step 3, micro-batch 1`."""
    phase, step, micro_batch = Phase.OTHER, -1, -1
    for mark in ledger.marks:
        if mark.index > index:
            break
        if mark.kind is MarkKind.PHASE:
            phase, micro_batch = PHASES[mark.value], mark.micro_batch
        elif mark.kind is MarkKind.STEP:
            step = mark.value
    words = phase.value if phase is not Phase.OTHER else BETWEEN
    of_step = f" of step {step}" if step >= 0 else ""
    return words + of_step + (f", micro-batch {micro_batch}" if micro_batch >= 0 else "")
