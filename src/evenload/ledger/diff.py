"""Two memories subtracted: two ledgers, or a prediction and a ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenload.errors import EvenloadError, shown
from evenload.ledger.curve import by_category, live, peaks, shares
from evenload.ledger.ledger import Ledger
from evenload.ledger.plain_pickle import as_dict, as_list
from evenload.ledger.words import Category
from evenload.profile.profile import Line


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two memories, at its peak; bytes."""

    name: str
    peaks: Mapping[str, int | None]
    """`needed`, `held`, `reserved`; None: not known."""
    lines: Mapping[str, int]
    """By category; of a prediction, by memory line."""
    places: Mapping[tuple[str, str], int]
    """By category and module; empty for a prediction."""
    predicted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One thing on both sides."""

    name: str
    before: int | None
    after: int | None
    """Bytes; None: not known there, 0: known not to be there."""

    @property
    def nbytes(self) -> int | None:
        """Difference, after - before."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def percent(self) -> float | None:
        """Difference in per cent of what was before."""
        return 100 * self.nbytes / self.before if self.nbytes is not None and self.before else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Diff:
    """The difference of two memories."""

    before: Side
    after: Side
    peaks: tuple[Change, ...]
    lines: tuple[Change, ...]
    places: tuple[Change, ...]
    """The largest changes first; without what stayed the same."""

    @property
    def held(self) -> Change:
        """The peak of what is held."""
        return next(change for change in self.peaks if change.name == "held")


def side(ledger: Ledger, name: str) -> Side:
    """A ledger at its peak."""
    found = peaks(ledger)
    rows = live(ledger, found.at)
    knows_uses = bool((ledger.allocations.last_used > 0).any())
    return Side(
        name=name,
        peaks={"needed": found.needed if knows_uses else None, "held": found.held, "reserved": found.reserved},
        lines={category.value: nbytes for category, nbytes in by_category(ledger, rows).items()},
        places={
            (share.key[0] or "", share.key[1] or ""): share.nbytes
            for share in shares(ledger, rows, "category", "module")
        },
    )


def predicted_side(estimate: Mapping[str, Any], stage: int, name: str, place: str) -> Side:
    """A stage of what `evenload estimate --json` printed.

    Raises:
        EvenloadError: it is no estimate, or has no such stage.
    """
    stages = as_list(estimate.get("stages"))
    if not stages:
        raise EvenloadError("this is no estimate: it has no stages", where=place, fix="write it with --json")
    found = next((one for one in map(as_dict, stages) if one is not None and one.get("rank") == stage), None)
    if found is None:
        raise EvenloadError(f"the estimate has no stage {stage}", where=place, fix=f"name one below {len(stages)}")
    lines = {line.value: _bytes(found, line.value, place) for line in Line}
    held = _bytes(found, "peak_allocated", place)
    return Side(
        name=f"{name}, stage {stage}",
        peaks={"needed": None, "held": held, "reserved": None},
        lines=lines,
        places={},
        predicted=True,
    )


def _bytes(stage: Mapping[str, Any], name: str, place: str) -> int:
    value = stage.get(name, 0)
    if type(value) not in (int, float) or not 0 <= value < 2**62:
        raise EvenloadError(f"{name} is {shown(value)}, which is no number of bytes", where=place)
    return round(value)


def diff(before: Side, after: Side) -> Diff:
    """What changed between two memories."""
    if before.predicted != after.predicted:
        before, after = _by_line(before), _by_line(after)
    lines = [*before.lines, *(name for name in after.lines if name not in before.lines)]
    places = _changes(before.places, after.places) if before.places and after.places else ()
    return Diff(
        before=before,
        after=after,
        peaks=tuple(
            Change(name=name, before=before.peaks[name], after=after.peaks[name])
            for name in ("needed", "held", "reserved")
            if before.peaks[name] is not None or after.peaks[name] is not None
        ),
        lines=tuple(
            Change(name=name, before=before.lines.get(name, 0), after=after.lines.get(name, 0))
            for name in lines
            if before.lines.get(name, 0) or after.lines.get(name, 0)
        ),
        places=places,
    )


def _by_line(one: Side) -> Side:
    """A side by memory lines, so that a prediction can be subtracted."""
    if one.predicted:
        return one
    lines = {line.value: 0 for line in Line}
    for name, nbytes in one.lines.items():
        category = Category(name)
        key = category.value if category is Category.UNKNOWN else category.line.value
        lines[key] = lines.get(key, 0) + nbytes
    return Side(name=one.name, peaks=one.peaks, lines=lines, places=one.places, predicted=False)


def _changes(before: Mapping[tuple[str, str], int], after: Mapping[tuple[str, str], int]) -> tuple[Change, ...]:
    keys = dict.fromkeys([*before, *after])
    changes = [
        Change(name=f"{category} of {module or 'no module'}", before=before.get(key, 0), after=after.get(key, 0))
        for key in keys
        for category, module in (key,)
        if before.get(key, 0) != after.get(key, 0)
    ]
    return tuple(sorted(changes, key=lambda change: -abs(change.nbytes or 0)))
