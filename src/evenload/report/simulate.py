"""A timeline as text for the terminal, and as plain values for `--json`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from evenload.plan.schedule import Op
from evenload.report.table import columns
from evenload.simulate.memory import RankMemory
from evenload.simulate.timeline import TimedAction, Timeline
from evenload.units import gib, human_seconds, plural

BAR: Final = 24
"""Columns of the bar that shows how much of the step a rank works."""


def timeline_answer(timeline: Timeline, *, limit: float | None = None) -> dict[str, Any]:
    """The numbers of a timeline under the names of `evenload simulate --json`."""
    bubble = timeline.bubble
    answer: dict[str, Any] = {
        "schedule": timeline.schedule,
        "step_time": timeline.step_time,
        "update": timeline.update,
        "bubble": {
            "ideal": bubble.ideal,
            "imbalance": bubble.imbalance,
            "recompute": bubble.recompute,
            "communication": bubble.communication,
            "real": bubble.real,
        },
        "peak": timeline.peak,
        "ranks": [
            {
                "rank": rank.rank,
                "busy": busy,
                "peak": rank.peak_allocated,
                "outside": rank.outside,
                "in_flight": rank.in_flight,
                "running": rank.running,
                "lines": rank.lines,
            }
            for rank, busy in zip(timeline.memory, timeline.busy, strict=True)
        ],
        "time_unit": timeline.time_unit,
        "memory_unit": timeline.memory_unit,
        "notes": timeline.notes,
        "actions": [action._asdict() for action in timeline.actions],
    }
    if limit is not None:
        answer |= {"limit": limit, "fits": timeline.fits(limit)}
    return answer


def timeline_text(timeline: Timeline, *, limit: float | None = None, width: int = 100) -> str:
    """A timeline for the terminal: the step, a line a rank, and a drawing where the step is short enough for one."""
    parts = [_step(timeline), _ranks(timeline, limit), _drawing(timeline, width)]
    return "\n\n".join(part for part in parts if part)


def memory_of(timeline: Timeline) -> Callable[[float], str]:
    """How to print memory in the timeline's unit."""
    if timeline.memory_unit == "bytes":
        return gib
    return lambda amount: f"{amount:,.0f} {timeline.memory_unit}"


def time_of(timeline: Timeline) -> Callable[[float], str]:
    """How to print a time in the timeline's unit."""
    if timeline.time_unit == "seconds":
        return human_seconds
    return lambda amount: f"{amount:,.7g} {timeline.time_unit}"


def _step(timeline: Timeline) -> str:
    graph, bubble = timeline.graph, timeline.bubble
    head = (
        f"{timeline.schedule}: {plural(graph.pp, 'rank')} x {plural(graph.interleave, 'chunk')}, "
        f"{plural(graph.micro_batches, 'micro-batch', 'micro-batches')}"
    )
    work = timeline.step_time / (1 + bubble.real)
    shares = {
        "ideal": bubble.ideal,
        "imbalance": bubble.imbalance,
        "recompute": bubble.recompute,
        "communication": bubble.communication,
    }
    split = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())
    time = time_of(timeline)
    after = f", then {time(timeline.update)} of the optimizer" if timeline.update else ""
    return (
        f"{head}\nstep    {time(timeline.step_time)} = work {time(work)} + bubble {100 * bubble.real:.1f} %{after}\n"
        f"bubble  {split} (of the work)"
    )


def _ranks(timeline: Timeline, limit: float | None) -> str:
    memory, rows = memory_of(timeline), list[list[str]]()
    for rank, busy in zip(timeline.memory, timeline.busy, strict=True):
        share = busy / timeline.step_time if timeline.step_time else 0.0
        full = round(BAR * share)
        rows.append(
            [
                str(rank.rank),
                "#" * full + "." * (BAR - full),
                f"{100 * share:.1f} %",
                memory(rank.peak_allocated),
                memory(rank.outside),
                "+".join(map(str, rank.in_flight)),
                rank.running + _verdict(rank, limit, memory),
            ]
        )
    lines = [["rank", "works", "", "peak", "outside", "in flight", "while"], *rows]
    if not any(rank.outside for rank in timeline.memory):
        lines = [[*line[:4], *line[5:]] for line in lines]
    last = len(lines[0]) - 1
    return columns(lines[0], lines[1:], left={1, last - 1, last})


def _verdict(rank: RankMemory, limit: float | None, memory: Callable[[float], str]) -> str:
    if limit is None or rank.needed <= limit:
        return ""
    return f"  OVER the limit by {memory(rank.needed - limit)}"


def _drawing(timeline: Timeline, width: int) -> str:
    """One line a rank: F and B with the micro-batch at the start of an action, dots where a rank waits.

    Empty where the labels of the shortest action would not fit into the width.
    """
    actions = [action for action in timeline.actions if action.end > action.start]
    if not actions:
        return ""
    shortest = min(action.end - action.start for action in actions)
    cells = int((width - 6) * shortest / timeline.step_time)
    if cells <= max(len(_label(action, timeline)) for action in actions):
        return ""
    scale = cells / shortest  # whole columns for the shortest action, so that equal actions look equal
    lines = [["."] * round(timeline.step_time * scale) for _ in range(timeline.graph.pp)]
    for action in actions:
        first, last = round(action.start * scale), round(action.end * scale)
        fill = "-" if action.op == Op.FORWARD else "="
        lines[action.rank][first:last] = f"{_label(action, timeline)} ".ljust(last - first, fill)[: last - first]
    legend = "F forward, B backward of a micro-batch" + ("; a, b ... chunk" if timeline.graph.interleave > 1 else "")
    rows = [f"{rank:4d}  {''.join(line)}" for rank, line in enumerate(lines)]
    return "\n".join([*rows, f"      {legend}"])


def _label(action: TimedAction, timeline: Timeline) -> str:
    chunk = chr(ord("a") + action.chunk) if timeline.graph.interleave > 1 else ""
    return f"{action.op}{action.micro_batch}{chunk}"
