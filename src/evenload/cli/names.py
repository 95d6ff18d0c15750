r"""`evenload names`: every operator of a layer, its bytes, the pattern that frees it."""

from __future__ import annotations

from evenload.cli._shared import JsonFlag, say, say_json, warn
from evenload.cli.estimate import ModelArgument
from evenload.cli.flags import Flags, Tracing, with_flags
from evenload.cli.inputs import read_inputs
from evenload.cli.traced import autocast_type, function_named, read_traced, refuse_tracing
from evenload.profile.formula import formula_profile
from evenload.report.names import as_json, operator_tables


@with_flags
def run(model: ModelArgument, *, json: JsonFlag = False, flags: Flags, tracing: Tracing) -> None:
    """List the operators of every kind of layer, what each keeps, and the pattern that frees it."""
    if function_named(model):
        traced = read_traced(model, flags, tracing)
        profile, notices = traced.profile, traced.notices
    else:
        refuse_tracing(tracing, model)
        inputs = read_inputs(model, flags)
        autocast = autocast_type(tracing)
        profile = formula_profile(inputs.model, inputs.plan.setup, inputs.plan.policy, autocast=autocast)
        notices = inputs.notices
    warn(notices)
    if json:
        say_json(as_json(profile))
    else:
        say(operator_tables(profile))
