"""`evenload estimate`: what every stage will hold, line by line, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from evenload.cli._shared import JsonFlag, VerboseFlag, say, say_json, warn
from evenload.cli.flags import Flags, Tracing, with_flags
from evenload.cli.inputs import Inputs, read_inputs
from evenload.cli.measured import read_profiled
from evenload.cli.traced import Traced, autocast_type, function_named, read_traced, refuse_tracing
from evenload.errors import ANSWER_NO, EvenloadError, Notice
from evenload.plan.plan import Plan
from evenload.profile.formula import formula_profile
from evenload.profile.numbers import read_data
from evenload.profile.profile import Profile
from evenload.report.estimate import as_json, as_text, estimate
from evenload.report.names import as_json as operators_json
from evenload.report.names import operator_tables
from evenload.simulate.timeline import simulate
from evenload.units import human_count, plural

MODEL: Final[Any] = typer.Argument(
    metavar="MODEL",
    help="A preset, a config.json, a directory that holds one, a settings file, or package.module:function.",
    show_default=False,
)
ModelArgument = Annotated[str, MODEL]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """A plan, what its layers cost, and what to say besides."""

    name: str
    heading: str
    profile: Profile
    plan: Plan
    limit: int | None
    notices: tuple[Notice, ...]
    ignored: tuple[str, ...] = ()
    """Keys of the model that say nothing here."""


@with_flags
def run(
    model: Annotated[str | None, MODEL] = None,
    *,
    profile: Annotated[
        str | None, typer.Option("--profile", help="A measured profile, in place of the model or beside it.")
    ] = None,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
    flags: Flags,
    tracing: Tracing,
) -> None:
    """Say what every pipeline stage will hold, line by line, and whether it fits."""
    asked = _asked(model, profile, flags, tracing)
    costs = asked.profile
    answer = estimate(costs, asked.plan, simulate(costs, asked.plan), asked.limit)
    warn(asked.notices)
    if json:
        said = as_json(answer) | {"model": asked.name, "assumptions": costs.notes, "warnings": asked.notices}
        if verbose:
            said |= {"ignored_keys": asked.ignored, "operators": operators_json(costs)}
        say_json(said)
    else:
        say(as_text(answer, asked.heading))
        if verbose:
            say(_more(asked))
    if answer.fits is False:
        raise typer.Exit(ANSWER_NO)


def _asked(model: str | None, profile: str | None, flags: Flags, tracing: Tracing) -> _Asked:
    if profile is not None:
        refuse_tracing(tracing, profile)
        return _of_layers(read_profiled(read_data(profile), profile, model, flags))
    if model is None:
        raise EvenloadError(
            "there is nothing to estimate", where="command line", fix="name a model, or a measured profile by --profile"
        )
    if function_named(model):
        return _of_layers(read_traced(model, flags, tracing))
    return _of_model(model, flags, tracing)


def _of_model(name: str, flags: Flags, tracing: Tracing) -> _Asked:
    refuse_tracing(tracing, name)
    inputs = read_inputs(name, flags)
    return _Asked(
        name=inputs.model.name,
        heading=_heading(inputs),
        profile=formula_profile(inputs.model, inputs.plan.setup, inputs.plan.policy, autocast=autocast_type(tracing)),
        plan=inputs.plan,
        limit=inputs.limit,
        notices=inputs.notices,
        ignored=inputs.model.ignored,
    )


def _of_layers(traced: Traced) -> _Asked:
    """A model that was traced, or measured."""
    return _Asked(
        name=traced.model.name,
        heading=traced.heading,
        profile=traced.profile,
        plan=traced.plan,
        limit=traced.limit,
        notices=traced.notices,
    )


def _heading(inputs: Inputs) -> str:
    model, setup = inputs.model, inputs.plan.setup
    degrees = [f"{name} {size}" for name in ("pp", "tp", "cp", "dp", "ep") if (size := getattr(setup, name)) > 1]
    if setup.interleave > 1:
        degrees.insert(1, f"{setup.interleave} chunks a stage")
    mtp = f" and {plural(len(model.mtp), 'MTP layer')}" if model.mtp else ""
    return ", ".join(
        (
            f"{model.name}: {human_count(model.parameters)} parameters in {plural(len(model.blocks), 'layer')}{mtp}",
            " x ".join(degrees) or "one device",
            f"{setup.micro_batches} x {setup.micro_batch} sequences of {setup.seq} tokens a step",
            f"{setup.dtype} on {setup.backend}",
        )
    )


def _more(asked: _Asked) -> str:
    """What `--verbose` adds: assumptions, keys without a meaning here, operators."""
    ignored = ", ".join(asked.ignored) or "none"
    lines = [
        "",
        "assumed:",
        *(f"  {note}" for note in asked.profile.notes),
        "",
        f"keys of the model not used: {ignored}",
        "",
    ]
    return "\n".join([*lines, operator_tables(asked.profile)])
