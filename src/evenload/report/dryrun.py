"""A dry run on the screen and as JSON: its peak, what is there at the peak, what is not seen."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from evenload.errors import Notice
from evenload.ledger.curve import Peaks, by_category, curve, live, peaks, shares
from evenload.ledger.ledger import Ledger
from evenload.ledger.words import PHASES, Category, MarkKind
from evenload.record.targets import Choice, Target, Workspace
from evenload.report.table import columns
from evenload.runtime.collectives import Collective, alike
from evenload.units import human_bytes

_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")
LARGEST: Final = 12
"""Lines of what is there at the peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """What the report is about."""

    ledger: Ledger
    target: Target
    seconds: float
    """How long the run took here, imports apart."""
    title: str
    limit: int | None = None
    collectives: tuple[Collective, ...] = ()
    """What the rank sends and receives in a step, as far as it is one of several."""

    @property
    def peaks(self) -> Peaks:
        """Needed and held peak."""
        return peaks(self.ledger)

    @property
    def unseen(self) -> tuple[tuple[Workspace, tuple[str, ...]], ...]:
        """Rows of memory that no dry run sees, and the operators of this one that each is about."""
        if self.ledger.metadata.origin != "dry run":
            return ()
        ran: list[int] = np.unique(self.ledger.allocations.operator).tolist()
        return self.target.unseen({self.ledger.strings[number] for number in ran if number >= 0})

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What the user should know about this run."""
        asking = sorted({name for _, names in self.unseen for name in names})
        if not asking:
            return self.ledger.notices
        fact = f"the kernels of {', '.join(asking)} ask for memory that no dry run sees: the real peak may be higher"
        return (*self.ledger.notices, Notice(fact=fact, fix='see the rows of "not seen", or run it: evenload track'))

    @property
    def fits(self) -> bool | None:
        """Whether the peak stays within the limit; None without one."""
        return None if self.limit is None else self.peaks.held <= self.limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Allocations of one category, module and operator."""

    category: str | None
    module: str | None
    """Module path with `*` for the numbers of layers; None: made outside modules."""
    operator: str | None
    nbytes: int = 0
    count: int = 0


def as_json(run: DryRun) -> dict[str, Any]:
    """The numbers of a dry run under the names of `evenload dryrun --json`; bytes and seconds."""
    ledger, found = run.ledger, run.peaks
    held = curve(ledger)
    answer: dict[str, Any] = {
        "target": run.title,
        "device": ledger.device,
        "peak": found.held,
        "needed": found.needed,
        "categories": {category.value: nbytes for category, nbytes in at_peak(run).items()},
        "at_peak": [
            {"category": group.category, "module": group.module, "operator": group.operator}
            | {"bytes": group.nbytes, "count": group.count}
            for group in _largest(run)
        ],
        "phase": phase(run),
        "curve": held.level.tolist(),
        "allocations": len(ledger.allocations),
        "rank": ledger.metadata.rank,
        "world": ledger.metadata.world,
        "not_seen": [
            {"name": row.name, "bytes": row.nbytes, "inside": row.inside, "note": row.note, "source": row.source}
            | {"operators": list(names)}
            for row, names in run.unseen
        ],
        "seconds": run.seconds,
    }
    if ledger.metadata.world > 1:
        answer["collectives"] = [asdict(one) for one in alike(run.collectives)]
    if run.limit is not None:
        answer |= {"limit": run.limit, "fits": run.fits}
    return answer


def as_text(run: DryRun, *, verbose: bool = False) -> str:
    """A dry run for the terminal."""
    parts = [_head(run), _categories(run), _at_the_peak(run), _not_seen(run)]
    if verbose:
        parts.append(_collectives(run.collectives))
        parts.append(_choices(run.target.choices))
    parts.append(_verdict(run))
    return "\n\n".join(part for part in parts if part)


def _head(run: DryRun) -> str:
    ledger = run.ledger
    dry = ledger.metadata.origin == "dry run"
    rank = f", rank {ledger.metadata.rank} of {ledger.metadata.world}" if ledger.metadata.world > 1 else ""
    return (
        f"{run.title}\n"
        f"{'dry run for' if dry else 'run on'} {ledger.device}{rank}: "
        f"peak {human_bytes(run.peaks.held)} in {phase(run)}\n"
        f"{len(ledger.allocations)} allocations, {run.seconds:.1f} s{', without the device' if dry else ''}"
        + "".join(f"; {mark.text}" for mark in ledger.marks if mark.kind is MarkKind.NOTE)
    )


def phase(run: DryRun) -> str:
    """What the step was doing at the peak."""
    rows = run.ledger.allocations
    made = rows.allocated[run.ledger.on_device]
    phases = rows.phase[run.ledger.on_device]
    return PHASES[int(phases[(made <= run.peaks.at).nonzero()[0][-1]])].value if len(made) else "nothing"


def at_peak(run: DryRun) -> dict[Category, int]:
    """Bytes of each category at the peak."""
    return by_category(run.ledger, live(run.ledger, run.peaks.at))


def _largest(run: DryRun) -> list[Group]:
    """What is there at the peak, modules of one name in all layers together."""
    groups: dict[tuple[str | None, ...], Group] = {}
    for share in shares(run.ledger, live(run.ledger, run.peaks.at), "category", "module", "operator"):
        category, module, operator = share.key
        pattern = None if module is None else _NUMBER.sub("*", module)
        known = groups.get((category, pattern, operator), Group(category=category, module=pattern, operator=operator))
        groups[category, pattern, operator] = replace(
            known, nbytes=known.nbytes + share.nbytes, count=known.count + share.count
        )
    return sorted(groups.values(), key=lambda group: -group.nbytes)[:LARGEST]


def _categories(run: DryRun) -> str:
    found = at_peak(run)
    total = sum(found.values()) or 1
    rows = [
        [category.value, human_bytes(nbytes), f"{100 * nbytes / total:.1f} %"]
        for category, nbytes in sorted(found.items(), key=lambda item: -item[1])
        if nbytes
    ]
    return columns(["at the peak", "", ""], rows, left={0})


def _at_the_peak(run: DryRun) -> str:
    rows = [
        [human_bytes(group.nbytes), str(group.count), group.category or "", group.module or "-", group.operator or "-"]
        for group in _largest(run)
    ]
    return columns(["largest", "of", "category", "module", "operator"], rows, left={2, 3, 4})


def _not_seen(run: DryRun) -> str:
    rows = [
        [row.name, human_bytes(row.nbytes) if row.nbytes is not None else "", row.note, row.source]
        for row, _ in run.unseen
    ]
    return columns(["not seen, comes on top", "", "", "source"], rows, left={0, 2, 3}) if rows else ""


def _collectives(collectives: tuple[Collective, ...]) -> str:
    rows = [
        [one.name, str(one.count), human_bytes(one.nbytes), str(one.ranks), one.phase, one.module or "-"]
        for one in alike(collectives)
    ]
    head = ["collectives of a step", "of", "bytes", "ranks", "phase", "module"]
    return columns(head, rows, left={0, 4, 5}) if rows else ""


def _choices(choices: tuple[Choice, ...]) -> str:
    blocks = [
        f"  {row.operator}\n    runs    {row.runs}\n    here    {row.here}\n    effect  {row.effect}\n"
        f"    source  {row.source}"
        for row in choices
    ]
    return "\n".join(["operators chosen for the device:", *blocks])


def _verdict(run: DryRun) -> str:
    if run.limit is None:
        return ""
    word = "fits in" if run.fits else "does not fit in"
    return f"{word} {human_bytes(run.limit)}: the peak is {human_bytes(run.peaks.held)}"
