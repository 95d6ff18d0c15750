r"""One level of a pattern as a regular expression that cannot run away.

Python's `re` backtracks and has no time limit, so an expression such as `(a+)+b` would hang on an ordinary name. Every
expression is therefore bounded before it is used: the number of ways in which it can divide a name of `LONGEST_NAME`
characters must stay below `MOST_WAYS`. `k` unlimited repeats in a row share out n characters in C(n + k, k) ways; an
alternation adds the ways of its branches, a sequence multiplies those of its parts; a repeat of something that itself
leaves a choice grows exponentially and is refused.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from math import comb
from typing import Final

from evenload.errors import EvenloadError

LONGEST_NAME: Final = 64
"""Characters of the longest segment of a name that the bound reckons with."""
MOST_WAYS: Final = 100_000
"""Ways to divide a name that an expression may have: at most three `.*` in a row."""

_QUANTIFIER: Final = re.compile(r"(\*|\+|\?|\{(\d*)(,?)(\d*)\})[?+]?")
_GROUP_OPENING: Final = re.compile(r"\((\?(P<\w+>|[aiLmsux-]*:|>|=|!|<=|<!)?)?")
_FLAGS: Final = re.compile(r"\(\?[aiLmsux-]+\)|\(\?P=\w+\)|\(\?#[^)]*\)")
_CLASS: Final = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]")


def compile_segment(text: str) -> re.Pattern[str]:
    """Compile one level of a pattern, or say why it cannot be used.

    Raises:
        EvenloadError: the expression can take too long.
        re.error: it is no regular expression.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a library does not print; doubtful brackets still match as they do today
            compiled = re.compile(text)
    except (OverflowError, RecursionError) as error:
        raise EvenloadError(f"the expression {text!r} is too large", fix="write a simpler expression") from error
    ways = _Scanner(text).run()
    if ways.bound > MOST_WAYS:
        raise EvenloadError(
            f"the expression {text!r} can match a name in more than {MOST_WAYS} ways, which can take for ever",
            fix="use at most three `.*` in one level, and fewer choices",
        )
    return compiled


@dataclass(frozen=True, slots=True)
class _Ways:
    """How many ways a piece of an expression can match: `choices` fixed ones, times those of its repeats."""

    repeats: int = 0
    """Unlimited repeats in a row."""
    choices: int = 1

    @property
    def bound(self) -> int:
        return self.choices * comb(LONGEST_NAME + self.repeats, self.repeats)

    @property
    def single(self) -> bool:
        return self.bound == 1

    def then(self, other: _Ways) -> _Ways:
        return _Ways(self.repeats + other.repeats, self.choices * other.choices)

    def either(self, other: _Ways) -> _Ways:
        return _Ways(max(self.repeats, other.repeats), self.choices + other.choices)


class _Scanner:
    """Walks an expression that `re` has accepted, so it need not check syntax again."""

    def __init__(self, text: str):
        self.text = text
        self.at = 0

    def run(self) -> _Ways:
        ways = self._alternation()
        while self.at < len(self.text):  # a stray `)` cannot be, but a scanner must end
            self.at += 1
            ways = ways.then(self._alternation())
        return ways

    def _alternation(self) -> _Ways:
        ways = self._sequence()
        while self.at < len(self.text) and self.text[self.at] == "|":
            self.at += 1
            ways = ways.either(self._sequence())
        return ways

    def _sequence(self) -> _Ways:
        ways = _Ways()
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            start = self.at
            ways = ways.then(self._repeated(self._atom(), start))
        return ways

    def _atom(self) -> _Ways:
        if found := _FLAGS.match(self.text, self.at) or _CLASS.match(self.text, self.at):
            self.at = found.end()
            return _Ways()
        if self.text[self.at] == "(" and (opening := _GROUP_OPENING.match(self.text, self.at)):
            self.at = opening.end()
            inner = self._alternation()
            self.at += 1  # the closing bracket
            return inner
        self.at += 2 if self.text[self.at] == "\\" else 1
        return _Ways()

    def _repeated(self, inner: _Ways, start: int) -> _Ways:
        found = _QUANTIFIER.match(self.text, self.at)
        if found is None or found.group(1) in {"{}", "{,}"}:
            return inner
        self.at = found.end()
        least, most = _limits(found)
        if most == 1:
            return inner if least == 1 else inner.either(_Ways())
        if not inner.single:
            raise EvenloadError(
                f"{self.text[start : self.at]!r} repeats something that can match in several ways, "
                "which can take for ever",
                fix="drop the outer repeat, or use a character class such as [a-z_]+",
            )
        if most is None or most - least >= LONGEST_NAME:
            return _Ways(repeats=1)
        return _Ways(choices=most - least + 1)


def _limits(quantifier: re.Match[str]) -> tuple[int, int | None]:
    """Least and most repeats of a quantifier; None: no limit."""
    sign, low, comma, high = quantifier.groups()
    if sign in "*+?":
        return (1 if sign == "+" else 0), (1 if sign == "?" else None)
    least = int(low or 0)
    if not comma:
        return least, least
    return least, int(high) if high else None
