"""A measured profile in the place of a model, or beside one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from evenload.cli.flags import Flags
from evenload.cli.inputs import read_inputs, read_layout, read_limit, read_policy, read_setup
from evenload.cli.traced import Traced, function_named
from evenload.dialects.detect import read_settings
from evenload.files import exists
from evenload.model.presets import model_source, preset_names
from evenload.plan.plan import Plan
from evenload.profile.measured import digest_of
from evenload.profile.measured_file import read_measured


def read_profiled(data: object, path: str, name: str | None, flags: Flags) -> Traced:
    """A measured profile, and everything said about the training of its model.

    Args:
        data: the parsed file.
        path: what it is called.
        name: the model, where the user names one beside it.
        flags: what the user says.

    Raises:
        EvenloadError: the profile is broken, or one of another model, or of another setup.
    """
    measured = read_measured(data, path)
    own = read_settings(name) if name is not None and model_source(name) == "settings" else None
    reading = read_settings(flags.config) if flags.config else own
    if name is not None:
        measured.check_model(name, _digest(name, flags))
    setup, notices = read_setup(reading, flags, plain=measured.setup)
    measured.check(setup)
    layout, said = read_layout(measured.model, len(measured.kinds), setup, reading, flags)
    policy = read_policy(reading, layout, flags)
    plan = Plan(setup=setup, layout=layout, policy=policy, model=measured.model, profile=path)
    warned = (*(reading.notices if reading else ()), *notices, *said)
    return Traced(model=measured, plan=plan, limit=read_limit(reading, flags), notices=warned)


def beside(plan: Plan, out: Path) -> Plan:
    """A plan that is to be written to a file: the files of its model and its profile are named from there."""
    profile = None if plan.profile is None else _from(plan.profile, out)
    model, file = plan.model, plan.model is not None and plan.model.lower() not in preset_names() and exists(plan.model)
    return replace(plan, profile=profile, model=_from(model, out) if model and file else model)


def _from(path: str, out: Path) -> str:
    """A path as it is named beside a file."""
    return Path(os.path.relpath(Path(path).resolve(), out.resolve().parent)).as_posix()


def _digest(name: str, flags: Flags) -> str:
    if not function_named(name):
        return digest_of(read_inputs(name, flags).config)
    return digest_of(name if model_source(name) == "module" else str(read_settings(name).plan.model))
