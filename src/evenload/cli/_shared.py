"""What the verbs share: common options, and the rule that stdout carries the answer and stderr the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import typer

from evenload.errors import Notice

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the same numbers as JSON, and nothing else, on stdout.")]
VerboseFlag = Annotated[bool, typer.Option("--verbose", "-v", help="Print more.")]
ForceFlag = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]


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
