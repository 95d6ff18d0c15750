"""Samples of memory over time, judged: as JSON and as text."""

from __future__ import annotations

from typing import Any

from evenload.ledger.series import Judgement, Series, Trend
from evenload.units import human_bytes


def as_json(series: Series, judgement: Judgement) -> dict[str, Any]:
    """The judgement as plain values, in bytes."""
    return {
        "trend": judgement.trend,
        "event": series.event,
        "increments": [round(change) for change in judgement.increments],
        "per_sample": round(judgement.per_step),
        "full_at": judgement.full_at,
        "next_overflows": judgement.next_overflows,
    }


def as_text(series: Series, judgement: Judgement) -> str:
    """The judgement for the screen."""
    when = series.event or "from sample to sample"
    lines = [_verdict(judgement, when)]
    if judgement.trend is Trend.GROWTH:
        lines.append("changes: " + ", ".join(human_bytes(change) for change in judgement.increments))
        if judgement.next_overflows:
            lines.append("the next one is more than the device has left")
        elif judgement.full_at is not None:
            lines.append(f"the device is full at {judgement.full_at}")
    return "\n".join(lines)


def _verdict(judgement: Judgement, when: str) -> str:
    rate = human_bytes(judgement.per_step)
    return {
        Trend.GROWTH: f"memory grows {when}, {rate} at a time: something there is not released",
        Trend.IMBALANCE: "the peak drifts while memory between steps stays where it was: the work of the steps differs "
        "(uneven routing or lengths), nothing is kept",
        Trend.FRAGMENTATION: "what the allocator reserves grows while what tensors hold does not: fragmentation, "
        "nothing is kept; expandable_segments:True makes less of it, unless it is on already",
        Trend.FLAT: "memory does not grow",
        Trend.UNDECIDED: "these samples do not tell: give memory between steps (baseline) as well, over more steps",
    }[judgement.trend]
