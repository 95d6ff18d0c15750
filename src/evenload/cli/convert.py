"""`evenload convert`: a settings file in the words of another program."""

from __future__ import annotations

import os
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from evenload.cli._shared import ForceFlag, JsonFlag, remark, say, say_json, warn
from evenload.cli.check import read_for_model
from evenload.dialects.detect import DIALECTS
from evenload.dialects.reading import Reading, Writing
from evenload.dialects.yaml_source import read_yaml
from evenload.errors import EvenloadError
from evenload.files import write_text


class Target(StrEnum):
    """What can be written."""

    MINDFORMERS = "mindformers"
    PYNATIVE = "mindformers-pynative"
    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    TORCHTITAN_PYTHON = "torchtitan-python"
    EVENLOAD = "evenload"


def convert(
    file: Annotated[
        Path, typer.Argument(help="MindFormers YAML (r1.x or r2.0), an evenload plan, or Megatron-LM arguments.")
    ],
    *,
    to: Annotated[Target, typer.Option("--to", help="The target.")],
    out: Annotated[Path | None, typer.Option(help="File to write; standard output otherwise.")] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            help="MindFormers settings to put the plan into: all but layout and recomputation stays as it is."
        ),
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
    dialect: Annotated[
        str | None, typer.Option(help=f"Read the file as one of {', '.join(DIALECTS)}; by default its content decides.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A preset or a config.json: its layers, where the file does not name them, and its MTP layers."
        ),
    ] = None,
) -> None:
    """Write the plan of a settings file for another program, and name what that program cannot express."""
    if into is not None and to is not Target.MINDFORMERS:
        raise EvenloadError(f"--into says nothing with --to {to}", where="--into", fix="use --to mindformers")
    reading = read_for_model(file, dialect, model)
    mtp = _mtp_layers(reading, file, model) if to is Target.MEGATRON else 0
    named = reading.plan.model or _model_of_plan(reading, file, model, out)
    reading = replace(reading, plan=replace(reading.plan, model=named))
    writing = write(reading, to, into=into, mtp=mtp)
    if out is not None:
        write_text(out, writing.text, force=force)
    if json:
        said = {"text": writing.text, "out": str(out) if out else None}
        say_json(said | {"losses": writing.losses, "warnings": reading.notices})
        return
    warn(reading.notices)
    for loss in writing.losses:
        remark(f"lost: {loss}")
    if out is None:
        say(writing.text.rstrip("\n"))
    else:
        remark(f"wrote {out}")


def _model_of_plan(reading: Reading, file: Path, model: str | None, out: Path | None) -> str | None:
    """What a plan calls its model: the preset, or the path of the file that describes it, from where the plan lies."""
    if model is None and reading.model_config is None:
        return None
    from evenload.model.presets import preset_names  # noqa: PLC0415  # only where there is a model

    source = model or str(file)
    if source.lower() in preset_names():
        return source.lower()
    return os.path.relpath(source, out.parent if out is not None else None)


def _mtp_layers(reading: Reading, file: Path, model: str | None) -> int:
    """MTP layers of the model, which Megatron-LM's layout has to place."""
    if model is not None:
        from evenload.model.presets import open_model  # noqa: PLC0415  # only with --model

        return len(open_model(model).mtp)
    if reading.plan.model:
        from evenload.cli.inputs import model_of  # noqa: PLC0415  # only for a plan that names its model

        return len(model_of(reading, str(file)).mtp)
    stated = (reading.model_config or {}).get("num_nextn_predict_layers", 0)
    return stated if isinstance(stated, int) and 0 <= stated <= 64 else 0


def write(reading: Reading, to: Target, *, into: Path | None = None, mtp: int = 0) -> Writing:
    """The plan in the words of the target."""
    plan = reading.plan
    match to:
        case Target.EVENLOAD:
            from evenload.dialects.native import write_native  # noqa: PLC0415  # each writer only where it is used

            return write_native(plan)
        case Target.MINDFORMERS:
            from evenload.dialects.mindformers_write import write_mindformers  # noqa: PLC0415

            return write_mindformers(plan, read_yaml(into) if into is not None else None)
        case Target.MEGATRON:
            from evenload.dialects.megatron_write import write_megatron  # noqa: PLC0415

            return write_megatron(plan, mtp=mtp)
        case Target.TORCHTITAN | Target.TORCHTITAN_PYTHON:
            from evenload.dialects.torchtitan import write_torchtitan  # noqa: PLC0415

            return write_torchtitan(plan, style="toml" if to is Target.TORCHTITAN else "python")
        case Target.PYNATIVE:
            from evenload.dialects.mindformers_pynative_write import write_pynative  # noqa: PLC0415

            return write_pynative(plan)
