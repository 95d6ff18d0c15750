"""`evenload profile`: run one layer of each kind here, and write what it takes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from evenload.cli._shared import ForceFlag, JsonFlag, end_silently, remark, say, say_json, warn
from evenload.cli.flags import Flags, with_flags
from evenload.cli.inputs import described, read_inputs, read_setup
from evenload.cli.tables import refuse
from evenload.cli.traced import function_named
from evenload.dialects.detect import read_settings
from evenload.errors import WRONG_INPUT, EvenloadError, Notice
from evenload.files import refuse_existing
from evenload.model.presets import model_source
from evenload.profile.measured_file import write_measured
from evenload.record import require_torch
from evenload.report.profile import profile_answer, profile_text
from evenload.setup import Setup
from evenload.units import parse_bytes

MEANT: Final = frozenset(
    {"seq", "micro_batch", "dtype", "attention", "optimizer", "hardware", "config", "grad_dtype", "optimizer_dtype"}
)
"""Flags that change what one layer takes."""
MOST_ROUNDS: Final = 10_000


@with_flags
def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for estimate; or a plan, whose model is measured.")],
    *,
    out: Annotated[Path, typer.Option("--out", help="File for the profile.")],
    rounds: Annotated[int, typer.Option("--rounds", help="How often everything runs; medians are written.")] = 20,
    bandwidth: Annotated[
        str | None,
        typer.Option("--bandwidth", help="Bytes a second between two ranks, such as 10GB, where one process measures."),
    ] = None,
    autocast: Annotated[
        str | None, typer.Option("--autocast", help="Type of forward under autocast: bf16, fp16.")
    ] = None,
    adamw: Annotated[str, typer.Option("--adamw", help="Form of AdamW: fused, foreach or loop.")] = "fused",
    layers: Annotated[
        str | None, typer.Option("--layers", help="Path of what holds the repeated layers, if not obvious.")
    ] = None,
    implementation: Annotated[
        str, typer.Option("--implementation", help="Whose model code: auto, transformers or reference.")
    ] = "auto",
    force: ForceFlag = False,
    json: JsonFlag = False,
    flags: Flags,
) -> None:
    """Run one layer of each kind here, and write how long it takes: evenload profile MODEL --out measured.json."""
    require_torch()
    from evenload.runtime.launch import Silent  # noqa: PLC0415  # imports torch
    from evenload.runtime.profiling import profile_model  # noqa: PLC0415
    from evenload.runtime.settings import RunSettings  # noqa: PLC0415

    try:
        refuse(flags, MEANT, "says nothing of a single layer: evenload plan and evenload simulate take it")
        refuse_existing(out, force=force)
        _check_rounds(rounds)
        stated = None if bandwidth is None else _rate(bandwidth)
        said: dict[str, Any] = {"autocast": autocast, "adamw": adamw, "implementation": implementation}
        settings = RunSettings(layers=layers, **said)
        source, name, setup, notices = _source(model, flags)
    except EvenloadError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            end_silently(WRONG_INPUT)
        raise
    speaks = os.environ.get("RANK", "0") == "0"
    if speaks:
        warn(notices)
    try:
        found = profile_model(
            source, name, setup, settings, rounds=rounds, bandwidth=stated, tell=remark if speaks else None
        )
    except Silent as silent:
        end_silently(silent.exit_code)
    if not speaks:
        return
    write_measured(out, found, force=force)
    if json:
        say_json(profile_answer(found))
    else:
        say(profile_text(found))
    remark(f"wrote {out}")


def _check_rounds(rounds: int) -> None:
    if not 1 <= rounds <= MOST_ROUNDS:
        raise EvenloadError(f"rounds is {rounds}", where="--rounds", fix=f"give 1 to {MOST_ROUNDS}")


def _rate(text: str) -> float:
    """Bytes a second."""
    rate = parse_bytes(text.removesuffix("/s"), where="--bandwidth")
    if rate < 1:
        raise EvenloadError(f"{text!r} sends nothing", where="--bandwidth", fix="give bytes a second, such as 10GB")
    return float(rate)


def _source(name: str, flags: Flags) -> tuple[Any, str, Setup, tuple[Notice, ...]]:
    """The model as a configuration or a function, its name, and the setup of one micro-batch."""
    if not function_named(name):
        inputs = read_inputs(name, flags)
        named = described(read_settings(name), name)[0] if model_source(name) == "settings" else name
        return inputs.config, named, _one(inputs.plan.setup), inputs.notices
    from evenload.record.functions import load_function  # noqa: PLC0415  # imports torch

    own = read_settings(name) if model_source(name) == "settings" else None
    reading = read_settings(flags.config) if flags.config else own
    function = name if own is None else str(own.plan.model)
    setup, notices = read_setup(reading, flags)
    return load_function(function), function, _one(setup), (*(reading.notices if reading else ()), *notices)


def _one(setup: Setup) -> Setup:
    """The setup of one stage."""
    return replace(setup, pp=1, interleave=1, micro_batches=1, schedule="1f1b")
