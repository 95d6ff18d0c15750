"""Typed reading of a configuration mapping: every key is checked, named in the error, and remembered as read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Final, NoReturn, cast

from evenload.errors import EvenloadError, Notice, did_you_mean, shown

MOST: Final = 2**24
"""No published size (width, vocabulary, experts) comes near it; larger numbers are typing errors."""
MOST_LAYERS: Final = 4096

_ACTIVATIONS: Final = frozenset(
    {
        *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
        *("gelu_pytorch_tanh", "quick_gelu", "silu", "swish"),
        *("hardswish", "laplace", "leaky_relu", "linear", "mish", "relu", "relu2", "relu6", "sigmoid", "tanh"),
    }
)


class Keys:
    """A mapping read key by key.

    Three kinds of absence are told apart: a key that must be there (`fallback` not given: an error names it), a key
    whose absence has a meaning of its own (`absent`), and a key for which the reference implementation has a default
    (`fallback`: taken, and said in a notice).
    """

    def __init__(
        self,
        mapping: Mapping[str, object],
        *,
        where: str | Callable[[str], str],
        path: str = "$",
        spelling: Mapping[str, str] | None = None,
        origins: Mapping[str, str] | None = None,
    ):
        """Start reading.

        Args:
            mapping: the parsed configuration; never changed.
            where: what to call its file in errors, or what gives the place of a path such as `$.hidden_size`.
            path: path of the mapping inside the file.
            spelling: how the file spells a key, where that differs.
            origins: path of the mapping that a key comes from, where that is not `path`.
        """
        self.mapping = mapping
        self.path = path
        self.notices: list[Notice] = []
        self._where = where
        self.defaults: Mapping[str, int | None] = {}
        """Values of absent keys, which count before the fallbacks that a method is given."""
        self._spelling = spelling or {}
        self._origins = origins or {}
        self._read: set[str] = set()

    def place(self, key: str = "") -> str:
        """Where a key stands: `config.json: $.text_config.hidden_size`."""
        path = f"{self._origins.get(key, self.path)}.{self._spelled(key)}" if key else self.path
        return self._where(path) if callable(self._where) else f"{self._where}: {path}"

    def has(self, key: str) -> bool:
        """Whether the key is there and not null. Marks it as read."""
        self._read.add(key)
        return self.mapping.get(key) is not None

    def first(self, *keys: str) -> str:
        """The first of several spellings that is there, else the first spelling."""
        self._read.update(keys)
        return next((key for key in keys if key in self.mapping), keys[0])

    def size(self, key: str, *, fallback: int | None = None, least: int = 1, most: int = MOST) -> int:
        """A whole number from `least` to `most`.

        Args:
            key: its name.
            fallback: value if the key is absent; None: the key must be there.
            least: smallest value that makes sense.
            most: largest value that makes sense.

        Raises:
            EvenloadError: absent without a fallback, of another type, or out of range.
        """
        self._read.add(key)
        if key not in self.mapping:
            assumed = self.defaults.get(key, fallback)
            if assumed is None:
                self._missing(key)
            self._assumed(key, assumed)
            return assumed
        return self._whole(key, self.mapping[key], least=least, most=most)

    def optional(self, key: str, *, absent: int | None = None, least: int = 1, most: int = MOST) -> int | None:
        """A whole number, or None for null; `absent` if the key is not there, which is then no assumption."""
        self._read.add(key)
        value = self.mapping.get(key, self.defaults.get(key, absent))
        return None if value is None else self._whole(key, value, least=least, most=most)

    def assume(self, key: str, fallback: int | None) -> int | None:
        """A whole number, or None for null; the fallback (said in a notice) if the key is not there."""
        if key in self.mapping:
            return self.optional(key)
        self._read.add(key)
        assumed = self.defaults.get(key, fallback)
        self._assumed(key, assumed)
        return assumed

    def number(self, key: str, *, absent: float | None = None) -> float | None:
        """A positive finite number, or None for null."""
        self._read.add(key)
        value = self.mapping.get(key, absent)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            self.refuse(key, f"{key} is {shown(value)}", "give a number above 0, or null")
        return float(value)

    def flag(self, key: str, *, absent: bool = False) -> bool:
        """True or false; null counts as absent."""
        self._read.add(key)
        value = self.mapping.get(key)
        if value is None:
            return absent
        if not isinstance(value, bool):
            self.refuse(key, f"{key} is {shown(value)}", "write true or false")
        return value

    def activation(self, *keys: str, absent: str) -> str:
        """Name of an activation function under the first of several spellings."""
        key = self.first(*keys)
        value = self.mapping.get(key)
        if value is None:
            return absent
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            hint = did_you_mean(value, sorted(_ACTIVATIONS)) if isinstance(value, str) else None
            self.refuse(key, f"{key} is {shown(value)}, which is no known activation", hint or "for example 'silu'")
        return {"swish": "silu"}.get(value, value)

    def indices(self, key: str, count: int) -> frozenset[int] | None:
        """A list of layer numbers below `count`, None if absent. Numbers beyond the last layer are said and dropped."""
        self._read.add(key)
        value = self.mapping.get(key)
        if value is None:
            return None
        items = as_list(value)
        if items is None:
            self.refuse(key, f"{key} is {shown(value)}", "write a list of layer numbers")
        numbers = [
            self._whole(f"{key}[{i}]", item, least=0, most=MOST, fix="write a layer number, counted from 0")
            for i, item in enumerate(items)
        ]
        beyond = sorted(number for number in numbers if number >= count)
        if beyond:
            fact = f"{key} names layer {beyond[0]}, but the last layer is {count - 1}"
            self.note(fact, key, "remove the number; it changes nothing")
        return frozenset(numbers) - frozenset(beyond)

    def choices(self, key: str, count: int, known: Collection[str]) -> list[str] | None:
        """A list with one of several words per layer, None if absent."""
        self._read.add(key)
        value = self.mapping.get(key)
        if value is None:
            return None
        items = as_list(value)
        if items is None or len(items) != count:
            what = f"is {shown(value)}" if items is None else f"has {len(items)} entries"
            self.refuse(key, f"{key} {what}, but there are {count} layers", "write one word per layer")
        words: list[str] = []
        for i, word in enumerate(items):
            if not isinstance(word, str) or word not in known:
                self.refuse(f"{key}[{i}]", f"{shown(word)} is not supported", f"supported: {', '.join(sorted(known))}")
            words.append(word)
        return words

    def switches(self, key: str, count: int) -> list[bool] | None:
        """A list with 0 or 1 per layer, None if absent or empty."""
        self._read.add(key)
        value = self.mapping.get(key)
        items = as_list(value)
        if value is None or items == []:
            return None
        if items is None or len(items) != count or any(isinstance(item, float) or item not in (0, 1) for item in items):
            self.refuse(key, f"{key} is no list of 0 and 1 per layer", f"write {count} numbers")
        return [bool(item) for item in items]

    def word(self, key: str) -> str | None:
        """A non-empty string, None if absent or null."""
        self._read.add(key)
        value = self.mapping.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            self.refuse(key, f"{key} is {shown(value)}", "write a name in quotes")
        return value

    def inner(self, key: str) -> Keys:
        """The mapping below a key, for example `text_config`."""
        self._read.add(key)
        value = self.mapping.get(key)
        inner = as_mapping(value)
        if inner is None:
            self.refuse(key, f"{key} is {shown(value)}", "write an object with the sizes of the language model")
        return Keys(inner, where=self._where, path=f"{self.path}.{key}")

    def completed(self, values: Mapping[str, object]) -> Keys:
        """The same reader over the mapping with further values."""
        keys = Keys(
            {**self.mapping, **values},
            where=self._where,
            path=self.path,
            spelling=self._spelling,
            origins=self._origins,
        )
        keys.defaults = self.defaults
        keys.notices = self.notices
        keys._read = self._read  # one reader to its user: what was read stays read
        return keys

    def absent(self) -> list[str]:
        """Keys that were asked for and are not there."""
        return sorted(self._read - set(self.mapping))

    def unread(self) -> tuple[str, ...]:
        """Keys that nobody asked for."""
        return tuple(self._spelled(key) for key in self.mapping if key not in self._read)

    def note(self, fact: str, key: str = "", fix: str | None = None) -> None:
        """Record a notice about a key."""
        self.notices.append(Notice(fact=self._spelled(fact), where=self.place(key), fix=fix and self._spelled(fix)))

    def refuse(self, key: str, fact: str, fix: str | None) -> NoReturn:
        """Raise about a key."""
        raise EvenloadError(self._spelled(fact), where=self.place(key), fix=fix and self._spelled(fix))

    def _spelled(self, text: str) -> str:
        """The text with every key as the file spells it."""
        return re.sub(r"\w+", lambda word: self._spelling.get(word[0], word[0]), text) if self._spelling else text

    def _whole(self, key: str, value: object, *, least: int, most: int, fix: str | None = None) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(key, f"{key} is {shown(value)}", fix or f"write a whole number of at least {least}")
        if value < least:
            self.refuse(key, f"{key} is {shown(value)}", fix or f"write a whole number of at least {least}")
        if value > most:
            self.refuse(key, f"{key} is {shown(value)}, more than any model has", f"check it; at most {most} is read")
        return value

    def _missing(self, key: str) -> NoReturn:
        others = [other for other in self.mapping if other not in self._read]
        hint = did_you_mean(key, others)
        self.refuse(key, f"{key} is missing", f"add {key!r}" + (f"; {hint}" if hint else ""))

    def _assumed(self, key: str, value: int | None) -> None:
        shown = "null" if value is None else value
        self.note(f"{key} is missing; {shown} is assumed, the default of transformers", key, f"write {key!r}")


def as_list(value: object) -> list[object] | None:
    """A parsed value as a list, None if it is none."""
    return cast("list[object]", value) if isinstance(value, list) else None


def as_mapping(value: object) -> Mapping[str, object] | None:
    """A parsed value as an object with names, None if it is none."""
    if not isinstance(value, Mapping):
        return None
    mapping = cast("Mapping[object, object]", value)
    return {str(key): item for key, item in mapping.items()}
