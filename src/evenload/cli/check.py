"""`evenload check`: what a settings file really says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenload.cli._shared import JsonFlag, VerboseFlag, say, say_json
from evenload.dialects.detect import DIALECTS, read_settings
from evenload.dialects.reading import Reading
from evenload.errors import EvenloadError
from evenload.report.check import check_json, check_text


def check(
    file: Annotated[
        Path, typer.Argument(help="MindFormers YAML (r1.x or r2.0), an evenload plan, or Megatron-LM arguments.")
    ],
    *,
    dialect: Annotated[
        str | None, typer.Option(help=f"Read the file as one of {', '.join(DIALECTS)}; by default its content decides.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A preset or a config.json, for settings that do not name the layers.")
    ] = None,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> None:
    """Show the layers and the recomputation of a settings file: normalized, per stage, per layer, with warnings."""
    reading = read_for_model(file, dialect, model)
    if json:
        say_json(check_json(reading))
    else:
        say(check_text(reading, verbose=verbose))


def read_for_model(file: Path, dialect: str | None, model: str | None) -> Reading:
    """The settings in a file; the layers of `model` count where the file names none.

    Raises:
        EvenloadError: no such settings or model, or the two have different numbers of layers.
    """
    if model is None:
        return read_settings(file, dialect=dialect)
    from evenload.model.presets import open_model  # noqa: PLC0415  # only with --model

    layers = len(open_model(model).blocks)
    reading = read_settings(file, dialect=dialect, num_layers=layers)
    placed = reading.plan.layout.num_layers
    if placed != layers:
        raise EvenloadError(
            f"the settings place {placed} layers, {model} has {layers}",
            where=str(file),
            fix="name the model that the settings were made for",
        )
    return reading
