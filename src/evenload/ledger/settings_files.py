"""Allocator settings as scripts set them: every assignment of a shell, environment, Docker or Python file, in order.

A variable holds one text. A later assignment therefore wipes an earlier one, unless it repeats what was there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from evenload.errors import Notice
from evenload.files import read_text
from evenload.ledger.settings import CUDA, VARIABLES, AllocConf, read_alloc_conf

_NAME: Final = "|".join(sorted(VARIABLES, key=len, reverse=True))
_ASSIGNMENTS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        # Shell, .env, Docker: [export|ENV|...] NAME=value, also before a command; a word may stand before it.
        rf"(?:^|[\s;&|({{`'\"-])(?P<name>{_NAME})(?P<adds>\+?)=(?P<value>\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s;&|)}}]*)",
        # Python: os.environ["NAME"] = "value", environ.setdefault(...), putenv(...), {"NAME": "value"}; also YAML.
        rf"[\"'](?P<name>{_NAME})[\"']\s*(?:\]\s*=|,|:)\s*f?(?P<value>\"[^\"]*\"|'[^']*')",
        rf"^\s*(?:-\s*)?(?P<name>{_NAME})\s*:\s+(?P<value>\"[^\"]*\"|'[^']*'|[^\s#]+)",
        rf"^\s*(?:setenv|ENV)\s+(?P<name>{_NAME})\s+(?P<value>\"[^\"]*\"|'[^']*'|\S+)",
    )
)
_SPACED: Final = re.compile(rf"^\s*(?:export\s+|set\s+)?(?P<name>{_NAME})(?:\s+=\s*|=\s+)(?P<value>[\"']?\w+[:=].*)")
"""An assignment as no shell takes it."""
_NO_SHELL: Final = (".py", ".toml", ".ini", ".cfg")
"""Files in which spaces around the sign are right."""
_COMMENT: Final = re.compile(r"^\s*(?:#|//|REM\b).*|(?<=\s)#(?!.*[\"']).*")
"""A comment line, and the end of a line after a number sign that no quotation mark follows."""
_DEFAULT: Final = re.compile(r"\$\{(?P<name>\w+):?[-=](?P<value>[^}]*)\}")
_BLOCKS: Final = (
    (re.compile(r"^\s*(?:if|case)\b"), "open"),
    (re.compile(r"^\s*(?:elif|else)\b|;;\s*$"), "next"),
    (re.compile(r"^\s*(?:fi|esac)\b"), "close"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Assignment:
    conf: AllocConf
    line: int
    branches: tuple[tuple[int, int], ...]
    """Enclosing shell conditions with the number of the branch."""
    keeps: bool
    """Whether the value repeats what was there before, or is only a default."""

    def excludes(self, other: _Assignment) -> bool:
        """Whether the two stand in different branches of one condition."""
        mine = dict(self.branches)
        return any(mine.get(condition, branch) != branch for condition, branch in other.branches)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocConfFile:
    """What a file sets."""

    confs: tuple[AllocConf, ...]
    """Every assignment, in the order of the file."""
    notices: tuple[Notice, ...]
    """What is wrong with them, and with their order."""

    @property
    def in_force(self) -> dict[str, AllocConf]:
        """The last assignment of every variable."""
        return {conf.variable: conf for conf in self.confs}


def read_alloc_conf_file(path: str | Path) -> AllocConfFile:
    """The allocator settings that a script or an environment file sets.

    Raises:
        EvenloadError: the file cannot be read, or is no text.
    """
    return alloc_confs_in(read_text(path), place=str(path))


def alloc_confs_in(text: str, *, place: str) -> AllocConfFile:
    """The allocator settings that the text of a script sets; `place` is what notices call it."""
    assignments = _assignments(text, place)
    notices = [notice for assignment in assignments for notice in assignment.conf.notices]
    for later, assignment in enumerate(assignments):
        notices += _wipes(assignment, assignments[:later], place)
    notices += [*_rivals(assignments, place), *_spaced(text, place)]
    return AllocConfFile(confs=tuple(assignment.conf for assignment in assignments), notices=tuple(notices))


def _assignments(text: str, place: str) -> list[_Assignment]:
    found: list[_Assignment] = []
    stack: list[tuple[int, int]] = []
    conditions = 0
    for number, line in enumerate(_lines(text), start=1):
        for pattern, what in _BLOCKS:
            if pattern.search(line) and not re.search(r"\bfi\s*$|\besac\s*$", line.lstrip()[2:]):
                if what == "open":
                    conditions += 1
                    stack.append((conditions, 0))
                elif what == "close" and stack:
                    stack.pop()
                elif what == "next" and stack:
                    stack[-1] = (stack[-1][0], stack[-1][1] + 1)
                break
        matches = {match.start("name"): match for pattern in _ASSIGNMENTS for match in pattern.finditer(line)}
        for _, match in sorted(matches.items()):
            found.append(_assignment(match, line, f"{place}:{number}", number, tuple(stack)))
    return found


def _lines(text: str) -> list[str]:
    """Lines without comments; a continued line is joined to its first, the others stay empty."""
    lines: list[str] = []
    pending: list[int] = []
    for line in text.splitlines():
        bare = _COMMENT.sub("", line)
        if pending:
            lines[pending[0]] = lines[pending[0]] + bare.rstrip("\\")
            lines.append("")
        else:
            lines.append(bare.rstrip("\\"))
        pending = pending or [len(lines) - 1] if bare.endswith("\\") else []
    return lines


def _assignment(
    match: re.Match[str], line: str, where: str, number: int, branches: tuple[tuple[int, int], ...]
) -> _Assignment:
    name, value, column = match["name"], match["value"], match.start("value") + 1
    keeps = (
        bool(match.groupdict().get("adds"))
        or "setdefault" in line
        or re.search(r"\bgetenv|environ\.get", line) is not None
    )
    if value[:1] in "\"'" and value[-1:] == value[:1] and len(value) > 1:
        value, column = value[1:-1], column + 1
    default = _DEFAULT.fullmatch(value)
    if default and default["name"] == name:
        keeps, value, column = True, default["value"], column + default.start("value")
    own = re.compile(rf"\$\{{?{name}\b(?:[:+-][^}}]*)?\}}?|\{{[^}}]*{name}[^}}]*\}}")
    if own.search(value):
        keeps = True
        value = own.sub(lambda found: " " * len(found.group()), value)
    conf = read_alloc_conf(value, variable=name, where=where, column=column)
    return _Assignment(conf=conf, line=number, branches=branches, keeps=keeps)


def _wipes(later: _Assignment, earlier: list[_Assignment], place: str) -> list[Notice]:
    """The assignment that a later one of the same variable makes ineffective."""
    if later.keeps:
        return []
    wiped = [one for one in earlier if one.conf.variable == later.conf.variable and not one.excludes(later)]
    lost = {key: value for one in wiped for key, value in one.conf.settings.items() if key not in later.conf.settings}
    if not wiped or not lost:
        return []
    joined = ",".join(f"{key}:{value}" for key, value in {**lost, **later.conf.settings}.items())
    return [
        Notice(
            fact=f"this sets {later.conf.variable} anew and wipes {', '.join(lost)} of line {wiped[-1].line}: "
            "a variable holds one text, and the last one counts",
            where=f"{place}:{later.line}",
            fix=f'write them at once: {later.conf.variable}="{joined}"',
        )
    ]


def _rivals(assignments: list[_Assignment], place: str) -> list[Notice]:
    """Two names of the same settings: PyTorch reads one of them."""
    names = list(dict.fromkeys(one.conf.variable for one in assignments if VARIABLES[one.conf.variable] is CUDA))
    if len(names) < 2:
        return []
    last = max(one.line for one in assignments if one.conf.variable in names)
    return [
        Notice(
            fact=f"{' and '.join(names)} are both set, and PyTorch reads only one of them "
            f"(2.13: {next(name for name in VARIABLES if name in names)})",
            where=f"{place}:{last}",
            fix="set one of them to everything",
        )
    ]


def _spaced(text: str, place: str) -> list[Notice]:
    """Assignments with spaces around the sign, which set nothing."""
    if place.endswith(_NO_SHELL):
        return []
    found = ((number, _SPACED.match(line)) for number, line in enumerate(_lines(text), start=1))
    return [
        Notice(
            fact=f"spaces stand around `=`, and a shell sets no {match['name']} then",
            where=f"{place}:{number}",
            fix=f"write {match['name']}={match['value'].strip()}",
        )
        for number, match in found
        if match is not None
    ]
