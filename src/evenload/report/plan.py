"""A plan and why it is what it is: as text for the terminal, and as plain values for `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from evenload.plan.policy import Recompute
from evenload.planner.explain import Change, Explanation
from evenload.planner.remedies import Remedy
from evenload.planner.result import Baseline, PlannerResult
from evenload.planner.verdict import NothingFitsError, Shortage, amount
from evenload.report.table import columns

_BASELINES: Final = {
    "even_none": "even layers, no recompute",
    "even_full": "even layers, all recomputed",
    "even_least": "even layers, the least recompute that fits",
}


def plan_answer(result: PlannerResult, explanation: Explanation | None) -> dict[str, Any]:
    """The numbers of a plan under the names of `evenload plan --json`, in the units of the profile."""
    answer: dict[str, Any] = {
        "fits": True,
        "step_time": result.step_time,
        "bound": result.bound,
        "gap": result.gap,
        "proved": result.proved,
        "peak": result.peaks,
        "limit": result.limit,
        "layers_per_stage": result.layers_per_stage,
        "offset": result.plan.layout.offsets(),
        "recompute": {choice.value: table for choice, table in result.recompute.items()},
        "schedule": result.plan.schedule,
        "baselines": {
            name: {"step_time": baseline.step_time, "peak": baseline.peak, "fits": baseline.fits}
            for name, baseline in result.baselines.items()
        },
        "seconds": result.seconds,
        "interrupted": result.interrupted,
        "evaluations": result.evaluations,
        "nodes": result.nodes,
        "time_unit": result.time_unit,
        "memory_unit": result.memory_unit,
    }
    return answer | ({} if explanation is None else {"explanation": _explanation_answer(explanation)})


def _explanation_answer(explanation: Explanation) -> dict[str, Any]:
    memory = explanation.memory
    return {
        "memory": {
            "rank": memory.rank,
            "needed": memory.needed,
            "free": explanation.free,
            "running": memory.running,
            "in_flight": memory.in_flight,
            "largest": [{"name": name, "amount": size} for name, size in explanation.largest],
        },
        "time": {"rank": explanation.slowest, "share": explanation.share, "busy": explanation.busy},
        "changes": [_change_answer(change) for change in explanation.changes],
        "interleave": [_change_answer(change) for change in explanation.interleaves],
        "notes": explanation.notes,
    }


def _change_answer(change: Change) -> dict[str, Any]:
    layout, policy = change.plan.layout, change.plan
    choices = [policy.for_layer(layer).choice for layer in range(layout.num_layers)]
    return {
        "name": change.name,
        "step_time": change.step_time,
        "difference": change.difference,
        "limit": change.limit,
        "needed": change.needed,
        "interleave": layout.interleave,
        "schedule": change.plan.schedule,
        "layers_per_stage": layout.table,
        "recompute": {
            choice.value: [
                [sum(choices[layer] is choice for layer in layout.layers(chunk, stage)) for stage in range(layout.pp)]
                for chunk in range(layout.interleave)
            ]
            for choice in Recompute
        },
    }


def shortage_answer(error: NothingFitsError, found: Sequence[Remedy]) -> dict[str, Any]:
    """Why nothing fits and what would, for `--json`."""
    shortage = error.shortage
    return {
        "fits": False,
        "proved": error.proved,
        "limit": shortage.limit,
        "needed": shortage.needed,
        "rank": shortage.memory.rank,
        "static_alone": shortage.static_alone,
        "reason": shortage.term,
        "lines": shortage.memory.lines,
        "layers_per_stage": shortage.plan.layout.table,
        "memory_unit": shortage.unit,
        "remedies": [{"name": remedy.name, "needed": remedy.needed, "fits": remedy.fits} for remedy in found],
    }


def plan_text(result: PlannerResult, explanation: Explanation | None, heading: str) -> str:
    """A plan for the terminal: how quick, how good, against what, who holds what, and why."""
    parts = [heading, _headline(result), _baselines(result), _stages(result)]
    if explanation is not None:
        parts.append(_why(result, explanation))
    return "\n\n".join(parts)


def _time(result: PlannerResult, time: float) -> str:
    """Five digits: plans differ by less than a per mille."""
    if result.time_unit != "seconds":
        return f"{time:,.10g} {result.time_unit}"
    return f"{time:.5g} s" if time >= 1 else f"{1000 * time:.5g} ms"


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:+.{digits}f} %"


def _headline(result: PlannerResult) -> str:
    step = f"step time {_time(result, result.step_time)}"
    if result.proved:
        quality = "no plan is quicker (proved)"
    else:
        quality = f"no plan is quicker than {_time(result, result.bound)} (gap {100 * result.gap:.2f} %)"
    work = f"{result.evaluations:,} plans simulated and {result.nodes:,} solver nodes in {result.seconds:.1f} s"
    stopped = "\ninterrupted: this is the best plan found by then" if result.interrupted else ""
    return f"{step}; {quality}\n{work}{stopped}"


def _baselines(result: PlannerResult) -> str:
    rows = [["this plan", _time(result, result.step_time), "", amount(max(result.peaks), result.memory_unit), "fits"]]
    rows += [_baseline(result, _BASELINES[name], baseline) for name, baseline in result.baselines.items()]
    return columns(["", "step time", "", "highest peak", ""], rows, left={0, 4})


def _baseline(result: PlannerResult, name: str, baseline: Baseline) -> list[str]:
    slower = _percent(baseline.step_time / result.step_time - 1) if result.step_time else ""
    peak = amount(baseline.peak, result.memory_unit)
    return [name, _time(result, baseline.step_time), slower, peak, "fits" if baseline.fits else "does not fit"]


def _stages(result: PlannerResult) -> str:
    """One line a stage: layers and recomputed layers of its chunks."""
    used = [choice for choice, table in result.recompute.items() if any(map(any, table)) and choice != Recompute.NONE]
    head = ["stage", "layers", *(choice.value for choice in used), "peak", "left"]
    rows = [
        [
            str(stage),
            _by_chunk(result.layers_per_stage, stage),
            *(_by_chunk(result.recompute[choice], stage) for choice in used),
            amount(peak, result.memory_unit),
            f"{100 * (1 - peak / result.limit):.1f} %",
        ]
        for stage, peak in enumerate(result.peaks)
    ]
    note = (
        "layers of every chunk of the stage, and how many of them are recomputed"
        if len(result.layers_per_stage) > 1
        else "layers of the stage, and how many of them are recomputed"
    )
    return f"{columns(head, rows)}\n({note})"


def _by_chunk(table: Sequence[Sequence[int]], stage: int) -> str:
    return "+".join(str(row[stage]) for row in table)


def _why(result: PlannerResult, explanation: Explanation) -> str:
    memory, unit = explanation.memory, result.memory_unit
    lines = [
        "why",
        (
            f"  memory: rank {memory.rank} is nearest to the limit: {amount(explanation.free, unit)} left, "
            f"in the {memory.running}; it holds"
        ),
        *(f"    {amount(size, unit):>14}  {name}" for name, size in explanation.largest if size),
        (
            f"  time: rank {explanation.slowest} works on {100 * explanation.share:.0f} % of the critical path "
            f"and {100 * explanation.busy:.0f} % of the step"
        ),
    ]
    if explanation.changes:
        lines.append("what would change it (each is a plan that was simulated)")
        lines += [_change(result, change) for change in explanation.changes]
    if explanation.interleaves or explanation.notes:
        lines.append("does interleaving pay here")
        lines += [_change(result, change) for change in explanation.interleaves]
        lines += [f"  {note}" for note in explanation.notes]
        lines.append(f"  {_interleave_verdict(result, explanation)}")
    return "\n".join(lines)


def _change(result: PlannerResult, change: Change) -> str:
    share = change.difference / result.step_time if result.step_time else 0.0
    time, needed = _time(result, change.step_time), amount(change.needed, result.memory_unit)
    return f"  {time:>14}  {_percent(share, 2):>9}  {needed:>10} needed  {change.name}"


def _interleave_verdict(result: PlannerResult, explanation: Explanation) -> str:
    if not explanation.interleaves:
        return "nothing to compare with"
    best = min(explanation.interleaves, key=lambda change: change.step_time)
    here = result.plan.layout.interleave
    if best.step_time < result.step_time:
        return f"{best.plan.layout.interleave} a stage would be quicker than {here}, at more transfers between stages"
    return f"{here} a stage is the quickest of those compared"


def shortage_text(shortage: Shortage, found: Sequence[Remedy]) -> str:
    """The leanest plan, its fullest rank line by line, and what other setups would need."""
    lines = [
        f"the plan that needs least: {shortage.plan.layout}",
        *(f"  {amount(size, shortage.unit):>14}  {name}" for name, size in shortage.memory.lines.items() if size),
        (
            f"  {amount(shortage.needed, shortage.unit):>14}  needed on rank {shortage.memory.rank}, "
            f"limit {amount(shortage.limit, shortage.unit)}"
        ),
    ]
    if found:
        lines.append("what the leanest plan would need with other settings")
    for remedy in found:
        verdict = "fits" if remedy.fits else "does not fit"
        lines.append(f"  {amount(remedy.needed, shortage.unit):>14}  {remedy.name} ({verdict})")
    return "\n".join(lines)
