"""Looking keys up in settings whose sections may be missing, and collecting what the reader of the file should know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from evenload.dialects.typed import at, shown
from evenload.dialects.yaml_node import Step
from evenload.dialects.yaml_source import YamlSource
from evenload.errors import Notice

Sections = tuple[tuple[str, ...], ...]
"""Paths of the sections where a key may stand, the likeliest first; `()` is the top of the file."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A settings file, and the warnings about it so far."""

    source: YamlSource
    notices: list[Notice] = field(default_factory=list[Notice])
    assumed: list[str] = field(default_factory=list[str])
    """`name value` of every default that was taken."""

    def path(self, sections: Sections, *names: str) -> tuple[str, ...] | None:
        """Where the first of the names stands with a value, None when nowhere."""
        for section in sections:
            for name in names:
                if at(self.source, (*section, name)) is not None:
                    return (*section, name)
        return None

    def value(self, sections: Sections, *names: str) -> Any:
        """Value of the first name that stands somewhere, else None."""
        path = self.path(sections, *names)
        return None if path is None else at(self.source, path)

    def number(self, sections: Sections, *names: str, absent: int, quiet: bool = False) -> int:
        """A whole number of at least 1; a default that is taken is noted unless `quiet`.

        Raises:
            EvenloadError: something else stands there.
        """
        path = self.path(sections, *names)
        if path is None:
            if not quiet:
                self.assumed.append(f"{names[0]} {absent}")
            return absent
        value = at(self.source, path)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.source.error(f"{path[-1]} is {shown(value)}", *path, fix="give a whole number of at least 1")
        return value

    def switch(self, sections: Sections, name: str) -> bool | None:
        """True or false, None when the switch is not there.

        Raises:
            EvenloadError: something else stands there.
        """
        path = self.path(sections, name)
        value = None if path is None else at(self.source, path)
        if path is not None and not isinstance(value, bool):
            raise self.source.error(f"{name} is {shown(value)}", *path, fix="write True or False")
        return value

    def word(self, sections: Sections, *names: str) -> str | None:
        """A text, None when it is not there.

        Raises:
            EvenloadError: something else stands there.
        """
        path = self.path(sections, *names)
        value = None if path is None else at(self.source, path)
        if path is not None and not isinstance(value, str):
            raise self.source.error(f"{path[-1]} is {shown(value)}, not a word", *path)
        return value

    def note(self, fact: str, *path: Step, fix: str | None = None) -> None:
        """A warning about the value at a path."""
        self.notices.append(Notice(fact=fact, where=self.source.where(*path), fix=fix))

    def all_notices(self) -> list[Notice]:
        """The warnings, what was assumed first."""
        if not self.assumed:
            return self.notices
        fact = f"not in the file, taken as: {', '.join(self.assumed)}"
        return [Notice(fact=fact, where=self.source.name), *self.notices]
