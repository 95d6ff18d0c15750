"""The one error of the house: a fact, where it is, and how to fix it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

WRONG_INPUT: Final = 2
"""Exit code: the input is wrong."""

ANSWER_NO: Final = 1
"""Exit code: the question was understood and the answer is "no" (does not fit, nothing found)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A warning: accepted, but the user should know."""

    fact: str
    """What is so, in one sentence."""
    where: str | None = None
    """`file:line:column` of a file, or `$.path` inside a value."""
    fix: str | None = None
    """What to change, where there is something to change."""

    def __str__(self) -> str:
        return _message(self.fact, self.where, self.fix)


class EvenloadError(ValueError):
    """Raised for every mistake of the caller, and for the answer "no".

    Attributes:
        fact: what is wrong, in one sentence.
        where: `file:line:column` of a file, or `$.path` inside a value, or None.
        fix: how to mend it, or None.
        exit_code: what the command line exits with: 2 for wrong input, 1 for the answer "no".
    """

    def __init__(self, fact: str, *, where: str | None = None, fix: str | None = None, exit_code: int = WRONG_INPUT):
        super().__init__(_message(fact, where, fix))
        self.fact = fact
        self.where = where
        self.fix = fix
        self.exit_code = exit_code

    def at(self, where: str) -> EvenloadError:
        """The same error with a place: inner code knows the fact, the edge knows the file and line."""
        return EvenloadError(self.fact, where=where, fix=self.fix, exit_code=self.exit_code)


def behind(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that led to it, the outermost first, each once: others' code links them into rings, too."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def relocate(notice: Notice, where: str) -> Notice:
    """The same notice with another place."""
    return replace(notice, where=where)


def shown(value: object) -> str:
    """A wrong value as it stands in a settings file, cut to a readable length.

    Examples:
        >>> shown(None), shown(True), shown("4096"), shown(10**5000), shown([10**5000])
        ('null', 'true', "'4096'", 'a number of more than 18 digits', 'a list that is too large to print')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10**18:  # Python refuses to print very long ones
        return "a number of more than 18 digits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # such a number, or very deep nesting, inside a list
        return f"a {type(value).__name__} that is too large to print"
    return text if len(text) <= 40 else f"{text[:37]}..."


def did_you_mean(word: str, known: list[str]) -> str | None:
    """A suggestion for a misspelt name: `did you mean 'offset'?`, or None when nothing is near."""
    from difflib import get_close_matches  # noqa: PLC0415  # only on the error path

    near = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else None


def _message(fact: str, where: str | None, fix: str | None) -> str:
    head = f"{where}: {fact}" if where else fact
    return f"{head}\n  fix: {fix}" if fix else head
