"""Allocator settings as scripts set them: every assignment of a shell, environment, Docker or Python file, in order.

A variable holds one text. A later assignment therefore wipes an earlier one, unless it repeats what was there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from evenload.errors import Notice
from evenload.files import read_text
from evenload.ledger.settings import CUDA, VARIABLES, AllocConf, read_alloc_conf

_NAME: Final = "|".join(sorted(VARIABLES, key=len, reverse=True))
_ASSIGNMENTS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        # Shell, .env, Docker: [export|ENV|...] NAME=value, also before a command; a word may stand before it.
        (
            rf"(?:^|[\s;&|({{`'\"-])(?P<name>{_NAME})(?P<adds>\+?)=(?P<value>\"(?:[^\"\\]|\\.)*\"|'[^']*'"
            r"|(?:\$\{[^}]*\}|[^\s;&|)}])*)"
        ),
        # Python: os.environ["NAME"] = "value", environ.setdefault(...), putenv(...), {"NAME": "value"}; also YAML.
        rf"[\"'](?P<name>{_NAME})[\"']\s*(?:\]\s*=|,|:)\s*f?(?P<value>\"[^\"]*\"|'[^']*')",
        rf"^\s*(?:-\s*)?(?P<name>{_NAME})\s*:\s+(?P<value>\"[^\"]*\"|'[^']*'|[^\s#]+)",
        rf"^\s*(?:setenv|ENV)\s+(?P<name>{_NAME})\s+(?P<value>\"[^\"]*\"|'[^']*'|\S+)",
        # fish, PowerShell
        rf"^\s*set\s+(?:-\S+\s+)+(?P<name>{_NAME})\s+(?P<value>\"[^\"]*\"|'[^']*'|[^\s;]+)",
        rf"\$[Ee]nv:(?P<name>{_NAME})\s*=\s*(?P<value>\"[^\"]*\"|'[^']*')",
    )
)
_UNSET: Final = re.compile(
    rf"(?:^|[\s;&|(])(?:unset\s+(?:-v\s+)?|set\s+(?:-\S+\s+)*-\w*e\w*\s+|unsetenv\s+)(?P<name>{_NAME})\b"
    rf"|environ\.pop\(\s*[\"'](?P<popped>{_NAME})[\"']|\bdel\s+os\.environ\[[\"'](?P<deleted>{_NAME})[\"']\]"
)
"""A line from which on a variable is not set."""
_NAMED: Final = re.compile(rf"^\s*(?:-\s*)?name\s*:\s*[\"']?(?P<name>{_NAME})[\"']?\s*$")
_VALUE: Final = re.compile(r"^\s*value\s*:\s*(?P<value>\"[^\"]*\"|'[^']*'|\S+)")
"""Name and value on two lines, as Kubernetes has them."""
_LASTING: Final = re.compile(r"^\s*(?:export|declare|typeset|readonly|local|set|ENV)\b")
"""Words that make an assignment hold from there on, whatever else stands in the line."""
_COMMAND: Final = re.compile(r"\s+(?:\w+=\S*\s+)*(?!\w+=)[\w./~$\"'-]")
"""A command behind an assignment, which is the only one that sees it."""
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


_Effect = Literal["sets", "adds", "default", "removes"]
"""What becomes of the text before: replaced, repeated with more behind it, kept where there is one, or gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Assignment:
    conf: AllocConf
    line: int
    branches: tuple[tuple[int, int], ...]
    """Enclosing shell conditions with the number of the branch."""
    effect: _Effect
    scoped: bool
    """Whether it is for one command only."""

    def excludes(self, other: _Assignment) -> bool:
        """Whether the two stand in different branches of one condition."""
        mine = dict(self.branches)
        return any(mine.get(condition, branch) != branch for condition, branch in other.branches)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocConfFile:
    """What a file sets."""

    confs: tuple[AllocConf, ...]
    """Every assignment, in the order of the file."""
    in_force: Mapping[str, AllocConf]
    """What every variable has in the end: the last assignment, with what it repeats of those before."""
    notices: tuple[Notice, ...]
    """What is wrong with them, and with their order."""


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
    return AllocConfFile(
        confs=tuple(one.conf for one in assignments if one.effect != "removes"),
        in_force=_in_force(assignments),
        notices=tuple(notices),
    )


def _in_force(assignments: list[_Assignment]) -> dict[str, AllocConf]:
    found: dict[str, AllocConf] = {}
    for one in assignments:
        name, before = one.conf.variable, found.get(one.conf.variable)
        if one.effect == "removes":
            found.pop(name, None)
        elif one.effect == "default":
            found.setdefault(name, one.conf)
        elif one.effect == "adds" and before is not None:
            settings = {**before.settings, **one.conf.settings}
            found[name] = replace(
                one.conf,
                text=",".join(f"{key}:{value}" for key, value in settings.items()),
                settings=settings,
                accepted=before.accepted and one.conf.accepted,
            )
        else:
            found[name] = one.conf
    return found


def _assignments(text: str, place: str) -> list[_Assignment]:
    found: list[_Assignment] = []
    stack: list[tuple[int, int]] = []
    conditions = 0
    named: str | None = None
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
        matches = {match.start("value"): match for pattern in _ASSIGNMENTS for match in pattern.finditer(line)}
        if named is not None and (match := _VALUE.match(line)):
            matches[match.start("value")] = match
        for _, match in sorted(matches.items()):
            name = match.groupdict().get("name") or named or ""
            found.append(_assignment(match, name, f"{place}:{number}", number, tuple(stack)))
        if not stack:  # in a condition it may not happen
            found += [_removal(match, number) for match in _UNSET.finditer(line)]
        if line.strip():
            named = match["name"] if (match := _NAMED.match(line)) else None
    return found


def _removal(match: re.Match[str], number: int) -> _Assignment:
    name = match["name"] or match["popped"] or match["deleted"]
    conf = read_alloc_conf("", variable=name)
    return _Assignment(conf=conf, line=number, branches=(), effect="removes", scoped=False)


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
    match: re.Match[str], name: str, where: str, number: int, branches: tuple[tuple[int, int], ...]
) -> _Assignment:
    line, value, column = match.string, match["value"], match.start("value") + 1
    effect: _Effect = "adds" if match.groupdict().get("adds") else "sets"
    if "setdefault" in line or re.search(r"\bgetenv|environ\.get", line):
        effect = "default"
    if value[:1] in "\"'" and value[-1:] == value[:1] and len(value) > 1:
        value, column = value[1:-1], column + 1
    default = _DEFAULT.fullmatch(value)
    if default and default["name"] == name:
        effect, value, column = "default", default["value"], column + default.start("value")
    own = re.compile(rf"\$\{{?{name}\b(?:[:+-][^}}]*)?\}}?|\{{[^}}]*{name}[^}}]*\}}")
    if own.search(value):
        effect = "adds"
        value = own.sub(lambda found: " " * len(found.group()), value)
    conf = read_alloc_conf(value, variable=name, where=where, column=column)
    scoped = "adds" in match.groupdict() and _scoped(line[: match.start("name")], line[match.end() :])
    return _Assignment(conf=conf, line=number, branches=branches, effect=effect, scoped=scoped)


def _scoped(before: str, behind: str) -> bool:
    """Whether a shell assignment is for the one command in whose words it stands."""
    words = re.split(r"[;&|({`]", before)[-1]
    if _LASTING.match(words):
        return False
    others = [word for word in words.split() if not re.match(r"\w+=", word)]
    return bool(others) or _COMMAND.match(re.split(r"[;&|)}`]", behind)[0]) is not None


def _wipes(later: _Assignment, earlier: list[_Assignment], place: str) -> list[Notice]:
    """The assignment that a later one of the same variable makes ineffective."""
    if later.effect != "sets":
        return []
    same = [one for one in earlier if one.conf.variable == later.conf.variable]
    gone = max((number for number, one in enumerate(same) if one.effect == "removes"), default=-1)
    wiped = [one for one in same[gone + 1 :] if not one.scoped and not one.excludes(later)]
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
