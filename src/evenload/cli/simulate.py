"""`evenload simulate`: what a plan does, action by action, and the memory of every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from evenload.cli._shared import ForceFlag, JsonFlag, remark, say, say_json, warn
from evenload.cli.flags import Flags, with_flags
from evenload.cli.inputs import read_inputs
from evenload.cli.measured import read_profiled
from evenload.cli.tables import Lists, flag_of, limit_in, plan_over_table, refuse, split_recompute
from evenload.errors import ANSWER_NO, EvenloadError, Notice
from evenload.files import write_text
from evenload.plan.plan import Plan
from evenload.plan.schedule import default_schedule
from evenload.profile.formula import formula_profile
from evenload.profile.given import read_layer_table
from evenload.profile.measured_file import is_measured
from evenload.profile.numbers import read_data
from evenload.report.simulate import timeline_answer, timeline_text
from evenload.report.simulate_trace import chrome_trace
from evenload.simulate.stage_table import StageTable, is_stage_table, read_stage_table
from evenload.simulate.timeline import Timeline, simulate, simulate_costs

PlanArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PLAN", help="A plan or settings file; a preset or config.json with flags.", show_default=False
    ),
]


@with_flags
def run(
    plan: PlanArgument = None,
    *,
    model: Annotated[str | None, typer.Option("--model", help="The model, where the plan names none.")] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile", help="A measured profile, or a table of layers or of times by stage instead of a model."
        ),
    ] = None,
    select: Annotated[
        str | None, typer.Option("--select", help="Layers with selected operators recomputed: all, none or counts.")
    ] = None,
    comm: Annotated[
        str | None, typer.Option("--comm", help="Layers with collectives run again: all, none or counts.")
    ] = None,
    less_memory: Annotated[bool, typer.Option("--less-memory", help="Interleaved 1F1B with a short warm-up.")] = False,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a Chrome trace (opens in Perfetto).")] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
    flags: Flags,
) -> None:
    """Show what a plan does: every action, where the time goes, the peak of every rank."""
    if less_memory:
        if flags.schedule is not None:
            raise EvenloadError(
                "--schedule and --less-memory exclude each other", where="command line", fix="leave one of them out"
            )
        flags = replace(flags, schedule="interleaved_1f1b_less_memory")
    flags, lists = split_recompute(flags, select, comm)
    if profile is None:
        timeline, limit, notices = _of_model(plan, model, flags, lists)
    else:
        data = read_data(profile)
        of = _of_measured if is_measured(data) else _of_table
        timeline, limit, notices = of(data, profile, plan or model, flags, lists)
    if trace is not None:
        write_text(trace, chrome_trace(timeline), force=force)
    warn(notices)
    if trace is not None:
        remark(f"wrote {trace}")
    if json:
        say_json(timeline_answer(timeline, limit=limit))
    else:
        say(timeline_text(timeline, limit=limit))
    if limit is not None and not timeline.fits(limit):
        raise typer.Exit(ANSWER_NO)


_Simulated = tuple[Timeline, float | None, tuple[Notice, ...]]
"""The step, the memory limit if there is one, and what the user should know of the input."""


def _of_model(plan: str | None, model: str | None, flags: Flags, lists: Lists) -> _Simulated:
    if plan is None and model is None:
        raise EvenloadError(
            "there is nothing to simulate", where="command line", fix="name a plan, or a table with --profile"
        )
    if plan is not None and model is not None:
        flags = replace(flags, config=plan)
    inputs = read_inputs(model or plan or "", flags)
    wanted, said = _listed(inputs.plan, lists)
    profile = formula_profile(inputs.model, wanted.setup, wanted.policy)
    return simulate(profile, wanted), inputs.limit, (*inputs.notices, *said)


def _of_measured(data: object, path: str, plan: str | None, flags: Flags, lists: Lists) -> _Simulated:
    found = read_profiled(data, path, plan, flags)
    wanted, notices = _listed(found.plan, lists)
    return simulate(found.model.profile(wanted.setup, wanted.policy), wanted), found.limit, (*found.notices, *notices)


def _listed(plan: Plan, lists: Lists) -> tuple[Plan, tuple[Notice, ...]]:
    """A plan with the recomputation that is given as counts."""
    if not lists.given:
        return plan, ()
    policy, notices = lists.policy(plan.layout)
    return replace(plan, policy=policy), notices


def _of_table(data: object, path: str, plan: str | None, flags: Flags, lists: Lists) -> _Simulated:
    notices: tuple[Notice, ...] = ()
    if is_stage_table(data):
        if plan is not None or lists.given:
            raise EvenloadError(
                "times by stage leave nothing for a plan to say", where=path, fix="give the table alone"
            )
        timeline = _of_stages(read_stage_table(data, path), path, flags)
    else:
        table = read_layer_table(data, path)
        wanted, said = plan_over_table(table, flags if plan is None else replace(flags, config=plan), lists)
        notices = (*table.notices, *said)
        timeline = simulate(table.profile, wanted)
    limit = None if flags.memory is None else limit_in(flags.memory, timeline.memory_unit)
    return timeline, limit, notices


def _of_stages(table: StageTable, path: str, flags: Flags) -> Timeline:
    refuse(flags, frozenset({"micro_batches", "schedule", "memory"}), "says nothing over a table of times by stage")
    micro_batches = table.micro_batches if flags.micro_batches is None else flags.micro_batches
    if micro_batches is None:
        raise EvenloadError("the table has no micro_batches", where="command line", fix="give --micro-batches")
    try:
        return simulate_costs(
            table.costs,
            schedule=flags.schedule or table.schedule or default_schedule(table.costs.interleave),
            micro_batches=micro_batches,
            transfer=table.transfer,
            memory_unit=table.memory_unit,
            time_unit=table.time_unit,
        )
    except EvenloadError as error:
        flag = flag_of(error.where)
        said = flag.removeprefix("--").replace("-", "_") in flags.said()
        raise error.at(flag if said else f"{path}: {error.where}") from None
