"""A ledger for other tools: a Chrome trace, which Perfetto opens, and a table of all allocations.

Format of the trace: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import csv
import io
import json
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from evenload.ledger.curve import curve, lives
from evenload.ledger.ledger import ALIVE, Ledger, Mark
from evenload.ledger.words import CATEGORIES, PHASES, Category, MarkKind
from evenload.units import human_bytes

POINTS: Final = 20_000
"""Most points of a curve in a trace: viewers stall beyond. Of a longer one, the highest of every stretch is kept."""
LARGEST: Final = 1_000
"""Allocations that a trace shows one by one, largest first."""
_STEPS, _PHASES = 1, 2
_COLUMNS: Final = (
    *("bytes", "category", "phase", "step", "micro_batch", "module", "operator", "device"),
    *("allocated", "last_used", "freed", "time_ns", "source"),
)


def times(ledger: Ledger, index: NDArray[Any]) -> NDArray[np.float64]:
    """Nanoseconds at which events happened, between the times that the ledger knows; the index where it knows none."""
    rows = ledger.allocations
    known = np.concatenate(
        [
            np.stack([rows.allocated, rows.time], axis=1)[rows.allocated > 0],
            np.array([(mark.index, mark.time) for mark in ledger.marks], dtype=np.int64).reshape(-1, 2),
            np.array([(line.index, line.time) for line in ledger.host], dtype=np.int64).reshape(-1, 2),
        ]
    )
    known = known[np.argsort(known[:, 0], kind="stable")]
    if not len(known) or not known[:, 1].any():
        return index.astype(np.float64) * 1000
    rising = np.maximum.accumulate(known[:, 1])
    return np.interp(index, known[:, 0], rising)


def chrome_trace(ledger: Ledger) -> str:
    """The trace as JSON: memory by category as a counter, steps and phases as slices, the largest allocations."""
    name = f"rank {ledger.metadata.rank}, {ledger.device}"
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": name}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": _STEPS, "args": {"name": "steps"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": _PHASES, "args": {"name": "phases"}},
    ]
    events += _slices(ledger, MarkKind.STEP, _STEPS)
    events += _slices(ledger, MarkKind.PHASE, _PHASES)
    events += _instants(ledger)
    events += _counters(ledger)
    events += _allocations(ledger)
    other = {"origin": ledger.metadata.origin, "device": ledger.device, "rank": ledger.metadata.rank}
    return json.dumps({"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}) + "\n"


def csv_table(ledger: Ledger) -> str:
    """All allocations, one a line, in order of allocation; empty cells are not known."""
    rows = ledger.allocations
    steps = ledger.step_of(rows.allocated)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(_COLUMNS)
    for row in range(len(rows)):
        freed = int(rows.freed[row])
        table.writerow(
            (
                int(rows.nbytes[row]),
                CATEGORIES[int(rows.category[row])].value,
                PHASES[int(rows.phase[row])].value,
                _known(steps[row]),
                _known(rows.micro_batch[row]),
                ledger.module(row),
                ledger.operator(row),
                ledger.devices[int(rows.device[row])],
                int(rows.allocated[row]),
                int(rows.last_used[row]) or None,
                None if freed == ALIVE else freed,
                int(rows.time[row]),
                ledger.source(row),
            )
        )
    return text.getvalue()


def _known(value: Any) -> int | None:
    return int(value) if value >= 0 else None


def _microseconds(ledger: Ledger, index: NDArray[Any]) -> list[float]:
    return (times(ledger, index) / 1000).round(3).tolist()


def _slices(ledger: Ledger, kind: MarkKind, thread: int) -> list[dict[str, Any]]:
    marks = [mark for mark in ledger.marks if mark.kind is kind]
    if not marks:
        return []
    begins = _microseconds(ledger, np.array([*(mark.index for mark in marks), ledger.end]))
    return [
        {"ph": "X", "name": _title(mark), "pid": 0, "tid": thread, "ts": begin, "dur": round(max(0.0, end - begin), 3)}
        for mark, begin, end in zip(marks, begins, begins[1:], strict=False)
    ]


def _title(mark: Mark) -> str:
    if mark.kind is MarkKind.STEP:
        return f"step {mark.value}"
    micro_batch = f" {mark.micro_batch}" if mark.micro_batch >= 0 else ""
    return PHASES[mark.value].value + micro_batch


def _instants(ledger: Ledger) -> list[dict[str, Any]]:
    marks = [mark for mark in ledger.marks if mark.kind in (MarkKind.FAILED, MarkKind.NOTE)]
    at = _microseconds(ledger, np.array([mark.index for mark in marks], dtype=np.int64))
    return [
        {"ph": "i", "s": "p", "name": mark.text or mark.kind.name.lower(), "pid": 0, "tid": _PHASES, "ts": time}
        for mark, time in zip(marks, at, strict=True)
    ]


def _counters(ledger: Ledger) -> list[dict[str, Any]]:
    index = _points(ledger)
    at = _microseconds(ledger, index)
    present = [
        category for category in Category if np.any(ledger.on_device & (ledger.allocations.category == category.code))
    ]
    levels: dict[str, list[int]] = {}
    for category in present:
        one = curve(ledger, rows=ledger.on_device & (ledger.allocations.category == category.code))
        position = np.searchsorted(one.index, index, side="right") - 1
        levels[category.value] = np.where(position >= 0, one.level[np.maximum(position, 0)], 0).tolist()
    return [
        {
            "ph": "C",
            "name": "memory in bytes",
            "pid": 0,
            "ts": time,
            "args": {name: level[number] for name, level in levels.items()},
        }
        for number, time in enumerate(at)
    ]


def _points(ledger: Ledger) -> NDArray[np.int64]:
    """Events at which the curve is written: all, or the highest of every stretch."""
    whole = curve(ledger)
    if len(whole.index) <= POINTS:
        return whole.index
    bounds = np.linspace(0, len(whole.index), POINTS // 2 + 1).astype(np.int64)
    highest = [begin + int(whole.level[begin:end].argmax()) for begin, end in pairwise(bounds.tolist())]
    return whole.index[np.unique([*highest, *bounds[:-1], len(whole.index) - 1])]


def _allocations(ledger: Ledger) -> list[dict[str, Any]]:
    rows = np.flatnonzero(ledger.on_device)
    rows = rows[np.argsort(-ledger.allocations.nbytes[rows], kind="stable")][:LARGEST]
    begin, end = lives(ledger)
    begins = _microseconds(ledger, begin[rows])
    ends = _microseconds(ledger, np.minimum(end[rows], ledger.end))
    events: list[dict[str, Any]] = []
    for row, at, until in zip(rows.tolist(), begins, ends, strict=True):
        category = CATEGORIES[int(ledger.allocations.category[row])].value
        owner = ledger.module(row) or ledger.operator(row) or ledger.source(row) or category
        shared = {"cat": category, "pid": 0, "tid": 0, "id": row}
        shared["name"] = f"{human_bytes(int(ledger.allocations.nbytes[row]))} {owner}"
        said = {"operator": ledger.operator(row), "module": ledger.module(row), "source": ledger.source(row)}
        events.append({"ph": "b", "ts": at, "args": said, **shared})
        events.append({"ph": "e", "ts": max(at, until), **shared})
    return events
