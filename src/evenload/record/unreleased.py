"""What is still there when a recording ends although it was made some steps ago, and what only the collector frees.

The walk over the heap is done once, at the end, and only where some place in the program has left several tensors
behind. It comes before the last collection, which frees the cycles and thereby proves them.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from evenload.ledger.cells import ALLOCATED, HALF, NAMES, SOURCE_AND_ROLES
from evenload.ledger.log import Log
from evenload.ledger.words import Hold
from evenload.record.living import collect_all
from evenload.record.owners import find_owners
from evenload.record.storages import Entry, Storages

PLACES: Final = 24
"""Places in the program of which one tensor is looked up, those with most bytes first."""


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


def note_unreleased(log: Log, storages: Storages, begins: Sequence[int]) -> None:
    """Write who holds what outlived its step, and free what only cycles hold.

    Call it while `Collections` watches.

    Args:
        log: the recording.
        storages: what is alive.
        begins: index at which every step began.
    """
    suspects = _suspects(log, storages, begins)
    if not suspects:
        return
    held = find_owners([entry.key for entry in suspects])
    positions = {entry.key: entry.position for entry in suspects}
    suspects.clear()
    proved = collect_all(lambda: storages.queued)
    living = {entry.position for entry in storages.living()}
    for key, position in positions.items():
        one = held[key]
        # A cycle that the collector does not free goes through the backward graph, where it cannot look.
        stays = proved and one.hold is Hold.CYCLE and position in living
        log.owner(position, Hold.UNREACHABLE if stays else one.hold, one.chain, one.source)


def _suspects(log: Log, storages: Storages, begins: Sequence[int]) -> list[Entry]:
    """One storage of every place in the program that left some behind in several steps: neither first nor newest."""
    newest = begins[-1] if len(begins) > 1 else storages.clock
    places: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    words = log.words
    for entry in storages.living():
        if 0 < words[entry.position + ALLOCATED] < newest:
            place = (words[entry.position + NAMES], words[entry.position + SOURCE_AND_ROLES] & HALF)
            places[place].append(entry)
    several = [entries for entries in places.values() if _in_several_steps(entries, words, begins)]
    several.sort(key=lambda entries: -sum(entry.nbytes for entry in entries))
    return [entries[len(entries) // 2] for entries in several[:PLACES]]


def _in_several_steps(entries: Sequence[Entry], words: memoryview, begins: Sequence[int]) -> bool:
    if len(begins) < 2:
        return len(entries) > 2
    return len({bisect_right(begins, words[entry.position + ALLOCATED]) for entry in entries}) > 1
