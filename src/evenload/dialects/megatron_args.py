"""Megatron-LM's command-line arguments as values, read from a command, a shell script or an argument file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from evenload.errors import EvenloadError, Notice

Kind = Literal["int", "flag", "word", "words"]

KNOWN: Final[Mapping[str, Kind]] = {
    "--num-layers": "int",
    "--pipeline-model-parallel-size": "int",
    "--tensor-model-parallel-size": "int",
    "--context-parallel-size": "int",
    "--expert-model-parallel-size": "int",
    "--expert-tensor-parallel-size": "int",
    "--num-layers-per-virtual-pipeline-stage": "int",
    "--num-virtual-stages-per-pipeline-rank": "int",
    "--decoder-first-pipeline-num-layers": "int",
    "--decoder-last-pipeline-num-layers": "int",
    "--pipeline-model-parallel-layout": "word",
    "--account-for-embedding-in-pipeline-split": "flag",
    "--account-for-loss-in-pipeline-split": "flag",
    "--mtp-num-layers": "int",
    "--recompute-granularity": "word",
    "--recompute-method": "word",
    "--recompute-num-layers": "int",
    "--recompute-modules": "words",
    "--recompute-activations": "flag",
    "--distribute-saved-activations": "flag",
    "--micro-batch-size": "int",
    "--global-batch-size": "int",
    "--seq-length": "int",
    "--sequence-parallel": "flag",
    "--use-distributed-optimizer": "flag",
    "--bf16": "flag",
    "--fp16": "flag",
}
"""The arguments that say something about memory and layout here; Megatron-LM has hundreds more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One argument and where it stands."""

    value: int | str | tuple[str, ...] | bool
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """The known arguments of a command."""

    name: str
    """What errors call the source."""
    found: Mapping[str, Argument]
    notices: tuple[Notice, ...] = ()

    def number(self, name: str, absent: int | None = None) -> int | None:
        """Value of a whole-number argument."""
        argument = self.found.get(name)
        return absent if argument is None or not isinstance(argument.value, int) else argument.value

    def word(self, name: str) -> str | None:
        """Value of a text argument."""
        argument = self.found.get(name)
        return None if argument is None else str(argument.value)

    def words(self, name: str) -> tuple[str, ...]:
        """Values of an argument that takes several."""
        argument = self.found.get(name)
        return argument.value if argument is not None and isinstance(argument.value, tuple) else ()

    def flag(self, name: str) -> bool:
        """Whether a switch is given."""
        return name in self.found

    def where(self, name: str) -> str:
        """Place of an argument, or of the source when it is not given."""
        return self.found[name].where if name in self.found else self.name


def looks_like_megatron(text: str) -> bool:
    """Whether a text holds Megatron-LM arguments that evenload reads."""
    return any(re.search(rf"{re.escape(name)}\b", text) for name in ("--pipeline-model-parallel-size", "--num-layers"))


def read_arguments(text: str, *, name: str = "arguments") -> Arguments:
    """The known arguments in a text; unknown ones are passed over, near-misses of known ones are not.

    Raises:
        EvenloadError: a value that is missing, of the wrong type or a shell variable, an argument that is given twice
            with different values, or a misspelt one; with line.
    """
    found: dict[str, Argument] = {}
    words = _words(text, name)
    place = 0
    while place < len(words):
        word, where = words[place]
        place += 1
        key, _, inline = word.partition("=")
        if not key.startswith("--"):
            continue
        kind = KNOWN.get(key)
        if kind is None:
            _refuse_near_miss(key, where)
            continue
        values, place = ([inline], place) if inline else _values_after(words, place, kind)
        argument = Argument(value=_value(key, kind, values, where), where=where)
        if key in found and found[key].value != argument.value:
            raise EvenloadError(f"{key} is given twice, as {found[key].value} and as {argument.value}", where=where)
        found[key] = argument
    return Arguments(name=name, found=found)


def _values_after(words: list[tuple[str, str]], place: int, kind: Kind) -> tuple[list[str], int]:
    """The values that follow an argument: one, or as many as stand on its line."""
    values: list[str] = []
    while kind != "flag" and place < len(words):
        word, where = words[place]
        if word.startswith("--") or word == ")" or (values and (kind != "words" or where != words[place - 1][1])):
            break
        values.append(word)
        place += 1
    return values, place


def _words(text: str, name: str) -> list[tuple[str, str]]:
    """The words of a shell text, each with its line; comments and line ends removed."""
    words: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        lexer = shlex.shlex(line.rstrip().removesuffix("\\"), posix=True)
        lexer.whitespace_split = True
        lexer.commenters = "#"
        try:
            words += [(word, f"{name}:{number}") for word in lexer]
        except ValueError:
            continue  # a quote over several lines: scripts have them, the arguments read here do not
    return words


def _value(key: str, kind: Kind, values: list[str], where: str) -> int | str | tuple[str, ...] | bool:
    if kind == "flag":
        return True
    if not values:
        raise EvenloadError(f"{key} has no value", where=where)
    if any("$" in value for value in values):
        variable = next(value for value in values if "$" in value)
        raise EvenloadError(f"{key} is the shell variable {variable}", where=where, fix="write the number in its place")
    if kind == "words":
        return tuple(part for value in values for part in value.split(",") if part)
    if kind == "word":
        return values[0]
    try:
        return int(values[0])
    except ValueError:
        raise EvenloadError(f"{key} is {values[0]!r}, not a whole number", where=where) from None


def _refuse_near_miss(key: str, where: str) -> None:
    from difflib import get_close_matches  # noqa: PLC0415  # only for arguments that are not known

    # Megatron-LM has many names that differ in a word; only a slip of one or two letters surely means a known one.
    near = get_close_matches(key, KNOWN, n=1, cutoff=0.94)
    if near and abs(len(near[0]) - len(key)) <= 2:
        raise EvenloadError(f"{key} is not an argument of Megatron-LM", where=where, fix=f"did you mean {near[0]}?")
