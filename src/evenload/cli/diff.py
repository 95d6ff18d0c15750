"""`evenload diff`: two recordings, or a prediction and a recording, subtracted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from evenload.cli._shared import JsonFlag, say, say_json, warn
from evenload.errors import ANSWER_NO, EvenloadError
from evenload.files import parse_json, read_text
from evenload.ledger.diff import Side, diff, predicted_side, side
from evenload.ledger.importing import read_allocations
from evenload.ledger.ledger import Ledger
from evenload.report.diff import as_json, as_text

Before = Annotated[
    str, typer.Argument(metavar="A", help="A ledger, snapshot or memory_block.csv; or what estimate --json printed.")
]
After = Annotated[str, typer.Argument(metavar="B", help="The same, compared with A.")]
StageOption = Annotated[
    int | None, typer.Option("--stage", help="Pipeline stage of a prediction; by default that of the ledger's rank.")
]
WithinOption = Annotated[
    float | None, typer.Option("--within", help="Exit with 1 if the peaks differ by more than so many per cent.")
]


def run(
    before: Before, after: After, *, stage: StageOption = None, within: WithinOption = None, json: JsonFlag = False
) -> None:
    """Say what changed between two recordings, or between a prediction and a recording."""
    if within is not None and not within >= 0:
        raise EvenloadError(f"{within} is no number of per cent", where="--within", fix="give 0 or more")
    one, two = _read(before), _read(after)
    ledgers = [read for read in (one, two) if isinstance(read, Ledger)]
    for ledger in ledgers:
        warn(ledger.notices)
    sides = [_side(read, name, stage, ledgers) for read, name in ((one, before), (two, after))]
    said = diff(*sides)
    if json:
        say_json(as_json(said))
    else:
        say(as_text(said))
    percent = said.held.percent
    differs = said.held.nbytes != 0 if percent is None else within is not None and abs(percent) > within
    if within is not None and differs:
        raise typer.Exit(ANSWER_NO)


def _read(path: str) -> Ledger | dict[str, Any]:
    """A ledger, or an estimate."""
    try:
        with Path(path).open("rb") as file:
            is_json = file.read(64).lstrip()[:1] == b"{"
    except (OSError, ValueError):
        is_json = False  # reading it as a ledger says what is wrong
    if not is_json:
        return read_allocations(path)
    value = parse_json(read_text(path), name=path)
    if not isinstance(value, dict):
        raise EvenloadError("this is no estimate", where=path, fix="write it with evenload estimate ... --json")
    return cast("dict[str, Any]", value)


def _side(read: Ledger | dict[str, Any], name: str, stage: int | None, ledgers: list[Ledger]) -> Side:
    if isinstance(read, Ledger):
        return side(read, name)
    return predicted_side(read, _stage(read, ledgers) if stage is None else stage, name, name)


def _stage(estimate: dict[str, Any], ledgers: list[Ledger]) -> int:
    """The stage of the ledger's rank, pipeline stages outermost, as Megatron and TorchTitan number ranks."""
    stages = estimate.get("stages")
    count = len(cast("list[Any]", stages)) if isinstance(stages, list) else 1
    if not ledgers or count < 2:
        return 0
    rank, world = ledgers[0].metadata.rank, ledgers[0].metadata.world
    if world % count:
        raise EvenloadError(
            f"the estimate has {count} stages and the recording {world} ranks",
            where="command line",
            fix="say which stage the ledger is of: --stage N",
        )
    return rank * count // world
