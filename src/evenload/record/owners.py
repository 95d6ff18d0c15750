"""Who holds what outlived its step: from the variable down to the tensor, in words, with file and line.

The walk says how a storage is held: by a variable (retained), only by objects that refer to each other (a cycle), or by
nothing that can be reached. What a cycle holds, the garbage collector frees: that is tried last, and is the proof.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from evenload.ledger.words import Hold
from evenload.record._torch_private import plainly
from evenload.record.chains import Step, describe
from evenload.record.referrers import Link, Referrers, is_a


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """How one storage is held."""

    hold: Hold
    chain: str
    """From the variable or object down to the tensor, joined by ` -> `."""
    source: str | None
    """`file:line` at which the variable or attribute nearest to the tensor is set."""


NOTHING: Final = "nothing that Python can reach"
A_CYCLE: Final = " (a cycle)"


@plainly
def find_owners(storages: Sequence[int]) -> Mapping[int, Held]:
    """Who holds storages, given by their addresses.

    Args:
        storages: addresses; a handful, since the whole heap is searched.
    """
    if not storages:
        return {}
    enabled = gc.isenabled()
    gc.disable()  # a run in the middle of the walk would free what is being looked at
    try:
        heap = Referrers(storages)
        return {key: _held(heap, -key) for key in storages}
    finally:
        if enabled:
            gc.enable()


def _held(heap: Referrers, key: int) -> Held:
    up = _up(heap, key)
    root = next((one for one in up if one in heap.roots), None)
    if root is not None:
        chain, source = describe(_steps(heap, _way(up, root)), heap.roots[root][-1])
        return Held(hold=Hold.RETAINED, chain=chain, source=source)
    on_cycles = [(one, cycle) for one in up if one != key and (cycle := _cycle(heap, one))]
    if on_cycles:  # told from the nearest object of the program, not from the dictionary or list inside it
        one, cycle = next((found for found in on_cycles if _tells(heap.objects[found[0]])), on_cycles[0])
        first = on_cycles[0][0]
        if is_a(heap.objects[first], torch.Tensor):
            one, cycle = on_cycles[0]
        chain, source = _describe_cycle(heap, _way(up, one), cycle)
        return Held(hold=Hold.CYCLE, chain=chain, source=source)
    farthest = next(reversed(up))
    chain, source = describe(_steps(heap, _way(up, farthest)), None) if farthest != key else ("", None)
    return Held(hold=Hold.UNREACHABLE, chain=f"{NOTHING} -> {chain}" if chain else NOTHING, source=source)


_Way = list[tuple[int, Link]]
"""Upwards: (child, how its parent refers to it)."""


def _up(heap: Referrers, start: int) -> dict[int, tuple[int, Link] | None]:
    """Everything above an object, nearest first, each with the step that led to it."""
    came: dict[int, tuple[int, Link] | None] = {start: None}
    pending = deque([start])
    while pending:
        one = pending.popleft()
        if one in heap.roots:
            continue
        for link in heap.links.get(one, ()):
            if link.parent not in came:
                came[link.parent] = (one, link)
                pending.append(link.parent)
    return came


def _way(came: Mapping[int, tuple[int, Link] | None], top: int) -> _Way:
    way: _Way = []
    step = came[top]
    while step is not None:
        way.append(step)
        step = came[step[0]]
    return way[::-1]


def _cycle(heap: Referrers, start: int) -> _Way:
    """The shortest way from an object up to itself; empty: there is none."""
    came = _up(heap, start)
    for one in came:
        for link in heap.links.get(one, ()):
            if link.parent == start:
                return [*_way(came, one), (one, link)]
    return []


def _steps(heap: Referrers, way: _Way) -> list[Step]:
    """Objects of a way from the top down, the storage at the bottom left out where a tensor stands for it."""
    steps = [Step(heap.objects[way[-1][1].parent], None)] if way else []
    for child, link in reversed(way):
        if child in heap.objects:
            steps.append(Step(heap.objects[child], link.how))
        elif link.how:
            steps.append(Step(None, link.how))
    return steps


def _describe_cycle(heap: Referrers, way: _Way, cycle: _Way) -> tuple[str, str | None]:
    """How an object holds itself, and then how it holds the tensor."""
    around, around_source = describe(list(_turned(_steps(heap, cycle))), None)
    down = _steps(heap, way)
    if len(down) < 2:  # the tensor itself is on the cycle
        return f"{around}{A_CYCLE}", around_source
    chain, source = describe(down, None)
    return f"{around}{A_CYCLE} -> {chain}", source or around_source


def _turned(ring: Sequence[Step]) -> Iterator[Step]:
    """A ring that begins and ends with the same object, turned so that it begins with an object of the program."""
    inner = ring[:-1]
    start = next((at for at, step in enumerate(inner) if _tells(step.thing)), 0)
    if start == 0:
        yield from ring
        return
    yield Step(inner[start].thing, None)
    yield from inner[start + 1 :]
    yield Step(inner[0].thing, ring[-1].how)
    yield from inner[1 : start + 1]


def _tells(thing: Any) -> bool:
    return not is_a(thing, torch.Tensor | dict | list | tuple)
