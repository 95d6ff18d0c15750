"""`evenload estimate`: what every stage will hold, line by line, and whether it fits."""

from __future__ import annotations

from typing import Annotated

import typer

from evenload.cli._shared import JsonFlag, VerboseFlag, say, say_json, warn
from evenload.cli.flags import Flags, with_flags
from evenload.cli.inputs import Inputs, read_inputs
from evenload.errors import ANSWER_NO
from evenload.profile.formula import formula_profile
from evenload.profile.profile import Profile
from evenload.report.estimate import as_json, as_text, estimate
from evenload.report.names import as_json as operators_json
from evenload.report.names import operator_tables
from evenload.simulate.timeline import simulate
from evenload.units import human_count, plural

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A preset, a config.json, a directory that holds one, or a settings file."),
]


@with_flags
def run(model: ModelArgument, *, json: JsonFlag = False, verbose: VerboseFlag = False, flags: Flags) -> None:
    """Say what every pipeline stage will hold, line by line, and whether it fits."""
    inputs = read_inputs(model, flags)
    profile = formula_profile(inputs.model, inputs.plan.setup, inputs.plan.policy)
    answer = estimate(profile, inputs.plan, simulate(profile, inputs.plan), inputs.limit)
    warn(inputs.notices)
    if json:
        said = as_json(answer) | {"model": inputs.model.name, "assumptions": profile.notes, "warnings": inputs.notices}
        if verbose:
            said |= {"ignored_keys": inputs.model.ignored, "operators": operators_json(profile)}
        say_json(said)
    else:
        say(as_text(answer, _heading(inputs)))
        if verbose:
            say(_more(inputs, profile))
    if answer.fits is False:
        raise typer.Exit(ANSWER_NO)


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


def _more(inputs: Inputs, profile: Profile) -> str:
    """What `--verbose` adds: assumptions, keys without a meaning here, operators."""
    ignored = ", ".join(inputs.model.ignored) or "none"
    lines = ["", "assumed:", *(f"  {note}" for note in profile.notes), "", f"keys of the model not used: {ignored}", ""]
    return "\n".join([*lines, operator_tables(profile)])
