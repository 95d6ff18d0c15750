r"""`evenload names`: every operator of a layer, its bytes, the pattern that frees it."""

from __future__ import annotations

from evenload.cli._shared import JsonFlag, say, say_json, warn
from evenload.cli.estimate import ModelArgument
from evenload.cli.flags import Flags, with_flags
from evenload.cli.inputs import read_inputs
from evenload.profile.formula import formula_profile
from evenload.report.names import as_json, operator_tables


@with_flags
def run(model: ModelArgument, *, json: JsonFlag = False, flags: Flags) -> None:
    """List the operators of every kind of layer, what each keeps, and the pattern that frees it."""
    inputs = read_inputs(model, flags)
    profile = formula_profile(inputs.model, inputs.plan.setup, inputs.plan.policy)
    warn(inputs.notices)
    if json:
        say_json(as_json(profile))
    else:
        say(operator_tables(profile))
