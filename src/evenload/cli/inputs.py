"""From a model argument, a settings file and flags to a model and a plan: where `estimate` and `plan` start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from evenload.cli.flags import Flags
from evenload.dialects.detect import read_settings
from evenload.dialects.reading import Reading
from evenload.errors import EvenloadError, Notice, did_you_mean
from evenload.files import exists, parse_json
from evenload.model import Model
from evenload.model.huggingface import model_from_config
from evenload.model.presets import model_source, open_config, open_model, preset_names
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy, Recompute
from evenload.profile.hardware import find_hardware
from evenload.setup import Setup, check_setup
from evenload.units import MIB, parse_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a verb works on."""

    model: Model
    plan: Plan
    config: Mapping[str, Any]
    """The model as a Hugging Face configuration, for programs that build it."""
    limit: int | None = None
    """Bytes of one device, where somebody named them."""
    notices: tuple[Notice, ...] = ()


def read_inputs(name: str, flags: Flags) -> Inputs:
    """Read a model and everything said about its training.

    A settings file gives a whole plan; flags are laid over it. Without one, degrees are 1, layers are dealt evenly and
    nothing is recomputed.

    Raises:
        EvenloadError: a file that cannot be read, a flag that cannot be meant, or degrees that do not divide.
    """
    own = read_settings(name) if model_source(name) == "settings" else None
    reading = read_settings(flags.config) if flags.config else own
    named, config = (name, None) if own is None else described(own, name)
    model = _model(named, config)
    setup, notices = read_setup(reading, flags)
    legal = (flags.noticed(notice) for notice in check_setup(model, setup))
    layout, said = read_layout(model.name, len(model.blocks), setup, reading, flags)
    measured = profile_beside(reading, flags.config or name)
    plan = Plan(setup=setup, layout=layout, policy=read_policy(reading, layout, flags), model=name, profile=measured)
    return Inputs(
        model=model,
        plan=plan,
        config=open_config(named) if config is None else config,
        limit=read_limit(reading, flags),
        notices=(*model.notices, *(reading.notices if reading else ()), *notices, *legal, *said),
    )


def model_of(reading: Reading, name: str) -> Model:
    """The model that the settings file `name` describes or names; a path is looked for beside the file first.

    Raises:
        EvenloadError: it does neither, or the model cannot be read.
    """
    return _model(*described(reading, name))


def _model(named: str, config: Mapping[str, Any] | None) -> Model:
    return open_model(named) if config is None else model_from_config(config, where=named)


def described(own: Reading, name: str) -> tuple[str, Mapping[str, Any] | None]:
    """What describes the model: the name of a preset or a file, or the configuration in the settings called so."""
    if own.model_config is not None:
        return name, own.model_config
    if own.plan.model:
        named, beside = own.plan.model, str(Path(name).parent / own.plan.model)
        if exists(beside) and named.lower() not in preset_names():
            named = beside
        config = read_settings(named).model_config if model_source(named) == "settings" else None
        if config is not None or model_source(named) != "settings":
            return named, config
    raise EvenloadError(
        "the settings file describes no model", where=name, fix="name the model first, and this file by --config"
    )


def read_setup(reading: Reading | None, flags: Flags, *, plain: Setup | None = None) -> tuple[Setup, list[Notice]]:
    """The setup of a settings file with the flags laid over it; without a file, micro-batches that fill the pipeline.

    Args:
        reading: the settings file.
        flags: what is laid over it.
        plain: what holds without a file; None: the defaults.

    Raises:
        EvenloadError: a value that a setup cannot have.
    """
    setup = flags.over(reading.plan.setup if reading else plain or Setup())
    if reading is None and flags.micro_batches is None and setup.pp > 1:
        enough = setup.pp * (2 if setup.interleave > 1 else 1)
        fact = f"{enough} micro-batches are assumed, which fill the pipeline"
        return replace(setup, micro_batches=enough), [Notice(fact=fact, where="--micro-batches", fix="give the number")]
    return setup, []


def read_layout(
    name: str, layers: int, setup: Setup, reading: Reading | None, flags: Flags
) -> tuple[Layout, tuple[Notice, ...]]:
    """Where the layers go, and what to say of it beyond the warnings of the file.

    Args:
        name: what the model is called.
        layers: how many it has.
        setup: how it is trained.
        reading: a settings file.
        flags: what is laid over it.

    Raises:
        EvenloadError: the settings place another number of layers, or the offset cannot be meant.
    """
    if flags.offset is not None:
        offset = cast("Any", parse_json(flags.offset, name="--offset"))
        layout = Layout.from_offset(layers, pp=setup.pp, interleave=setup.interleave, offset=offset)
        return layout, layout.notices("--offset")
    if reading is None or (reading.plan.setup.pp, reading.plan.setup.interleave) != (setup.pp, setup.interleave):
        return Layout.even(layers, pp=setup.pp, interleave=setup.interleave), ()
    if reading.plan.layout.num_layers != layers:
        raise EvenloadError(
            f"the settings place {reading.plan.layout.num_layers} layers, {name} has {layers}",
            where=flags.config,
            fix="name the model that the settings were made for, or give --offset",
        )
    return reading.plan.layout, ()


def read_policy(reading: Reading | None, layout: Layout, flags: Flags) -> Policy:
    """What is recomputed.

    Raises:
        EvenloadError: there is no such choice.
    """
    if flags.recompute is not None:
        word = flags.recompute.lower()
        if word not in set(Recompute):
            hint = did_you_mean(word, [choice.value for choice in Recompute])
            raise EvenloadError(
                f"recompute is {flags.recompute!r}",
                where="--recompute",
                fix=hint or f"use one of {', '.join(Recompute)}; single layers are named in a settings file",
            )
        return Policy.everywhere(Recompute(word), layout.num_layers)
    return reading.plan.policy if reading else Policy()


def profile_beside(reading: Reading | None, path: str) -> str | None:
    """Path of the measured profile that a plan names, from the directory that the plan is in."""
    named = None if reading is None else reading.plan.profile
    return None if named is None else str(Path(path).parent / named)


def read_limit(reading: Reading | None, flags: Flags) -> int | None:
    """Bytes of one device, where somebody named them.

    Raises:
        EvenloadError: the size cannot be read, or is less than any device has.
    """
    if flags.memory is not None:
        limit = parse_bytes(flags.memory, where="--memory")
        if limit < MIB:
            raise EvenloadError(
                f"{flags.memory!r} is {limit} bytes, less than any device has",
                where="--memory",
                fix=f"give the unit, such as {flags.memory.strip()}GiB" if flags.memory.strip().isdigit() else None,
            )
        return limit
    if reading is not None and reading.limit is not None:
        return reading.limit
    return find_hardware(flags.hardware).memory if flags.hardware is not None else None
