"""`evenload simulate`: what a plan does, action by action, and the memory of every rank."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from evenload.cli._shared import ForceFlag, JsonFlag, remark, say, say_json, warn
from evenload.dialects.files import parse_json, write_text
from evenload.dialects.native import read_native
from evenload.dialects.yaml_source import read_yaml
from evenload.errors import ANSWER_NO, EvenloadError, relocate
from evenload.plan.layer_setting import LayerSetting
from evenload.plan.plan import Plan
from evenload.plan.schedule import default_schedule
from evenload.profile.given import read_layer_table
from evenload.profile.numbers import read_data
from evenload.profile.profile import Profile
from evenload.report.simulate import timeline_answer, timeline_text
from evenload.report.simulate_trace import chrome_trace
from evenload.setup import Setup
from evenload.simulate.stage_table import StageTable, is_stage_table, read_stage_table
from evenload.simulate.timeline import Timeline, simulate, simulate_costs
from evenload.units import parse_bytes

_PLAIN: Final = re.compile(r"[0-9]+\.?[0-9]*")
LAYOUT: Final = ("pp", "interleave", "offset", "recompute", "select", "comm")
"""Flags that a plan file answers itself."""
_FLAGS: Final = {
    "$.offset": "--offset",
    "$.recompute": "--recompute",
    "$.select_recompute": "--select",
    "$.select_comm_recompute": "--comm",
    "$.pp": "--pp",
    "$.interleave": "--interleave",
    "$.pp_interleave_num": "--interleave",
    "$.micro_batches": "--micro-batches",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The flags that describe a plan; None is not given."""

    pp: int | None
    interleave: int | None
    micro_batches: int | None
    offset: str | None
    recompute: str | None
    select: str | None
    comm: str | None
    schedule: str | None

    def refuse(self, *names: str, why: str) -> None:
        """Raise if one of these flags is given."""
        for name in names:
            if getattr(self, name) is not None:
                raise EvenloadError(f"--{name.replace('_', '-')} {why}", where="command line", fix="leave it out")


def simulate_command(
    *,
    plan: Annotated[Path | None, typer.Argument(help="A plan file of evenload.", show_default=False)] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A table of layers, or of times by stage, instead of a model.")
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None,
    interleave: Annotated[int | None, typer.Option(help="Chunks per stage.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches per step.")] = None,
    offset: Annotated[
        str | None, typer.Option(help="Layer offset as JSON: a number a stage, or a row a chunk.")
    ] = None,
    recompute: Annotated[str | None, typer.Option(help="Whole layers: full, none, or JSON counts.")] = None,
    select: Annotated[str | None, typer.Option(help="Selected operators: all, none, or JSON counts.")] = None,
    comm: Annotated[str | None, typer.Option(help="Collectives run again: all, none, or JSON counts.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Name of the schedule.")] = None,
    less_memory: Annotated[bool, typer.Option("--less-memory", help="Interleaved 1F1B with a short warm-up.")] = False,
    memory: Annotated[str | None, typer.Option(help="Limit of one device, such as 64GiB: answers fits or not.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace (opens in Perfetto).")] = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Show what a plan does: every action, where the time goes, the peak of every rank."""
    if less_memory:
        if schedule is not None:
            raise EvenloadError("--schedule and --less-memory exclude each other", where="command line")
        schedule = "less_memory"
    asked = Asked(
        pp=pp,
        interleave=interleave,
        micro_batches=micro_batches,
        offset=offset,
        recompute=recompute,
        select=select,
        comm=comm,
        schedule=schedule,
    )
    timeline = _timeline(plan, profile, asked)
    limit = None if memory is None else limit_in(memory, timeline.memory_unit)
    if trace is not None:
        write_text(trace, chrome_trace(timeline), force=force)
        remark(f"wrote {trace}")
    if as_json:
        say_json(timeline_answer(timeline, limit=limit))
    else:
        say(timeline_text(timeline, limit=limit))
    if limit is not None and not timeline.fits(limit):
        raise typer.Exit(ANSWER_NO)


def limit_in(text: str, unit: str) -> float:
    """A memory limit in the unit of a table; a plain number is in that unit already.

    Raises:
        EvenloadError: no positive size, or a size with a unit for a table whose own unit is not one.
    """
    size = parse_bytes(text, where="--memory")
    if unit == "bytes":
        return float(size)
    if _PLAIN.fullmatch(text.strip()):
        return float(text)
    try:
        return size / parse_bytes(f"1{unit}")
    except EvenloadError:
        raise EvenloadError(
            f"the table counts memory in {unit!r}, which {text!r} cannot be turned into",
            where="--memory",
            fix="give a plain number, or a memory_unit such as MB in the table",
        ) from None


def _timeline(plan: Path | None, table: Path | None, asked: Asked) -> Timeline:
    data = None if table is None else read_data(table)
    if table is not None and is_stage_table(data):
        if plan is not None:
            raise EvenloadError("times by stage leave nothing for a plan to say", where=str(plan), fix="leave it out")
        return _of_stages(read_stage_table(data, str(table)), asked)
    if plan is None and table is None:
        raise EvenloadError(
            "there is nothing to simulate", where="command line", fix="name a plan file, or give --profile with --pp"
        )
    profile = _profile(data, table)
    wanted = _plan_of_flags(profile, asked) if plan is None else _plan_of_file(plan, asked)
    return simulate(profile, wanted)


def _of_stages(table: StageTable, asked: Asked) -> Timeline:
    asked.refuse(*LAYOUT, why="is said by the table, whose rows are chunks and stages")
    micro_batches = asked.micro_batches or table.micro_batches
    if micro_batches is None:
        raise EvenloadError("the table has no micro_batches", where="command line", fix="give --micro-batches")
    return simulate_costs(
        table.costs,
        schedule=asked.schedule or table.schedule or default_schedule(table.costs.interleave),
        micro_batches=micro_batches,
        transfer=table.transfer,
        memory_unit=table.memory_unit,
        time_unit=table.time_unit,
    )


def _profile(data: object, path: Path | None) -> Profile:
    if path is None:
        raise EvenloadError("a plan needs the costs of its layers", where="command line", fix="give --profile")
    given = read_layer_table(data, str(path))
    warn(given.notices)
    return given.profile


def _plan_of_file(path: Path, asked: Asked) -> Plan:
    asked.refuse(*LAYOUT, why="is said by the plan file")
    reading = read_native(read_yaml(path))
    warn(reading.notices)
    plan = reading.plan
    changes = {name: value for name in ("micro_batches", "schedule") if (value := getattr(asked, name)) is not None}
    return replace(plan, setup=replace(plan.setup, **changes)) if changes else plan


def _plan_of_flags(profile: Profile, asked: Asked) -> Plan:
    sizes = {
        name: value for name in ("pp", "interleave", "micro_batches") if (value := getattr(asked, name)) is not None
    }
    try:
        setup = Setup(**sizes, schedule=asked.schedule or default_schedule(asked.interleave or 1))
        setting = LayerSetting(
            len(profile.blocks),
            pp=setup.pp,
            pp_interleave_num=setup.interleave,
            offset=_value(asked.offset, "--offset", default=0),
            recompute=_value(asked.recompute, "--recompute"),
            select_recompute=_value(asked.select, "--select"),
            select_comm_recompute=_value(asked.comm, "--comm"),
        )
    except EvenloadError as error:
        raise error.at(_flag(error.where)) from None
    warn(relocate(notice, _flag(notice.where)) for notice in setting.notices)
    return Plan(setup=setup, layout=setting.layout, policy=setting.policy)


def _value(text: str | None, flag: str, *, default: int | bool = False) -> Any:
    """A switch or a list as it is written on the command line."""
    words = {"full": True, "all": True, "none": False}
    if text is None:
        return default
    return words[text] if text in words else parse_json(text, name=flag)


def _flag(where: str | None) -> str:
    """The flag behind a `$.path` of a value that was made of flags."""
    path = where or "command line"
    for name, flag in _FLAGS.items():
        if path == name or path.startswith((f"{name}[", f"{name}.")):
            return flag + path.removeprefix(name)
    return path
