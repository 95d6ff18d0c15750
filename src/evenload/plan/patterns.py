r"""The pattern grammar: which operators of a layer a recompute setting names.

The grammar is MindFormers': a pattern is split on the two characters `\.`; every part is a regular expression that must
match one whole level of a name; the parts before the last match modules, the last an operator or a module, and a module
stands for everything inside it. There is no other place in evenload that reads patterns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Final

from evenload.errors import EvenloadError, Notice
from evenload.plan.aliases import Name, Names, names
from evenload.plan.operators import Graph, Operator
from evenload.plan.regexes import compile_segment

LONGEST_PATTERN: Final = 512
"""Characters; a longer one is a mistake."""
_SEPARATOR: Final = r"\."
_BARE_DOT: Final = re.compile(r"(?<!\\)\.(?![*+?{])")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """A pattern that has been read. Make it with `compile_pattern`."""

    text: str
    levels: tuple[re.Pattern[str], ...]
    """One expression for every level of a name."""

    def matches(self, name: Name) -> bool:
        """Whether every level of a name matches."""
        return len(name) == len(self.levels) and all(
            level.fullmatch(part) for level, part in zip(self.levels, name, strict=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """What a pattern hits in one layer."""

    pattern: str
    indices: tuple[int, ...]
    """Positions in `Graph.operators`, ascending."""
    operators: tuple[Operator, ...]
    """The operators at those positions."""
    whole_module: bool
    """The pattern names a module, so that everything inside it was hit."""

    def __bool__(self) -> bool:
        return bool(self.indices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """How many layers a pattern hits."""

    pattern: str
    matched: int
    """Layers in which it hits an operator."""
    layers: int
    """Layers it was tried on."""
    fix: str | None = None
    """Where it hits none: how to write it so that it does."""

    def notice(self, where: str | None = None) -> Notice | None:
        """The warning for a pattern that hits nothing, else None."""
        if self.matched or not self.layers:
            return None
        return Notice(
            fact=f"pattern {self.pattern!r} matches nothing: matched 0 of {self.layers} layers",
            where=where,
            fix=self.fix,
        )


def compile_pattern(text: str) -> Pattern:
    r"""Read a pattern.

    Raises:
        EvenloadError: it is no text, a level is no regular expression (a `\.` inside brackets also cuts a level in
            two), or an expression could take for ever (see `evenload.plan.regexes`).

    Examples:
        >>> pattern = compile_pattern(r"feed_forward\.w[13]\.matmul")
        >>> pattern.matches(("feed_forward", "w3", "matmul")), pattern.matches(("feed_forward", "w3"))
        (True, False)
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # settings files hold anything
        raise EvenloadError(f"the pattern {text!r} is no text", fix=r"write it as text, such as 'feed_forward\.mul'")
    if len(text) > LONGEST_PATTERN:
        raise EvenloadError(f"a pattern has {len(text)} characters", fix=f"use at most {LONGEST_PATTERN}")
    return _compile(text)


@lru_cache(maxsize=1024)
def _compile(text: str) -> Pattern:
    levels: list[re.Pattern[str]] = []
    start = 0
    for part in text.split(_SEPARATOR):
        try:
            levels.append(compile_segment(part))
        except re.error as error:
            position = start + (error.pos or 0)
            raise EvenloadError(
                f"pattern {text!r} is no regular expression at character {position + 1}: {error.msg}",
                fix=_fix_for_broken(text),
            ) from error
        except EvenloadError as error:
            raise EvenloadError(f"pattern {text!r}: {error.fact}", fix=error.fix) from error
        start += len(part) + len(_SEPARATOR)
    return Pattern(text=text, levels=tuple(levels))


def match(pattern: str | Pattern, graph: Graph) -> Match:
    """The operators of a layer that a pattern names, under any of their names.

    Raises:
        EvenloadError: the pattern cannot be read.
    """
    return match_all((pattern,), graph)[0]


def match_all(patterns: Iterable[str | Pattern], graph: Graph) -> tuple[Match, ...]:
    """`match` for several patterns, in their order."""
    table = names(graph)
    return tuple(_match(_compiled(pattern), graph, table) for pattern in patterns)


def coverage(pattern: str | Pattern, graphs: Sequence[Graph]) -> Coverage:
    """How many of these layers a pattern hits, and what was meant if it hits none.

    Args:
        pattern: the pattern.
        graphs: one graph a layer; layers of a kind may share one.

    Raises:
        EvenloadError: the pattern cannot be read.
    """
    compiled = _compiled(pattern)
    distinct = {id(graph): graph for graph in graphs}
    hits = {key: bool(match(compiled, graph)) for key, graph in distinct.items()}
    matched = sum(hits[id(graph)] for graph in graphs)
    fix = None if matched else _suggestion(compiled.text, tuple(distinct.values()))
    return Coverage(pattern=compiled.text, matched=matched, layers=len(graphs), fix=fix)


def as_pattern(name: Iterable[str]) -> str:
    r"""The pattern that matches exactly one name: `("mlp", "mul")` gives `mlp\.mul`."""
    return _SEPARATOR.join(map(re.escape, name))


def own_pattern(operator: Operator) -> str:
    r"""The pattern of an operator's own name: `mlp\.act_fn\.silu`. It also hits others of that name in the module."""
    return as_pattern((*operator.path.split("."), operator.name) if operator.path else (operator.name,))


def _compiled(pattern: str | Pattern) -> Pattern:
    return pattern if isinstance(pattern, Pattern) else compile_pattern(pattern)


def _match(pattern: Pattern, graph: Graph, table: Sequence[Names]) -> Match:
    inside = [any(map(pattern.matches, of.modules)) for of in table]
    indices = tuple(i for i, of in enumerate(table) if inside[i] or any(map(pattern.matches, of.operator)))
    return Match(
        pattern=pattern.text,
        indices=indices,
        operators=tuple(graph.operators[i] for i in indices),
        whole_module=any(inside),
    )


def _suggestion(text: str, graphs: Sequence[Graph]) -> str | None:
    """What the user of a pattern that matches nothing may have meant."""
    escaped = _BARE_DOT.sub(_SEPARATOR.replace("\\", r"\\"), text)
    if escaped != text and _hits(escaped, graphs):
        return rf"write {escaped}: levels are separated by \. with the backslash"
    known = {as_pattern(name) for graph in graphs for of in names(graph) for name in of.operator | of.modules}
    near = get_close_matches(text, sorted(known), n=3, cutoff=0.6)
    if near:
        return f"the nearest names are {', '.join(near)}"
    return "`evenload names MODEL` lists the operators of a layer and their patterns"


def _hits(text: str, graphs: Sequence[Graph]) -> bool:
    try:
        return any(match(text, graph) for graph in graphs)
    except EvenloadError:
        return False


def _fix_for_broken(text: str) -> str:
    if r"\\." in text:
        return "write {} with one backslash".format(text.replace(r"\\.", _SEPARATOR))
    depth = text.find("[")
    if depth >= 0 and _SEPARATOR in text[depth:]:
        return r"inside [...] write a plain dot: \. separates the levels of a name wherever it stands"
    return r"escape special characters, and separate the levels of a name by \."
