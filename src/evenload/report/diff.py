"""The difference of two memories: as JSON and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from evenload.ledger.diff import Change, Diff
from evenload.report.table import columns
from evenload.units import human_bytes

ROWS: Final = 20
"""Places on the screen; JSON has all."""


def as_json(said: Diff) -> dict[str, Any]:
    """The difference as plain values, in bytes; null: not known on that side."""
    return {
        "before": said.before.name,
        "after": said.after.name,
        "peaks": {change.name: _plain(change) for change in said.peaks},
        "lines": [{"name": change.name, **_plain(change)} for change in said.lines],
        "places": [{"name": change.name, **_plain(change)} for change in said.places],
    }


def _plain(change: Change) -> dict[str, Any]:
    percent = change.percent
    return {
        "before": change.before,
        "after": change.after,
        "change": change.nbytes,
        "percent": None if percent is None else round(percent, 3),
    }


def as_text(said: Diff) -> str:
    """The difference for the screen."""
    before = "predicted" if said.before.predicted else "before"
    after = "predicted" if said.after.predicted else "measured" if said.before.predicted else "after"
    head = ("", before, after, "change", "%")
    blocks = [
        f"{before}: {said.before.name}\n{after}: {said.after.name}",
        columns(("peak", *head[1:]), [_row(change) for change in said.peaks], left=(0,)),
        columns(("at the peak", *head[1:]), [_row(change) for change in said.lines], left=(0,)),
    ]
    if said.places:
        blocks.append(_places(said.places, head))
    elif said.before.places and said.after.places:
        blocks.append("every module holds the same at the peak")
    return "\n\n".join(blocks)


def _places(places: Sequence[Change], head: tuple[str, ...]) -> str:
    text = columns(("largest changes", *head[1:]), [_row(change) for change in places[:ROWS]], left=(0,))
    rest = len(places) - ROWS
    return text + (f"\n{rest} more; --json has all" if rest > 0 else "")


def _row(change: Change) -> tuple[str, ...]:
    nbytes, percent = change.nbytes, change.percent
    return (
        change.name,
        "?" if change.before is None else human_bytes(change.before),
        "?" if change.after is None else human_bytes(change.after),
        "?" if nbytes is None else ("+" if nbytes > 0 else "") + human_bytes(nbytes),
        "" if percent is None else f"{percent:+.1f}",
    )
