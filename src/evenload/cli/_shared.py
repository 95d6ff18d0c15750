"""What the verbs share: common options, and the rule that stdout carries the answer and stderr the rest."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from typing import Annotated, Any, Final, NoReturn

import msgspec
import typer

from evenload.errors import Notice

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the same numbers as JSON, and nothing else, on stdout.")]
VerboseFlag = Annotated[bool, typer.Option("--verbose", "-v", help="Print more.")]
ForceFlag = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]
SILENCE: Final = 20.0
"""Seconds that a rank gives the one that speaks for it."""


def say(text: str) -> None:
    """Print a part of the answer."""
    print(text)


def say_json(value: Any) -> None:
    """Print the answer as JSON: dataclasses, tuples and enums included; a NaN or infinity becomes null."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def remark(text: str) -> None:
    """Print something that is not the answer: progress, a file written."""
    print(text, file=sys.stderr)


def warn(notices: Iterable[Notice]) -> None:
    """Print warnings, each with its place and what to do."""
    for notice in notices:
        remark(f"warning: {notice}")


def end_silently(code: int) -> NoReturn:
    """End a rank for which another one speaks; under torchrun later than that one, because the first end ends them all.

    Args:
        code: what the process exits with.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(SILENCE)
    raise typer.Exit(code) from None
