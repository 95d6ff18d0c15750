"""What a ledger says: peaks, what is there at the peak, what is dead but held, what is not released."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from evenload.ledger.curve import Peaks, Share, by_category, live, peaks, shares
from evenload.ledger.failed import failures
from evenload.ledger.growth import LeakClass, Unreleased, any_layer, growth, step_series
from evenload.ledger.held import HeldAfterUse, doing, held_after_use
from evenload.ledger.ledger import Ledger
from evenload.ledger.series import Judgement, Series, Trend, judge
from evenload.ledger.settings import AllocConf
from evenload.ledger.settings_advice import advise
from evenload.ledger.words import Category, MarkKind
from evenload.report.table import columns
from evenload.units import human_bytes

ROWS: Final = 20
"""Lines of a table on the screen; JSON has all."""
_PACKAGES: Final = re.compile(r"(?<=\s)/\S*/(?:site|dist)-packages/(?=\S+:\d)")
_LAYER: Final = re.compile(r"(?:^|.*?\.)(?:\d+)(?=\.|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerReport:
    """Everything that is said about one ledger."""

    ledger: Ledger
    peaks: Peaks
    at: int
    """Event that is explained."""
    there: int
    """Bytes held then."""
    categories: dict[Category, int]
    places: tuple[Share, ...]
    """By category, module, operator and line."""
    layers: tuple[tuple[str, int], ...]
    """By layer: the module path up to its first number."""
    held: tuple[HeldAfterUse, ...]
    unreleased: tuple[Unreleased, ...]
    series: Series | None
    trend: Judgement | None
    """How memory goes from step to step; None: too few steps."""
    advice: str | None
    """What the gap between held and reserved argues for; None: there is no such gap."""

    @property
    def leaks(self) -> bool:
        """Whether memory grows over steps."""
        return bool(self.unreleased)

    @property
    def knows_uses(self) -> bool:
        """Whether the ledger says when memory was used, and not only when it was held."""
        return bool(np.any(self.ledger.allocations.last_used > 0))


def report(
    ledger: Ledger, *, at: int | None = None, capacity: int | None = None, conf: AllocConf | None = None
) -> LedgerReport:
    """What a ledger says.

    Args:
        ledger: what was recorded or imported.
        at: event to explain; None: the peak of what is held.
        capacity: memory of the device in bytes, to say when it is full.
        conf: allocator settings that were on; None: not known.
    """
    found = peaks(ledger)
    index = found.at if at is None else at
    rows = live(ledger, index)
    series = step_series(ledger, capacity=capacity)
    return LedgerReport(
        ledger=ledger,
        peaks=found,
        at=index,
        there=int(ledger.allocations.nbytes[rows].sum()),
        categories=by_category(ledger, rows),
        places=shares(ledger, rows, "category", "module", "operator", "source"),
        layers=_layers(ledger, rows),
        held=held_after_use(ledger, index),
        unreleased=growth(ledger, capacity=capacity),
        series=series,
        trend=None if series is None else judge(series),
        advice=advise(found, ledger.metadata.origin, conf),
    )


def _layers(ledger: Ledger, rows: NDArray[Any]) -> tuple[tuple[str, int], ...]:
    sums: dict[str, int] = defaultdict(int)
    for row in rows.tolist():
        if (layer := _LAYER.match(ledger.module(row) or "")) is not None:
            sums[layer.group()] += int(ledger.allocations.nbytes[row])
    return tuple(sorted(sums.items(), key=lambda one: _in_order(one[0])))


def _in_order(path: str) -> list[Any]:
    """Key that sorts the numbers in paths as numbers."""
    parts = re.split(r"(\d+)", path)  # every second one is a number, of any length
    return [(len(part), part) if position % 2 else part for position, part in enumerate(parts)]


def as_json(said: LedgerReport) -> dict[str, Any]:
    """The report as plain values, in bytes; null: not known."""
    ledger = said.ledger
    return {
        "origin": ledger.metadata.origin,
        "device": ledger.device,
        "rank": ledger.metadata.rank,
        "world": ledger.metadata.world,
        "complete": ledger.complete,
        "peaks": {
            "needed": said.peaks.needed if said.knows_uses else None,
            "held": said.peaks.held,
            "reserved": said.peaks.reserved,
        },
        "at": {"event": said.at, "doing": doing(ledger, said.at), "bytes": said.there},
        "by_category": {category.value: nbytes for category, nbytes in said.categories.items() if nbytes},
        "by_layer": dict(said.layers),
        "at_peak": [_place(said, share) for share in said.places],
        "held_after_use": [_held(one) for one in said.held],
        "unreleased": [_unreleased(one) for one in said.unreleased],
        "steps": _steps(said),
        "trend": None if said.trend is None else said.trend.trend.value,
        "advice": said.advice,
        "failures": failures(ledger),
        "notes": [mark.text for mark in ledger.marks if mark.kind is MarkKind.NOTE],
        "warnings": ledger.notices,
    }


def _place(said: LedgerReport, share: Share) -> dict[str, Any]:
    category, module, operator, source = share.key
    return {
        "category": category,
        "module": module,
        "operator": operator,
        "bytes": share.nbytes,
        "count": share.count,
        "share": round(share.nbytes / said.there, 6) if said.there else 0.0,
        "source": source,
    }


def _held(one: HeldAfterUse) -> dict[str, Any]:
    return {
        "bytes": one.nbytes,
        "count": one.count,
        "category": one.category,
        "module": one.module,
        "operator": one.operator,
        "source": one.source,
        "dead_since": one.dead_since,
        "freed_in": one.freed_in,
        "owner": one.owner,
    }


def _unreleased(one: Unreleased) -> dict[str, Any]:
    return {
        "class": one.leak,
        "bytes": one.nbytes,
        "count": one.count,
        "per_step": one.per_step,
        "since_step": one.since,
        "full_at_step": one.full_at,
        "owner": one.owner,
        "source": one.source,
        "module": one.module,
        "operator": one.operator,
        "made_at": one.made_at,
        "storage": one.base,
        "referred_to": one.reach,
        "fix": one.fix,
    }


def _steps(said: LedgerReport) -> list[dict[str, Any]]:
    if said.series is None:
        return []
    host = {line.step: line for line in said.ledger.host}
    return [
        {
            "step": number,
            "between_steps": round(baseline),
            "peak": round(peak),
            "resident": host[number].resident if number in host and host[number].resident >= 0 else None,
            "pinned": host[number].pinned if number in host and host[number].pinned >= 0 else None,
        }
        for number, (baseline, peak) in enumerate(zip(said.series.baseline, said.series.peak, strict=True))
    ]


def as_text(said: LedgerReport, heading: str, *, here: str = "") -> str:
    """The report for the screen; files below the folder `here`, and those of installed packages, get short names."""
    blocks = [heading + _notes_text(said), _peaks_text(said), _at_text(said)]
    if said.held:
        blocks.append(_held_text(said.held))
    blocks.append(_unreleased_text(said))
    text = _PACKAGES.sub("", "\n\n".join(blocks))
    return text.replace(here.rstrip(os.sep) + os.sep, "") if here.rstrip(os.sep) else text


def _notes_text(said: LedgerReport) -> str:
    """What was noted, and allocations that failed."""
    lines = [mark.text for mark in said.ledger.marks if mark.kind is MarkKind.NOTE and mark.text]
    lines += map(str, failures(said.ledger)[-_FAILURES:])
    return "".join(f"\n  {line}" for line in lines)


_FAILURES: Final = 3
"""Failed allocations that are told: a program that catches them may try often."""


def _peaks_text(said: LedgerReport) -> str:
    needed = human_bytes(said.peaks.needed) if said.knows_uses else "not known"
    lines = [
        f"needed    {needed:>12}  from the operator that makes it to the last one that uses it",
        f"held      {human_bytes(said.peaks.held):>12}  from allocation to free",
    ]
    if said.peaks.reserved is not None:
        lines.append(f"reserved  {human_bytes(said.peaks.reserved):>12}  by the allocator of the device")
    resident = max((line.resident for line in said.ledger.host), default=-1)
    if resident >= 0:
        pinned = max(line.pinned for line in said.ledger.host)
        lines.append(
            f"host      {human_bytes(resident):>12}  resident set of the process, at the end of a step"
            + (f"; {human_bytes(pinned)} of it pinned" if pinned > 0 else "")
        )
    if said.knows_uses and said.peaks.held > 1.05 * said.peaks.needed:
        longer = human_bytes(said.peaks.held - said.peaks.needed)
        lines.append(f"{longer} of the peak are held longer than they are needed")
    if said.advice is not None:
        lines.append(said.advice)
    return "\n".join(["peaks of " + said.ledger.device, *(f"  {line}" for line in lines)])


def _at_text(said: LedgerReport) -> str:
    where = doing(said.ledger, said.at)
    title = f"at event {said.at} ({where}): {human_bytes(said.there)}"
    if said.at == said.peaks.at:
        title = f"at the peak ({where}): {human_bytes(said.there)}"
    categories = sorted(said.categories.items(), key=lambda one: -one[1])
    lines = [title, ""]
    lines += [_line(nbytes, said.there, category.value) for category, nbytes in categories if nbytes]
    merged = _over_layers(said.places)
    head = ("bytes", "share", "category", "module", "operator", "line")
    rows = [_row(key, nbytes, said.there) for key, nbytes in merged[:ROWS]]
    if rows:
        lines += ["", *columns(head, rows, left=(2, 3, 4, 5)).splitlines()]
    if len(merged) > ROWS:
        rest = sum(nbytes for _, nbytes in merged[ROWS:])
        lines.append(f"{human_bytes(rest)} in {len(merged) - ROWS} more places; --json has all")
    if len(said.layers) > 1:
        sizes = [nbytes for _, nbytes in said.layers]
        first, last = said.layers[0][0], said.layers[-1][0]
        lines += ["", f"{first} to {last}: {human_bytes(min(sizes))} to {human_bytes(max(sizes))} each"]
    return "\n".join(lines)


def _line(nbytes: int, total: int, name: str) -> str:
    return f"  {human_bytes(nbytes):>12}  {100 * nbytes / total:5.1f} %  {name}"


_Key = tuple[str | None, ...]
"""Category, module, operator and line."""


def _over_layers(places: Sequence[Share]) -> list[tuple[_Key, int]]:
    """Places that differ only in the number of their layer, as one: `layers.*.mlp`."""
    sums: dict[_Key, int] = defaultdict(int)
    counts: dict[_Key, set[str | None]] = defaultdict(set)
    for share in places:
        category, module, operator, source = share.key
        key = (category, None if module is None else any_layer(module), operator, source)
        sums[key] += share.nbytes
        counts[key].add(module)
    merged = [
        ((key[0], next(iter(counts[key])), *key[2:]) if len(counts[key]) == 1 else key, nbytes)
        for key, nbytes in sums.items()
    ]
    return sorted(merged, key=lambda one: -one[1])


def _row(key: _Key, nbytes: int, total: int) -> tuple[str, ...]:
    category, module, operator, source = key
    return (
        human_bytes(nbytes),
        f"{100 * nbytes / total:.1f} %",
        category or "",
        "(model)" if module == "" else module or "",
        operator or "",
        source or "",
    )


_FREED: Final = {"never": "never freed", "the end": "freed at the end"}


def _held_text(held: Sequence[HeldAfterUse]) -> str:
    merged: dict[tuple[str, ...], int] = defaultdict(int)
    modules: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for one in held:
        freed = _FREED.get(one.freed_in, f"freed in {one.freed_in}")
        place = one.module or one.source or ""
        key = (one.operator or one.category.value, any_layer(place), one.dead_since, freed, one.owner or "")
        merged[key] += one.nbytes
        modules[key].append(place)
    lines = [f"dead but held then: {human_bytes(sum(one.nbytes for one in held))}", ""]
    for key, nbytes in sorted(merged.items(), key=lambda one: -one[1])[:ROWS]:
        operator, place, since, freed, owner = key
        who = " of ".join(part for part in (operator, modules[key][0] if len(modules[key]) == 1 else place) if part)
        lines.append(f"  {human_bytes(nbytes):>12}  {who}: last used in {since}, {freed}")
        if owner:
            lines.append(f"  {'':>12}  held by {owner}")
    return "\n".join(lines)


def _unreleased_text(said: LedgerReport) -> str:
    if not said.unreleased:
        drift = said.trend is not None and said.trend.trend is Trend.IMBALANCE
        more = "; the peak drifts with the work of the steps, not with what is kept" if drift else ""
        known = "" if said.trend is not None else " (too few steps to tell growth)"
        return f"nothing grows over steps{known}{more}"
    lines = ["not released", ""]
    for one in said.unreleased:
        lines += _leak_text(one)
    return "\n".join(lines)


def _leak_text(one: Unreleased) -> list[str]:
    rate = "" if one.per_step is None else f", {human_bytes(one.per_step)} a step"
    since = "" if one.since is None else f" since step {one.since}"
    lines = [f"  {one.leak.value}: {human_bytes(one.nbytes)}{rate}{since}"]
    if one.owner:
        lines.append(f"    held by {one.owner}" + (f", set in {one.source}" if one.source else ""))
    made = " of ".join(part for part in (one.operator, one.module) if part)
    if made or one.made_at:
        lines.append("    made by " + " in ".join(part for part in (made, one.made_at) if part))
    if one.base is not None and one.reach is not None:
        lines.append(f"    a view: {human_bytes(one.reach)} of a storage of {human_bytes(one.base)} are referred to")
    if one.full_at is not None:
        lines.append(f"    the device is full at step {one.full_at}")
    if one.leak is LeakClass.CYCLE:
        lines.append("    gc.collect() frees it")
    return [*lines, f"    fix: {one.fix}"]
