"""What a recording did not release: allocations that outlive their step, step after step.

An allocation is suspected by its life alone: made in one step and still there some steps later. One such allocation is
no leak (states of an optimizer, a cache, a batch that is loaded ahead); the same place in the program leaving one
behind in step after step, without ever taking an old one back, is.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from evenload.ledger.curve import curve
from evenload.ledger.ledger import ALIVE, Ledger, Owner
from evenload.ledger.series import Series
from evenload.ledger.words import Hold, MarkKind, Phase, Role


class LeakClass(StrEnum):
    """How memory that grows over steps is held."""

    CYCLE = "cycle"
    """By objects that refer to each other: the garbage collector frees it, when it runs."""
    RETAINED = "retained"
    """By a variable, a container, a backward graph or an exception that is still there."""
    UNCOLLECTABLE = "uncollectable"
    """By nothing that Python can reach; the garbage collector does not free it."""
    UNKNOWN = "not released"
    """The recording does not say by whom."""
    OUTSIDE = "outside PyTorch"
    """The process grows, and PyTorch's memory does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreleased:
    """Memory that grows over steps, from one place in the program or held by one owner."""

    leak: LeakClass
    nbytes: int
    """Held when the recording ended, or when the garbage collector freed it."""
    count: int
    """Allocations."""
    per_step: float | None
    """Bytes a step; None: the recording has no steps."""
    since: int | None
    """First step of which something stayed."""
    full_at: int | None = None
    """Step at which the device is full if it goes on like this; None: not known."""
    owner: str | None = None
    """Who holds it, from the variable down to the tensor."""
    source: str | None = None
    """Where the owner is set, `file:line`; without an owner the line that allocates."""
    module: str | None = None
    """Module that made the one that the owner is of, or else the largest."""
    operator: str | None = None
    """Operator that made it."""
    made_at: str | None = None
    """Line that made it."""
    base: int | None = None
    """Bytes of one storage of which tensors refer only to a part, where a view keeps it alive."""
    reach: int | None = None
    """Bytes of that part."""
    fix: str = ""
    """What to change."""


SLOWEST: Final = 2**30 / 1_000_000
"""Bytes a step below which growth is harmless: a million steps make less than 1 GiB. A loss kept per step is that."""
LEAST_STEPS: Final = 3
"""Whole steps that a recording must have before anything can be said to grow."""
_SHARE: Final = 0.6
"""Share of the steps of which something must have stayed."""
_TAKEN_BACK: Final = 0.3
"""Share of the allocations that outlived their step and were given back later, above which it is a buffer."""
_NUMBER: Final = re.compile(r"(^|\.)\d+(?=\.|$)")
_BOUNDED: Final = re.compile(r"\(maxlen=\d+\)|\(maxsize=\d+\)")


def growth(ledger: Ledger, *, capacity: int | None = None) -> tuple[Unreleased, ...]:
    """What grows over the steps of a recording, the fastest first; empty for healthy code.

    Args:
        ledger: what was recorded.
        capacity: memory of the device in bytes, to say when it is full.
    """
    boundaries = _boundaries(ledger)
    inside = list(_inside(ledger, boundaries))
    total = sum(one.per_step or 0.0 for one in inside)
    if capacity is not None and total > 0:
        steps = len(boundaries) - 1
        full_at = steps - 1 + max(1, math.ceil((capacity - curve(ledger).peak) / total))
        inside = [replace(one, full_at=full_at) for one in inside]
    found = [*inside, *_outside(ledger)]
    return tuple(sorted(found, key=lambda one: (-(one.per_step or 0.0), -one.nbytes)))


def step_series(ledger: Ledger, *, capacity: int | None = None) -> Series | None:
    """Memory between steps and the peak of every step; None: the recording has too few steps."""
    boundaries = _boundaries(ledger)
    if len(boundaries) <= LEAST_STEPS:
        return None
    whole = curve(ledger)
    peaks = [
        max(whole.at(begin), int(whole.level[(whole.index >= begin) & (whole.index < end)].max(initial=0)))
        for begin, end in pairwise(boundaries.tolist())
    ]
    baseline = [whole.at(boundary - 1) for boundary in boundaries.tolist()[1:]]
    return Series(baseline=tuple(baseline), peak=tuple(peaks), capacity=capacity)


def _boundaries(ledger: Ledger) -> NDArray[np.int64]:
    """Events at which whole steps begin and the last one ends; without steps, rounds of forward."""
    steps = ledger.step_begins
    if len(steps) < LEAST_STEPS:
        begins = [m.index for m in ledger.marks if m.kind is MarkKind.PHASE and m.value == Phase.FORWARD.code]
        steps = np.array(begins, dtype=np.int64)
    elif ledger.steps < len(steps):  # a step that begins and does nothing: the end of the one before
        return steps
    last_use = ledger.allocations.allocated.max(initial=0)
    if len(steps) and steps[-1] > last_use:
        return steps
    return np.append(steps, ledger.end)


def _inside(ledger: Ledger, boundaries: NDArray[np.int64]) -> Iterator[Unreleased]:
    """Growth of PyTorch's own memory, by owner, else by the place that allocates."""
    steps = len(boundaries) - 1
    rows = ledger.allocations
    if steps >= LEAST_STEPS:
        born = np.searchsorted(boundaries, rows.allocated, side="right") - 1
        outlives = (born >= 0) & (born < steps - 1) & (rows.freed > boundaries[np.minimum(born + 1, steps)])
    else:
        born = np.zeros(len(rows), dtype=np.int64)
        outlives = rows.allocated > 0
    died = np.searchsorted(boundaries, rows.freed, side="right") - 1
    # What goes only after the last step went because the program ended: its variables held it until then.
    ended = int(ledger.step_begins[-1]) if len(ledger.step_begins) > LEAST_STEPS else ALIVE
    stays = outlives & ((rows.freed >= ended) | ((rows.roles & Role.COLLECTED.value) != 0))
    owners = {owner.row: owner for owner in ledger.owners}
    suspects: dict[str, list[NDArray[np.int64]]] = defaultdict(list)
    named: dict[str, Owner] = {}
    ownerless: list[tuple[str, NDArray[np.int64]]] = []
    places: dict[str, str] = {}
    for group in _groups(ledger, outlives):
        staying = group[stays[group]]
        if not (_grows(born, died, group, staying, steps) if steps >= LEAST_STEPS else _repeats(ledger, staying)):
            continue
        owner = next((owners[row] for row in staying.tolist() if row in owners), None)
        place = _place(ledger, int(group[0]))
        if owner is None:
            ownerless.append((place, staying))
        elif not _BOUNDED.search(owner.chain):
            key = places[place] = _root(owner)
            suspects[key].append(staying)
            named[key] = min(owner, named.get(key, owner), key=lambda one: (-rows.nbytes[one.row], len(one.chain)))
        else:
            places[place] = ""
    for place, staying in ownerless:  # of many layers that do the same, one is looked up
        if (key := places.get(place, place)) != "":
            suspects[key].append(staying)
    for key, parts in suspects.items():
        one = _unreleased(ledger, np.concatenate(parts), born, steps, named.get(key))
        if one.per_step is None or one.per_step >= SLOWEST:
            yield one


def any_layer(module: str) -> str:
    """A module path without the number of its layer: `layers.*.mlp`."""
    return _NUMBER.sub(r"\1*", module, count=1)


def _place(ledger: Ledger, row: int) -> str:
    """The place in the program that made an allocation, the same for all layers of a model."""
    columns = ledger.allocations
    numbers = (columns.source[row], columns.operator[row], columns.phase[row], columns.device[row])
    return f"{any_layer(ledger.module(row) or '')} {' '.join(map(str, numbers))}"


def _groups(ledger: Ledger, mask: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Rows that the same place in the program made: line, operator, module, phase, device.

    The phase tells the result of a matrix product in forward from the gradient of its weight.
    """
    rows = np.flatnonzero(mask)
    columns = ledger.allocations
    keys = np.stack(
        [getattr(columns, name)[rows].astype(np.int64) for name in ("source", "operator", "module", "phase", "device")],
        axis=1,
    )
    _, inverse = np.unique(keys, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    order = np.argsort(inverse, kind="stable")
    return np.split(rows[order], np.flatnonzero(np.diff(inverse[order])) + 1) if len(rows) else []


def _grows(
    born: NDArray[np.int64],
    died: NDArray[np.int64],
    group: NDArray[np.int64],
    staying: NDArray[np.int64],
    steps: int,
) -> bool:
    """Whether something stays of most steps, and old ones are not taken back as in a buffer of fixed length."""
    considered = steps - 1  # of the last step nothing can have outlived it
    of_steps = len(np.unique(born[staying]))
    if of_steps < max(2, math.ceil(_SHARE * considered)) and not _sporadic(born[staying], considered):
        return False
    given_back = np.setdiff1d(group, staying, assume_unique=True)
    # What the next step replaces is a variable of the loop or a gradient: it says nothing about the others.
    given_back = given_back[died[given_back] - born[given_back] > 1]
    if len(given_back) > _TAKEN_BACK * (len(given_back) + len(staying)):
        return False
    return not _in_turn(born, died, given_back, staying, of_steps)


def _in_turn(
    born: NDArray[np.int64],
    died: NDArray[np.int64],
    given_back: NDArray[np.int64],
    staying: NDArray[np.int64],
    length: int,
) -> bool:
    """Whether the oldest were given back, each when as many newer ones were there: a buffer that has become full."""
    return (
        len(given_back) > 0
        and bool(born[given_back].max() < born[staying].min())
        and bool((died[given_back] - born[given_back]).min() >= length - 1)
    )


def _sporadic(born: NDArray[np.int64], considered: int) -> bool:
    """Whether something stays of a few steps all over a longer recording: a leak in what runs every so often."""
    steps = np.unique(born)
    return len(steps) >= 3 and steps[-1] >= 0.6 * considered and steps[0] <= 0.5 * considered and considered >= 8


def _repeats(ledger: Ledger, staying: NDArray[np.int64]) -> bool:
    """The same without steps: one place left many behind, from early on until late, hardly taking any back."""
    if len(staying) < 5:
        return False
    rows = ledger.allocations
    origin = (
        (rows.source == rows.source[staying[0]])
        & (rows.operator == rows.operator[staying[0]])
        & (rows.module == rows.module[staying[0]])
        & (rows.allocated > 0)
    )
    telling = (rows.roles[staying] & Role.COLLECTED.value) != 0
    telling |= (rows.reach[staying] >= 0) | (rows.phase[staying] != Phase.OTHER.code)
    lasting = (rows.roles[staying] & (Role.PARAMETER | Role.OPTIMIZER).value) == 0
    lasting &= telling  # tensors that a program loads and keeps without more are its data
    span = rows.allocated[staying]
    begin, end, last = int(span.min()), int(span.max()), int(rows.allocated.max())
    return bool(
        lasting.all()
        and len(staying) >= (1 - _TAKEN_BACK) * int(origin.sum())
        and end - begin >= 0.5 * last
        and end >= 0.7 * last
    )


def _root(owner: Owner) -> str:
    """The variable or the cycle at the beginning of a chain, whatever the position in its containers."""
    cycle, found, _ = owner.chain.partition(" (a cycle)")
    return re.sub(r"\[[^\]]*\]", "[]", cycle if found else owner.chain.split(" -> ")[0])


def _unreleased(
    ledger: Ledger, rows: NDArray[np.int64], born: NDArray[np.int64], steps: int, owner: Owner | None
) -> Unreleased:
    columns = ledger.allocations
    largest = int(rows[columns.nbytes[rows].argmax()]) if owner is None else owner.row
    leak = _leak_class(columns.roles[rows], owner)
    per_step = None
    if steps >= LEAST_STEPS:
        regular = rows[born[rows] > 0]  # the first step also makes what every program keeps
        per_step = float(columns.nbytes[regular].sum()) / max(1, steps - 2)
    reach = columns.reach[rows]
    view = int(rows[reach >= 0][0]) if np.any(reach >= 0) else None
    made_at = ledger.source(largest)
    return Unreleased(
        leak=leak,
        nbytes=int(columns.nbytes[rows].sum()),
        count=len(rows),
        per_step=per_step,
        since=int(born[rows].min()) if steps >= LEAST_STEPS else None,
        owner=None if owner is None else owner.chain,
        source=made_at if owner is None or owner.source is None else owner.source,
        module=ledger.module(largest),
        operator=ledger.operator(largest),
        made_at=made_at,
        base=None if view is None else int(columns.nbytes[view]),
        reach=None if view is None else int(columns.reach[view]),
        fix=_fix(leak, owner, view=view is not None),
    )


def _leak_class(roles: NDArray[Any], owner: Owner | None) -> LeakClass:
    if np.any((roles & Role.COLLECTED.value) != 0):
        return LeakClass.CYCLE
    if owner is None:
        return LeakClass.UNKNOWN
    return {
        Hold.RETAINED: LeakClass.RETAINED,
        Hold.CYCLE: LeakClass.CYCLE,
        Hold.UNREACHABLE: LeakClass.UNCOLLECTABLE,
    }[owner.hold]


def _fix(leak: LeakClass, owner: Owner | None, *, view: bool) -> str:
    chain = "" if owner is None else owner.chain
    if view:
        return "keep a copy of the part (.clone()): a view keeps the whole storage alive"
    if leak is LeakClass.CYCLE:
        if re.search(r"Backward\.(?!saved_|variable)", chain):
            return "keep tensors with ctx.save_for_backward instead of attributes of ctx"
        return "break the cycle (weakref, or set the attribute to None), or collect every so often: PeriodicGC"
    if leak is LeakClass.RETAINED:
        if "grad_fn" in chain:
            return "keep the number (.item()) or the tensor without its graph (.detach())"
        if "Error" in chain or "Exception" in chain or "traceback" in chain:
            return "keep the text of the exception, or clear its __traceback__: it holds the variables of every frame"
        return "drop it when the step ends, or keep less of it"
    if leak is LeakClass.UNCOLLECTABLE:
        return (
            "a graph holds itself, out of Python's sight: return a detached tensor from hooks on saved tensors, "
            "use torch.autograd.grad instead of backward(create_graph=True), set .grad to None"
        )
    return "look for what keeps the results of this line"


def _outside(ledger: Ledger) -> Iterator[Unreleased]:
    """Growth of the process beyond PyTorch's memory on the host, from the host lines of the steps."""
    lines = [line for line in ledger.host if line.resident >= 0]
    lines = lines[2:]  # libraries load and pools fill in the first steps
    if len(lines) < 6:
        return
    of_host = np.array([name in ("cpu", "pinned") for name in ledger.devices], dtype=np.bool_)
    mine = curve(ledger, rows=of_host[ledger.allocations.device])
    own = np.diff(np.array([mine.at(line.index) for line in lines], dtype=np.float64))
    used = [line.resident - max(line.idle, 0) for line in lines]
    changes = np.diff(np.array(used, dtype=np.float64)) - own
    half = len(changes) // 2
    per_step = float(np.median(changes))
    # Where tensors on the host stay, the allocator of the process cannot reuse the gaps between them, and grows too.
    around = _AROUND_KNOWN if all(line.idle >= 0 for line in lines) else _AROUND
    enough = max(_NOISE, around * abs(float(np.median(own))))
    steady = np.mean(changes > 0.25 * per_step) >= 0.75 and changes[half:].sum() >= 0.5 * changes[:half].sum()
    if per_step >= enough and changes.sum() >= 4 * enough and steady:
        yield Unreleased(
            leak=LeakClass.OUTSIDE,
            nbytes=int(changes.sum()),
            count=0,
            per_step=per_step,
            since=lines[0].step,
            fix="not tensors: look at lists, arrays and caches of the program with tracemalloc or memray",
        )


_NOISE: Final = 2**18
"""Bytes a step by which a process may grow through its own allocator alone."""
_AROUND: Final = 2.0
"""Times the growth of tensors on the host by which the process may grow around them, without anything else growing."""
_AROUND_KNOWN: Final = 0.25
"""The same where the allocator tells how much of that are gaps."""
