"""What is still there when a recording ends although it was made some steps ago, and what only the collector frees.

The walk over the heap is done at the end, and a few times before, because the variables of a function are gone when it
has returned; and only where some place in the program has left tensors behind in several steps. At the end it comes
before the last collection, which frees the cycles and thereby proves them.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from evenload.ledger.cells import ALLOCATED, HALF, NAMES, SOURCE_AND_ROLES
from evenload.ledger.growth import SLOWEST
from evenload.ledger.log import Log
from evenload.ledger.words import Hold
from evenload.record.entry import Entry
from evenload.record.holders import held_parts
from evenload.record.living import collect_all
from evenload.record.owners import Held, find_owners
from evenload.record.storages import Storages

PLACES: Final = 24
"""Places in the program of which one tensor is looked up, those with most bytes first."""


LOOKS: Final = frozenset({4, 16, 64, 256})
"""Steps at whose begin owners are looked up while the program runs."""


class Collections:
    """Tells the storages what Python's garbage collector frees, while a recording runs."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._before = 0

    def watch(self) -> None:
        """Begin."""
        gc.callbacks.append(self._happens)

    def leave(self) -> None:
        """End."""
        if self._happens in gc.callbacks:
            gc.callbacks.remove(self._happens)

    def _happens(self, phase: str, _info: dict[str, Any]) -> None:
        if phase == "start":
            self._before = self._storages.queued
        else:
            self._storages.collected(self._before)


class Lookups:
    """Writes owners while the functions that hold what grows are still running."""

    def __init__(self, log: Log, storages: Storages) -> None:
        self._log = log
        self._storages = storages
        self._cycles: dict[int, Held] = {}
        """Position of what only a cycle seemed to hold."""

    def step_began(self, begins: Sequence[int]) -> None:
        """A step has begun, and those before began at these events."""
        if len(begins) - 1 in LOOKS:
            for position, one in self._look(begins).items():
                _write(self._log, position, one, one.hold)

    def end(self, begins: Sequence[int]) -> None:
        """Look for the last time, and free what only cycles hold; call it while `Collections` watches."""
        found = self._look(begins)
        cycles = self._cycles
        proved = not cycles or collect_all(lambda: self._storages.queued)
        living = {entry.position for entry in self._storages.living()}
        for position, one in (found | cycles).items():
            # A cycle that the collector does not free goes through the backward graph, where it cannot look.
            stays = proved and position in cycles and position in living
            if stays or position in found:
                _write(self._log, position, one, Hold.UNREACHABLE if stays else one.hold)

    def _look(self, begins: Sequence[int]) -> dict[int, Held]:
        """Position in the log and holder of one suspect of every place."""
        positions = {entry.key: entry.position for entry in _suspects(self._log, self._storages, begins)}
        if not positions:
            return {}
        parts = held_parts()
        self._storages.note_parts({key: parts[key] for key in positions if key in parts})
        found = {positions[key]: one for key, one in find_owners(list(positions)).items()}
        self._cycles |= {position: one for position, one in found.items() if one.hold is Hold.CYCLE}
        return found


def _write(log: Log, position: int, held: Held, hold: Hold) -> None:
    log.owner(position, hold, held.chain, held.source)


def _suspects(log: Log, storages: Storages, begins: Sequence[int]) -> list[Entry]:
    """One storage of every place in the program that left some behind in several steps: neither first nor newest."""
    newest = begins[-1] if len(begins) > 1 else storages.clock
    places: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    words = log.words
    for entry in storages.living():
        if 0 < words[entry.position + ALLOCATED] < newest:
            place = (words[entry.position + NAMES], words[entry.position + SOURCE_AND_ROLES] & HALF)
            places[place].append(entry)
    several = [
        entries
        for entries in places.values()
        if _in_several_steps(entries, words, begins)
        and sum(entry.nbytes for entry in entries) >= SLOWEST * max(1, len(begins) - 1)
    ]
    several.sort(key=lambda entries: -sum(entry.nbytes for entry in entries))
    return [entries[len(entries) // 2] for entries in several[:PLACES]]


def _in_several_steps(entries: Sequence[Entry], words: memoryview, begins: Sequence[int]) -> bool:
    if len(begins) < 2:
        return len(entries) > 2
    return len({bisect_right(begins, words[entry.position + ALLOCATED]) for entry in entries}) > 1
