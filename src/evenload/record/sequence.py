"""Which forward operator a node of the backward graph belongs to, without a hook on it.

Every node carries a number that rises in the order of forward. Noting the next number whenever the module changes is
enough to look a node's module up when backward evaluates it.
"""

from __future__ import annotations

from bisect import bisect_right
from threading import get_ident
from typing import Final, NamedTuple

LONGEST: Final = 2**18
"""Stretches that are kept for one thread; the older half is forgotten beyond."""


class Origin(NamedTuple):
    """What holds for the nodes of a stretch of forward."""

    module: int
    micro_batch: int
    frame: int


UNKNOWN: Final = Origin(-1, -1, -1)


class _Stretches:
    def __init__(self) -> None:
        self.begins: list[int] = []
        self.origins: list[Origin] = []


class Sequence:
    """Stretches of sequence numbers, by thread: every thread counts its own."""

    def __init__(self) -> None:
        self._home = get_ident()
        self._threads: dict[int, _Stretches] = {self._home: _Stretches()}

    def note(self, number: int, origin: Origin) -> None:
        """From the sequence number on, nodes made in this thread belong to `origin`; earlier stretches stay."""
        stretches = self._threads.setdefault(get_ident(), _Stretches())
        begins, origins = stretches.begins, stretches.origins
        if begins and begins[-1] >= number:  # no node was made since
            origins[-1] = origin
        elif not origins or origins[-1] != origin:
            begins.append(number)
            origins.append(origin)
            if len(begins) > LONGEST:
                del begins[: LONGEST // 2], origins[: LONGEST // 2]

    def find(self, number: int, *, here: bool = False) -> Origin:
        """Origin of a node; `here`: it was made in this thread, not in the one that runs forward."""
        stretches = self._threads.get(get_ident() if here else self._home)
        if stretches is None:
            return UNKNOWN
        position = bisect_right(stretches.begins, number) - 1
        return stretches.origins[position] if position >= 0 else UNKNOWN
