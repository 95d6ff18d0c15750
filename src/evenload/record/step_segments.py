"""What every layer does to memory in one micro-batch, cut out of the ledger of a step.

The parts of a step are what comes before the repeated layers, every layer, and what comes after them. A part runs from
its first allocation to that of the next part. What it makes is its own, by the rules of `evenload.profile.liveness`:
the hidden state goes over to the next part, the gradient of its input to the one before; anything else that lives on
while other parts run counts as long as its own part does. Gradients of parameters are nobody's working memory: only the
first backward of a step, which makes them, is cut with them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.errors import EvenloadError
from evenload.ledger.ledger import ALIVE, Ledger
from evenload.ledger.words import Category, MarkKind, Phase
from evenload.profile.profile import Segment
from evenload.record.pieces import in_order, layer_numbers
from evenload.simulate.composition import NO_LAYER

_STATIC = [category.code for category in (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER)]
_BACK = frozenset((Phase.BACKWARD.code, Phase.RECOMPUTE.code))
_FEW = 8
"""An optimizer with at most so many temporaries at a time goes through the parameters one after the other."""


@dataclass(frozen=True, kw_only=True)
class StepSegments:
    """One micro-batch of a step, in steady state: the last one of the last step; and its first backward."""

    forward: tuple[Segment, ...]
    """[part]: before the layers, every layer, after them."""
    backward: tuple[Segment, ...]
    """[part]: the same order; each ends at minus what forward left."""
    first_backward: tuple[Segment, ...] | None
    """[part]: the first backward of the step: each ends at the gradients that come to be in it minus what forward left.
    None: they are there before it, or it is none of all layers."""
    resident: int
    """Bytes that are there all the time and are neither parameters nor what belongs to them: a batch, for one."""
    optimizer_transient: int
    """Working memory of the optimizer."""
    optimizer_loops: bool
    """That memory is for one parameter at a time, not for all of them."""
    recomputes: bool
    """Backward runs forward again: the model's own code checkpoints."""
    accumulates: bool
    """Gradients are added to those of earlier micro-batches."""


def step_segments(
    ledger: Ledger,
    path: str,
    *,
    layers: int,
    entering: Sequence[int],
    gradients: Sequence[int],
    shared: Collection[int] = (),
) -> StepSegments:
    """Cut the last micro-batch of a ledger into parts, and the first backward of the last step.

    Args:
        ledger: what was recorded, all layers included.
        path: module path of the list of layers.
        layers: how many there are.
        entering: bytes of what goes into every layer, and of what comes out of the last.
        gradients: bytes of their gradients; 0 where there is none.
        shared: bytes of the gradients of parameters that are used both before the layers and after them.

    Raises:
        EvenloadError: nothing runs backward, or the layers do not run one after the other.
    """
    step = _Times.of_step(ledger)
    times = step[-1]
    ledger = in_order(ledger)
    rows = ledger.allocations
    counted = ledger.on_device & ~np.isin(rows.category, _STATIC)

    def cut(times: _Times, born: NDArray[np.bool_]) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
        windows = _Windows.of(ledger, path, times, layers)
        owned = _Owned(windows, len(entering) + 1)
        inside = (rows.allocated >= times.forward) & (rows.allocated < times.end)
        for row in np.flatnonzero((counted | born) & inside).tolist():
            made, freed, nbytes = int(rows.allocated[row]), int(rows.freed[row]), int(rows.nbytes[row])
            for life in windows.lives(_Life(made, freed, nbytes, bool(born[row])), shared, births=bool(born.any())):
                owned.add(life)
        return owned.segments(entering, gradients)

    forward, backward = cut(times, np.zeros_like(counted))
    try:
        born = _born(ledger, step[0], times.end)
        first = cut(step[0], born)[1] if born.any() else None
    except EvenloadError:  # of another loss than that of the layers: when they are there is left open
        first = None
    there = counted & (rows.allocated < times.forward) & (rows.freed > times.forward)
    transient, count = _optimizer(ledger, counted, times)
    return StepSegments(
        forward=forward,
        backward=backward,
        first_backward=first,
        resident=int(rows.nbytes[there].sum()),
        optimizer_transient=transient,
        optimizer_loops=count <= _FEW,
        accumulates=len(step) > 1,
        recomputes=bool(np.any(rows.phase[rows.allocated >= times.backward] == Phase.RECOMPUTE.code)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Times:
    """Where a micro-batch lies."""

    forward: int
    backward: int
    end: int
    """Where the next one begins; of the last, where the optimizer begins, or the recording ends."""

    @classmethod
    def of_step(cls, ledger: Ledger) -> list[_Times]:
        """The micro-batches of the last step that runs backward, in order."""
        marks = sorted((mark.index, mark.value) for mark in ledger.marks if mark.kind is MarkKind.PHASE)
        steps = ledger.step_begins
        start = max((int(step) for step in steps if any(i >= step and v in _BACK for i, v in marks)), default=0)
        phases = [(index, value) for index, value in marks if index >= start]
        found: list[_Times] = []
        forward = backward = start
        for (_, before), (index, value) in pairwise([(start, -1), *phases, (ledger.end, -1)]):
            if value in _BACK and before not in _BACK:
                backward = index
            if value not in _BACK and before in _BACK:
                found.append(cls(forward=forward, backward=backward, end=index))
                forward = index
        if not found:
            raise EvenloadError("the step has no backward", fix="call backward() in the step function")
        optimizer = [index for index, value in phases if index >= forward and value == Phase.OPTIMIZER.code]
        return [*found[:-1], replace(found[-1], end=min([*optimizer, ledger.end]))]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Windows:
    """When every part runs."""

    forward: tuple[int, ...]
    """[part]: index at which it begins; one more entry: where forward ends."""
    backward: tuple[int, ...]
    """[part, from the last to the first]: the same."""

    @classmethod
    def of(cls, ledger: Ledger, path: str, times: _Times, layers: int) -> _Windows:
        rows = ledger.allocations
        numbers = layer_numbers(ledger, path)
        owner = np.where(rows.module >= 0, numbers[rows.module], NO_LAYER)
        forth = _begins(rows.allocated, owner, (times.forward, times.backward), layers)
        back = _begins(rows.allocated, owner, (times.backward, times.end), layers)[::-1]
        if forth != sorted(forth) or back != sorted(back):
            raise EvenloadError(
                "the layers do not run one after the other", where="--layers", fix="name a list of layers that do"
            )
        after = _after(rows.allocated, owner, forth[-1], times.backward)
        before = _after(rows.allocated, owner, back[-1], times.end)
        return cls(
            forward=(times.forward, *forth, after, times.backward),
            backward=(times.backward, *back, before, times.end),
        )

    def lives(self, life: _Life, shared: Collection[int], *, births: bool) -> tuple[_Life, ...]:
        """What its parts hold of something: it is its maker's, unless it is the gradient of a shared parameter.

        That of the end waits for that of the beginning, to be added to it. Where gradients come to be it is the end's,
        which goes when the sum is there.
        """
        made_at_end = self.backward[0] <= life.made < self.backward[1]
        if life.born or life.nbytes not in shared or not made_at_end or life.freed <= self.backward[-2]:
            return (life,)
        if not births:
            return life, life._replace(made=self.backward[-2])
        return life._replace(born=True), _Life(life.freed, ALIVE, -life.nbytes, born=True)


class _Owned:
    """The memory of every part, as events at indexes."""

    def __init__(self, windows: _Windows, parts: int) -> None:
        self._windows = windows
        self._last = parts - 1
        self._rows: tuple[list[list[_Life]], list[list[_Life]]] = (
            [[] for _ in range(parts)],
            [[] for _ in range(parts)],
        )
        """[forward or backward][position of the part's window]: what is made there."""

    def add(self, life: _Life) -> None:
        """Something that is made within the windows."""
        back = life.made >= self._windows.backward[0]
        starts = self._windows.backward if back else self._windows.forward
        self._rows[back][bisect_right(starts, life.made, hi=len(starts) - 1) - 1].append(life)

    def segments(
        self, entering: Sequence[int], gradients: Sequence[int]
    ) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
        """[part]: memory of its forward, and of its backward."""
        forth, kept = self._pass(0, entering)
        events, _ = self._pass(1, gradients[::-1], kept[::-1])
        return tuple(map(_segment, forth)), tuple(map(_segment, events[::-1]))

    def _pass(
        self, back: int, passed: Sequence[int], kept: Sequence[list[_Life]] = ()
    ) -> tuple[list[list[_Event]], list[list[_Life]]]:
        """Events of every part in the order in which a pass runs through them, and what each leaves at the end."""
        starts = self._windows.backward if back else self._windows.forward
        made = self._rows[back]
        events: list[list[_Event]] = []
        left: list[list[_Life]] = []
        taken: _Life | None = None
        through = 0
        for position, lives in enumerate(made):
            begin, end = starts[position], starts[position + 1]
            out = _handed(lives, end, passed[position]) if position < self._last else None
            mine = [life for life in lives if life is not out]
            happen = [_Event(begin, taken.nbytes)] if taken is not None else []
            happen += [_Event(life.made, life.nbytes) for life in lives]
            mine += [taken] if taken is not None else []
            mine += kept[position] if kept else []
            # a tensor that was not made anew is passed through: it is there while the part runs
            happen += [_Event(begin, through), _Event(end, -through)] if through else []
            happen += [_Event(end, -out.nbytes)] if out is not None else []
            stays = [life for life in mine if life.born or (not back and life.freed >= self._windows.backward[0])]
            happen += [_Event(min(max(life.freed, begin), end), -life.nbytes) for life in mine if life not in stays]
            events.append(happen)
            left.append(stays)
            through = passed[position] if position < self._last and out is None else 0
            taken = out
        return events, left


class _Life(NamedTuple):
    """When a storage is there."""

    made: int
    freed: int
    nbytes: int
    born: bool = False
    """The gradient of a parameter: it stays until the optimizer has run, and is handed to nobody."""


class _Event(NamedTuple):
    at: int
    change: int


def _handed(lives: Sequence[_Life], end: int, nbytes: int) -> _Life | None:
    """The last thing of a size that a part made and that outlives it: what it hands over."""
    return next(
        (one for one in reversed(lives) if nbytes and one.nbytes == nbytes and one.freed >= end and not one.born), None
    )


def _segment(events: Sequence[_Event]) -> Segment:
    ordered = sorted(events, key=lambda event: event.at)
    return Segment(events=tuple(float(event.change) for event in ordered if event.change))


def _begins(allocated: NDArray[np.int64], owner: NDArray[np.int64], span: tuple[int, int], layers: int) -> list[int]:
    """Index of the first allocation of every layer within a span."""
    inside = (allocated >= span[0]) & (allocated < span[1]) & (owner >= 0)
    first = np.full(layers, ALIVE, dtype=np.int64)
    np.minimum.at(first, owner[inside], allocated[inside])
    missing = np.flatnonzero(first == ALIVE)
    if len(missing):
        raise EvenloadError(f"layer {int(missing[0])} allocates nothing of its own", fix="name other layers: --layers")
    return first.tolist()


def _after(allocated: NDArray[np.int64], owner: NDArray[np.int64], begin: int, end: int) -> int:
    """Index of the first allocation outside the layers after the last one inside them."""
    inside = (allocated >= begin) & (allocated < end)
    last = int(allocated[inside & (owner >= 0)].max(initial=begin))
    later = allocated[inside & (owner < 0) & (allocated > last)]
    return int(later.min(initial=end))


def _born(ledger: Ledger, first: _Times, end: int) -> NDArray[np.bool_]:
    """The gradients of parameters that come to be in the first backward of a step and are there when it ends.

    None where others go while the forward before it runs (`zero_grad` after forward): those are there for longer.
    """
    rows = ledger.allocations
    made = ledger.on_device & (rows.category == Category.GRADIENT.code)
    ran = (rows.phase == Phase.FORWARD.code) & (rows.allocated >= first.forward) & (rows.allocated < first.backward)
    begins = int(rows.allocated[ran].min(initial=first.backward))
    if np.any(made & (rows.allocated < begins) & (rows.freed > begins) & (rows.freed <= first.backward)):
        return np.zeros_like(made)
    return made & (rows.allocated >= first.backward) & (rows.allocated < first.end) & (rows.freed >= end)


def _optimizer(ledger: Ledger, counted: NDArray[np.bool_], times: _Times) -> tuple[int, int]:
    """(most bytes of temporaries while the optimizer runs, how many there are then)."""
    rows = ledger.allocations
    mine = counted & (rows.allocated >= times.end)
    gone = mine & (rows.freed != ALIVE)
    index = np.concatenate([rows.allocated[mine], rows.freed[gone]])
    change = np.concatenate([rows.nbytes[mine], -rows.nbytes[gone]])[np.argsort(index, kind="stable")]
    if not len(change):
        return 0, 0
    level = change.cumsum()
    top = int(level.argmax())
    return int(level[top]), int(np.sign(change[: top + 1]).sum())
