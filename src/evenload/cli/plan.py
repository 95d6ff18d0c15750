"""`evenload plan`: the quickest plan that fits, why it is that one, and the settings file to train with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import typer

from evenload.cli._shared import ForceFlag, JsonFlag, remark, say, say_json, warn
from evenload.cli.convert import Target, write
from evenload.cli.flags import Flags, Tracing, with_flags
from evenload.cli.inputs import read_inputs, read_setup
from evenload.cli.measured import beside, read_profiled
from evenload.cli.tables import limit_in, refuse
from evenload.cli.traced import Traced, autocast_type, function_named, read_traced, refuse_tracing
from evenload.dialects.detect import read_settings
from evenload.dialects.reading import Reading
from evenload.errors import EvenloadError, Notice
from evenload.files import write_text
from evenload.model.presets import model_source
from evenload.plan.plan import Plan
from evenload.plan.policy import DEFAULT_COMM, DEFAULT_SELECT, Policy
from evenload.plan.schedule import default_schedule
from evenload.planner.explain import Explanation, explain
from evenload.planner.problem import Problem
from evenload.planner.remedies import remedies
from evenload.planner.result import PlannerResult, Progress
from evenload.planner.solve import Planner, find_effort
from evenload.planner.verdict import NothingFitsError, amount
from evenload.profile.formula import formula_profile
from evenload.profile.given import read_layer_table
from evenload.profile.measured_file import is_measured
from evenload.profile.numbers import read_data
from evenload.profile.profile import Profile
from evenload.report.plan import plan_answer, plan_text, shortage_answer, shortage_text
from evenload.setup import Setup

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A preset, a config.json, a settings file, or package.module:function.",
        show_default=False,
    ),
]
DECIDED: Final = frozenset({"offset", "recompute"})
"""Flags that say what the planner is asked for."""
OF_TABLES: Final = frozenset({"pp", "interleave", "micro_batches", "schedule", "memory"})


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What is asked."""

    problem: Problem
    name: str
    model: str | None
    profile_of: Callable[[Setup], Profile] | None
    profile: str | None = None
    """File of the measured profile."""
    notices: tuple[Notice, ...]


@with_flags
def run(
    model: ModelArgument = None,
    *,
    profile: Annotated[
        str | None, typer.Option("--profile", help="A measured profile, or a table of layers instead of a model.")
    ] = None,
    less_memory: Annotated[bool, typer.Option("--less-memory", help="Interleaved 1F1B with a short warm-up.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the settings to train with.")] = None,
    to: Annotated[Target, typer.Option("--to", help="For which program.")] = Target.EVENLOAD,
    into: Annotated[
        Path | None, typer.Option("--into", help="MindFormers settings to put the plan into; the rest stays.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same plan.")] = 0,
    effort: Annotated[str, typer.Option("--effort", help="quick, normal or thorough.")] = "normal",
    no_explain: Annotated[bool, typer.Option("--no-explain", help="The plan only, without comparisons.")] = False,
    force: ForceFlag = False,
    json: JsonFlag = False,
    flags: Flags,
    tracing: Tracing,
) -> None:
    """Find the quickest plan that fits: layers per stage and recompute per layer; say why; write the settings."""
    if less_memory:
        if flags.schedule is not None:
            raise EvenloadError(
                "--schedule and --less-memory exclude each other", where="command line", fix="leave one of them out"
            )
        flags = replace(flags, schedule="interleaved_1f1b_less_memory")
    _check_writing(out, to, into)
    refuse(flags, frozenset(flags.said()) - DECIDED, "is what the planner decides")
    data = None if profile is None else read_data(profile)
    if profile is not None and is_measured(data):
        refuse_tracing(tracing, profile)
        task = _of_layers(read_profiled(data, profile, model, flags), profile)
    elif profile is None and model is not None and function_named(model):
        task = _of_layers(read_traced(model, flags, tracing), model)
    else:
        refuse_tracing(tracing, model or "a table")
        if profile is not None and tracing.autocast:
            raise EvenloadError("--autocast says nothing over a table", where="--autocast", fix="leave it out")
        task = _of_model(model, flags, tracing) if profile is None else _of_table(data, profile, model, flags)
    warn(task.notices)
    try:
        result, explanation = _solve(task, seed=seed, effort=effort, explained=not no_explain)
    except NothingFitsError as error:
        found = remedies(task.problem, task.profile_of)
        if json:
            say_json(shortage_answer(error, found))
        else:
            say(shortage_text(error.shortage, found))
        raise
    if json:
        say_json(plan_answer(result, explanation) | {"seed": seed, "warnings": task.notices})
    else:
        say(plan_text(result, explanation, _heading(task)))
    if out is not None:
        plan = replace(result.plan, model=task.model, profile=task.profile)
        _write(beside(plan, out), out, to, into or _own_settings(model, to), force=force)


def _check_writing(out: Path | None, to: Target, into: Path | None) -> None:
    if into is not None and to is not Target.MINDFORMERS:
        raise EvenloadError(f"--into says nothing with --to {to}", where="--into", fix="use --to mindformers")
    if out is None and (into is not None or to is not Target.EVENLOAD):
        raise EvenloadError("there is no file to write", where="command line", fix="name it with --out")


def _own_settings(model: str | None, to: Target) -> Path | None:
    """The MindFormers file that was planned for: the plan is put into a copy of it."""
    if to is not Target.MINDFORMERS or model is None or model_source(model) != "settings":
        return None
    return Path(model) if read_settings(model).dialect == "mindformers" else None


def _of_model(name: str | None, flags: Flags, tracing: Tracing) -> _Task:
    if name is None:
        raise EvenloadError(
            "there is nothing to plan", where="command line", fix="name a model, or a table with --profile"
        )
    inputs = read_inputs(name, flags)
    policy, autocast = inputs.plan.policy, autocast_type(tracing)

    def profile_of(setup: Setup) -> Profile:
        return formula_profile(inputs.model, setup, policy, autocast=autocast)

    problem = _problem(profile_of, inputs.plan, inputs.limit)
    notices = (*inputs.notices, *_excluded(policy, name))
    return _Task(problem=problem, name=inputs.model.name, model=name, profile_of=profile_of, notices=notices)


def _of_layers(traced: Traced, name: str) -> _Task:
    """A model that was traced, or measured."""
    problem = _problem(traced.profile_of, traced.plan, traced.limit)
    notices = (*traced.notices, *_excluded(traced.plan.policy, name))
    return _Task(
        problem=problem,
        name=traced.model.name,
        model=traced.model.name,
        profile=traced.plan.profile,
        profile_of=traced.profile_of,
        notices=notices,
    )


def _problem(profile_of: Callable[[Setup], Profile], plan: Plan, limit: int | None) -> Problem:
    if limit is None:
        raise EvenloadError("there is no memory limit", where="--memory", fix="give one, such as --memory 64GiB")
    return Problem(
        profile=profile_of(plan.setup),
        setup=plan.setup,
        limit=float(limit),
        select=tuple(plan.policy.select) or DEFAULT_SELECT,
        comm=tuple(plan.policy.comm) or DEFAULT_COMM,
        switches=plan.policy,
    )


def _excluded(policy: Policy, name: str) -> list[Notice]:
    if not (policy.select_exclude or policy.comm_exclude):
        return []
    return [Notice(fact="exclude lists of the settings are not planned with", where=name)]


def _of_table(data: object, path: str, model: str | None, flags: Flags) -> _Task:
    if model is not None:
        raise EvenloadError("a table leaves nothing for a model to say", where="command line", fix=f"leave {model} out")
    refuse(flags, OF_TABLES, "says nothing over a table, which gives the costs itself")
    memory = flags.memory
    if memory is None:
        raise EvenloadError("there is no memory limit", where="--memory", fix="give one in the unit of the table")
    table = read_layer_table(data, path)
    if flags.schedule is None:
        flags = replace(flags, schedule=default_schedule(flags.interleave or 1))
    setup, notices = read_setup(None, flags)
    problem = Problem(profile=table.profile, setup=setup, limit=limit_in(memory, table.memory_unit))
    return _Task(problem=problem, name=table.name, model=None, profile_of=None, notices=(*table.notices, *notices))


def _solve(task: _Task, *, seed: int, effort: str, explained: bool) -> tuple[PlannerResult, Explanation | None]:
    budget = find_effort(effort)
    with _bar() as tell:
        result = Planner(task.problem, seed=seed, effort=budget, progress=tell).solve()
        if not explained or result.interrupted:
            return result, None
        try:
            return result, explain(result, task.problem, profile_of=task.profile_of, seed=seed)
        except KeyboardInterrupt:
            remark("interrupted: the comparisons are left out")
            return result, None


@contextmanager
def _bar() -> Generator[Callable[[Progress], None] | None]:
    """A progress bar on the terminal's stderr; nothing where stderr is a file."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415  # only for a terminal
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    parts = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[best]}"), TimeElapsedColumn())
    with Bar(*parts, console=Console(stderr=True), transient=True) as bar:
        number = bar.add_task("planning", total=1.0, best="")

        def tell(progress: Progress) -> None:
            best = "" if progress.step_time is None else f"{progress.step_time:.6g} (bound {progress.bound:.6g})"
            bar.update(number, completed=progress.done, description=progress.phase, best=best)

        yield tell


def _heading(task: _Task) -> str:
    setup, problem = task.problem.setup, task.problem
    degrees = [f"{name} {size}" for name in ("pp", "tp", "cp", "dp", "ep") if (size := getattr(setup, name)) > 1]
    if setup.interleave > 1:
        degrees.insert(1, f"{setup.interleave} chunks a stage")
    limit = amount(problem.limit, problem.profile.memory_unit)
    return (
        f"{task.name}: {len(problem.kinds)} layers, {' x '.join(degrees) or 'one device'}, "
        f"{setup.micro_batches} micro-batches, {setup.schedule}, {limit} a rank"
    )


def _write(plan: Plan, out: Path, to: Target, into: Path | None, *, force: bool) -> None:
    writing = write(Reading(dialect="evenload", plan=plan), to, into=into)
    write_text(out, writing.text, force=force)
    for loss in writing.losses:
        remark(f"lost: {loss}")
    remark(f"wrote {out}")
