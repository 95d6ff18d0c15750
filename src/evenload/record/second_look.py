"""Who holds what is dead at the peak: known too late in one step, and looked up in the next one.

Whether memory at the peak was dead is known only when the step is over, and then its holder is gone. Training repeats
itself: the peak of the second step is expected at the same event of the third, and there the heap is looked at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from evenload.ledger.cells import ALLOCATED, NAMES
from evenload.ledger.curve import curve
from evenload.ledger.held import dead_at
from evenload.ledger.log import Log
from evenload.ledger.words import Hold
from evenload.record.guard import Guard
from evenload.record.owners import find_owners
from evenload.record.storages import Storages

MODEL_STEP: Final = 1
"""The step that is looked back on: the first one also makes what every program keeps."""
LARGEST: Final = 8
"""Allocations whose holders are looked up."""
SHARE: Final = 0.01
"""Share of the peak below which an allocation is left alone."""


class SecondLook:
    """Looks once, in the third step."""

    def __init__(self, log: Log, storages: Storages, guard: Guard) -> None:
        self._log = log
        self._storages = storages
        self._guard = guard
        self._begin = 0
        self._wanted: dict[tuple[int, int, int], None] = {}

    def step_began(self, begins: Sequence[int]) -> None:
        """A step has begun, and those before began at these events."""
        if len(begins) != MODEL_STEP + 2:
            return
        first, self._begin = begins[MODEL_STEP], begins[MODEL_STEP + 1]
        ledger = self._log.ledger(self._begin)
        whole = curve(ledger)
        inside = (whole.index >= first) & (whole.index < self._begin)
        if not inside.any():
            return
        at = int(whole.index[inside][whole.level[inside].argmax()])
        rows = ledger.allocations
        dead = dead_at(ledger, at)
        dead = dead[(rows.allocated[dead] >= first) & (rows.nbytes[dead] >= SHARE * whole.at(at))]
        dead = dead[np.argsort(-rows.nbytes[dead], kind="stable")][:LARGEST]
        for row in dead.tolist():
            names = (int(rows.module[row]) + 1) | (int(rows.operator[row]) + 1) << 32
            self._wanted[int(rows.allocated[row]) - first, int(rows.nbytes[row]), names] = None
        if self._wanted:
            self._storages.call_at(self._begin + at - first, partial(self._guard.tried, self._look))

    def _look(self) -> None:
        """The expected event has come: write who holds the allocations that match those of the step before."""
        words = self._log.words
        found = {
            entry.key: entry.position
            for entry in self._storages.living()
            if (words[entry.position + ALLOCATED] - self._begin, entry.nbytes, words[entry.position + NAMES])
            in self._wanted
        }
        for key, held in find_owners(list(found)).items():
            if held.hold is not Hold.UNREACHABLE:
                self._log.owner(found[key], held.hold, held.chain, held.source)
