"""Allocator settings as they stand in an environment variable: read, and checked as the allocator would read them.

PyTorch stops at most mistakes, some of them only when the first tensor reaches the device; MindSpore drops what it does
not understand without a word. Either way the answer is better before a job has waited for its devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from evenload.errors import Notice, did_you_mean, shown
from evenload.ledger.settings_keys import (
    CUDA_CLASHES,
    CUDA_KEYS,
    MINDSPORE_CLASHES,
    MINDSPORE_KEYS,
    NPU_CLASHES,
    NPU_KEYS,
    Clash,
    Key,
    Kind,
    on,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One allocator: what it knows and how it reads."""

    name: str
    keys: Mapping[str, Key]
    clashes: tuple[Clash, ...]
    separators: str
    """Characters that end a setting."""
    switches: frozenset[str]
    """Values of a switch that it understands."""
    strict: bool
    """Whether it stops at what it does not understand; otherwise it goes on without it."""


_TORCH_SWITCHES: Final = frozenset({"True", "False"})
CUDA: Final = Family(
    name="PyTorch", keys=CUDA_KEYS, clashes=CUDA_CLASHES, separators=",", switches=_TORCH_SWITCHES, strict=True
)
NPU: Final = Family(
    name="torch_npu", keys=NPU_KEYS, clashes=NPU_CLASHES, separators=",", switches=_TORCH_SWITCHES, strict=True
)
MINDSPORE: Final = Family(
    name="MindSpore",
    keys=MINDSPORE_KEYS,
    clashes=MINDSPORE_CLASHES,
    separators=",;",
    switches=_TORCH_SWITCHES | {"true", "false"},
    strict=False,
)
VARIABLES: Final[dict[str, Family]] = {
    "PYTORCH_CUDA_ALLOC_CONF": CUDA,
    "PYTORCH_HIP_ALLOC_CONF": CUDA,
    "PYTORCH_ALLOC_CONF": CUDA,
    "PYTORCH_NPU_ALLOC_CONF": NPU,
    "MS_ALLOC_CONF": MINDSPORE,
}
"""Environment variables that hold allocator settings; of PyTorch's own, 2.13 reads the first that is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocConf:
    """The settings in one environment variable."""

    variable: str
    text: str
    settings: Mapping[str, str]
    """Value of every setting that is meant, as written; of duplicates the last, which is the one that counts."""
    notices: tuple[Notice, ...] = ()
    """What is wrong, in the order of the text."""
    accepted: bool = True
    """Whether the allocator starts with it; MindSpore starts with anything."""

    def on(self, key: str) -> bool:
        """Whether a switch is meant to be on."""
        return on(self.settings, key)


def read_alloc_conf(text: str, *, variable: str | None = None, where: str | None = None, column: int = 1) -> AllocConf:
    """The settings in the value of an environment variable, with everything that is wrong with them.

    Args:
        text: the value, or `VARIABLE=value`.
        variable: name of the variable; None: the one in the text, or the one whose keys it uses.
        where: file and line that errors name; None: the variable.
        column: column in that line at which the text begins.
    """
    assigned = re.match(r"\s*(?:export\s+)?([A-Z][A-Z_]*_ALLOC_CONF)\s*=\s*", text)
    if variable is None and assigned and assigned.group(1) in VARIABLES:
        variable, column, text = assigned.group(1), column + assigned.end(), text[assigned.end() :].rstrip()
        if len(text) > 1 and text[0] in "\"'" and text[-1] == text[0]:  # the shell removes them
            column, text = column + 1, text[1:-1]
    variable = variable or _guess(text)
    return _Reading(text, variable, where or variable, column).conf()


def alloc_conf_of(environ: Mapping[str, str]) -> str:
    """The settings that PyTorch takes from an environment; empty where it has none."""
    names = (name for name, family in VARIABLES.items() if family is not MINDSPORE)
    return next((environ[name] for name in names if name in environ), "")


def _guess(text: str) -> str:
    """The variable whose keys a text uses; PyTorch's where that is not clear."""
    words = set(re.findall(r"\w+", text))
    if words & (MINDSPORE_KEYS.keys() - CUDA_KEYS.keys()):
        return "MS_ALLOC_CONF"
    if words & (NPU_KEYS.keys() - CUDA_KEYS.keys()):
        return "PYTORCH_NPU_ALLOC_CONF"
    return "PYTORCH_ALLOC_CONF"


class _Reading:
    """One pass over the text: settings on one side, notices on the other."""

    def __init__(self, text: str, variable: str, where: str, column: int) -> None:
        self._text, self._variable, self._where, self._column = text, variable, where, column
        self._family = VARIABLES[variable]
        self._notices: list[Notice] = []
        self._accepted = True
        self._settings: dict[str, str] = {}
        self._columns: dict[str, int] = {}

    def conf(self) -> AllocConf:
        for start, part in self._parts():
            self._part(start, part)
        for clash in self._family.clashes:
            if clash.when(self._settings):
                at = max((self._columns[key] for key in clash.keys if key in self._columns), default=0)
                self._say(at, clash.fact, clash.fix, fatal=clash.fatal)
        return AllocConf(
            variable=self._variable,
            text=self._text,
            settings=self._settings,
            notices=tuple(self._notices),
            accepted=self._accepted or not self._family.strict,
        )

    def _say(self, start: int, fact: str, fix: str | None, *, fatal: bool = True) -> None:
        self._accepted = self._accepted and not fatal
        self._notices.append(Notice(fact=fact, where=f"{self._where}:{self._column + start}", fix=fix))

    def _consequence(self) -> str:
        return f"{self._family.name} stops at it" if self._family.strict else f"{self._family.name} drops it silently"

    def _parts(self) -> Iterator[tuple[int, str]]:
        """Settings with their positions; a separator inside brackets belongs to the value."""
        start, depth = 0, 0
        for position, character in enumerate(f"{self._text},"):
            depth += (character == "[") - (character == "]")
            if character in ",;" and (depth <= 0 or position == len(self._text)):
                if character not in self._family.separators:
                    self._say(position, "settings are separated by a semicolon", "write a comma instead of `;`")
                part = self._text[start:position]
                if part.strip():
                    yield start + len(part) - len(part.lstrip()), part.strip()
                elif self._family.strict and position < len(self._text):
                    self._say(position, f"no setting stands before this comma, and {self._consequence()}", "remove it")
                start = position + 1

    def _part(self, start: int, part: str) -> None:
        bare = part.strip("'\"")
        if bare != part:
            self._say(
                start, f"a quotation mark is part of the value: {shown(part)}", "remove the inner quotation marks"
            )
            start, part = start + len(part) - len(part.lstrip("'\"")), bare.strip()
        found = re.search("[:=]", part)
        if "$" in (part if found is None else part[: found.start()]):
            return  # a variable of the shell, which only the shell can read
        if found is None:
            key = part.strip()
            self._known(start, key)
            self._say(start, f"{key!r} has no value, and {self._consequence()}", f"write {key}:VALUE")
            return
        key, value = part[: found.start()].strip(), part[found.end() :].strip()
        if found.group() == "=":
            self._say(
                start + found.start(),
                f"`=` stands between {key!r} and its value, where `:` belongs, and {self._consequence()}",
                f"write {key}:{value}",
            )
        if not self._known(start, key):
            return
        if key in self._settings:
            self._say(start, f"{key} is given twice; the last one counts", "keep one of them", fatal=False)
        self._settings[key] = value
        self._columns[key] = start
        self._check(start + found.end(), key, self._family.keys[key], value)

    def _known(self, start: int, key: str) -> bool:
        if key in self._family.keys:
            return True
        other = next((name for name, family in VARIABLES.items() if key in family.keys), None)
        fix = f"it belongs into {other}" if other else did_you_mean(key.lower(), list(self._family.keys))
        self._say(
            start,
            f"{self._family.name} knows no setting {shown(key)}, and {self._consequence()}",
            fix or f"use one of {', '.join(self._family.keys)}",
        )
        return False

    def _check(self, start: int, key: str, known: Key, value: str) -> None:
        if "$" in value:
            return
        if not value:
            self._say(start, f"{key!r} has no value, and {self._consequence()}", f"write {key}:VALUE")
        elif known.kind == "switch":
            self._switch(start, key, value)
        elif problem := _CHECKS[known.kind](known, value):
            fact, fix, fatal = problem
            said = f", and {self._consequence()}" if fatal else ""
            self._say(start, f"{key}:{value} {fact}{said}", fix, fatal=fatal)

    def _switch(self, start: int, key: str, value: str) -> None:
        if value not in self._family.switches:
            meant = {"1": "True", "true": "True", "on": "True", "yes": "True"}.get(value.lower(), "False")
            if value.lower() not in {"1", "0", "true", "false", "on", "off", "yes", "no"}:
                meant = "True or False"
            self._say(start, f"{key}:{value} is not True or False, and {self._consequence()}", f"write {key}:{meant}")


_Problem = tuple[str, str, bool]
"""What is wrong with a value, what to write, and whether the allocator refuses it."""
_INTEGER: Final = re.compile(r"[0-9]+")
_LEADING: Final = re.compile(r"[0-9]+\.?[0-9]*")


def _integer(known: Key, value: str) -> _Problem | None:
    unit = f" (in {known.unit})" if known.unit else ""
    if not _INTEGER.fullmatch(value):
        leading = _LEADING.match(value)
        if re.fullmatch("-[0-9]+", value) and known.high == math.inf:
            return "is negative, which is read as no limit at all", f"write at least {known.low:g}, or remove it", False
        if leading is None:
            return f"is not a whole number{unit}", f"write a number of at least {known.low:g}", True
        number = int(float(leading.group()))
        return (
            f"is read as {number}: the rest of it is ignored{unit}",
            f"write {max(number, int(known.low))}",
            not known.low <= number <= known.high,
        )
    if len(value) > 15:
        return "is larger than any memory", "write the number that was meant", True
    number = int(value)
    if not known.low <= number <= known.high:
        limit = f"at least {known.low:g}" if number < known.low else f"at most {known.high:g}"
        return f"is out of range{unit}", f"write a number of {limit}", True
    if known.power_of_two and number & (number - 1):
        return "is not a power of two", f"write {1 << (number.bit_length() - 1)}", True
    return None


def _fraction(known: Key, value: str) -> _Problem | None:
    ends = "between 0 and 1, both excluded" if known.open else "from 0 to 1"
    try:
        number = float(value)
    except ValueError:
        percent = re.fullmatch(r"([0-9.]+)%", value)
        fix = f"write {float(percent.group(1)) / 100:g}" if percent else f"write a number {ends}"
        return f"is not a number {ends}", fix, True
    inside = 0 < number < 1 if known.open else 0 <= number <= 1
    if inside:
        return None
    percent = 1 < number < 100
    return f"is not a number {ends}", f"write {number / 100:g}" if percent else f"write a number {ends}", True


def _divisions(_: Key, value: str) -> _Problem | None:
    example = "write a power of two, or a list such as [256:1,512:2,1024:4,>:8]"
    if not value.startswith("["):
        return None if _power_of_two(value) else ("is not a power of two", example, True)
    if not value.endswith("]"):
        return "has no closing bracket", example, True
    for pair in filter(None, (item.strip() for item in value[1:-1].split(","))):
        size, _colon, divisions = (word.strip() for word in pair.partition(":"))
        if size != ">" and not _power_of_two(size):
            return f"divides at {shown(size)}, which is no power of two (in MiB)", example, True
        if divisions != "0" and not _power_of_two(divisions):
            return f"has {shown(divisions)} divisions, which is no power of two", example, True
    return None


def _power_of_two(text: str) -> bool:
    number = int(text) if _INTEGER.fullmatch(text) and len(text) < 19 else 0
    return number > 0 and number & (number - 1) == 0


def _reserve(_: Key, value: str) -> _Problem | None:
    try:
        number = float(value.removesuffix("G").removesuffix("g"))
    except ValueError:
        number = math.nan
    if math.isfinite(number) and number > 0:
        return None
    return "is neither a share nor a size, and ignored", "write a share such as 0.5, or a size such as 40G", False


def _choice(known: Key, value: str) -> _Problem | None:
    if value in known.choices:
        return None
    words = " or ".join(known.choices)
    return f"is not {words}", did_you_mean(value, list(known.choices)) or f"write {words}", True


def _text(_known: Key, _value: str) -> _Problem | None:
    return None


_CHECKS: Final[dict[Kind, Callable[[Key, str], _Problem | None]]] = {
    "integer": _integer,
    "fraction": _fraction,
    "divisions": _divisions,
    "reserve": _reserve,
    "choice": _choice,
    "text": _text,
}
