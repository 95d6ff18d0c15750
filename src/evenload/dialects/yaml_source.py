"""A YAML (or JSON) file as plain values, with the place of every one of them.

Values are resolved as YAML 1.1 does (`on` and `yes` are true), because that is what MindFormers' own loader does.
`yaml_edit` changes single values in the text; everything else of the user's file stays as it was, to the byte.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from evenload.dialects.yaml_node import Node, Step, compose
from evenload.errors import EvenloadError
from evenload.files import read_text

_BOOLS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[(['\"])(.*?)\3\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class YamlSource:
    """A parsed file: plain values and places. Neither is ever changed."""

    name: str
    """The file as the user named it."""
    text: str
    root: Node
    """What is written where."""
    data: dict[str, Any]
    """The same as dict, list, str, int, float, bool and None. Keys are always text."""

    def where(self, *path: Step, key: bool = False) -> str:
        """`file:line:column` of the value at a path, or of its key; as far down as the path exists."""
        node = place = self.root
        for step in path:
            entry = node.child(step)
            if entry is None:
                break
            key_node, node = entry
            place = key_node if key and key_node is not None else node
        return f"{self.name}:{place.place}"

    def where_of(self, path: str) -> str:
        """`file:line:column` of a `$.path`, as inner rooms and msgspec write them."""
        return self.where(*steps(path))

    def error(self, fact: str, *path: Step, fix: str | None = None, key: bool = False) -> EvenloadError:
        """An error about the value at a path."""
        return EvenloadError(fact, where=self.where(*path, key=key), fix=fix)


def read_yaml(path: str | Path) -> YamlSource:
    """Read a YAML file whose top level is a mapping.

    Raises:
        EvenloadError: unreadable, malformed, or no mapping; with line and column.
    """
    return parse_yaml(read_text(path), name=str(path))


def parse_yaml(text: str, *, name: str = "YAML") -> YamlSource:
    """Parse a YAML text whose top level is a mapping; `name` is what errors call it.

    Raises:
        EvenloadError: malformed, duplicate keys, unknown tags, cyclic or too deep, or no mapping at the top.
    """
    root = compose(text, name=name)
    if root.kind != "mapping":
        what = "a list" if root.kind == "list" else "a single value"
        raise EvenloadError(
            f"the top level is {what}, not a mapping of keys to values",
            where=f"{name}:{root.place}",
            fix="write `key: value` lines",
        )
    return YamlSource(name=name, text=text, root=root, data=cast("dict[str, Any]", _Plain(name).value(root)))


def steps(path: str) -> tuple[Step, ...]:
    """The steps of a `$.path`.

    Examples:
        >>> steps("$.recompute_config.recompute[1][0]")
        ('recompute_config', 'recompute', 1, 0)
    """
    return tuple(
        int(match[2]) if match[2] is not None else str(match[1] or match[4])
        for match in _STEP.finditer(path.removeprefix("$"))
    )


class _Plain:
    """Builds plain values from nodes; one object a document, so that aliases share what they name."""

    def __init__(self, name: str):
        self._name = name
        self._made: dict[int, Any] = {}

    def value(self, node: Node) -> Any:
        if id(node) not in self._made:
            if node.kind == "mapping":
                made: Any = self._mapping(node)
            elif node.kind == "list":
                made = [self.value(item) for item in node.values]
            else:
                made = self._scalar(node)
            self._made[id(node)] = made
        return self._made[id(node)]

    def _mapping(self, node: Node) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key.kind != "scalar":
                raise self._error("a key must be a plain word, not a list or a mapping", key)
            if key.tag == "merge":
                for part in self._merge(value):
                    merged = part | merged
                continue
            if key.text in own:
                raise self._error(
                    f"the key {key.text!r} is given twice, first on line {lines[key.text]}", key, fix="keep one of them"
                )
            lines[key.text] = key.line + 1
            own[key.text] = self.value(value)
        return own | {key: value for key, value in merged.items() if key not in own}

    def _merge(self, node: Node) -> list[dict[str, Any]]:
        value = self.value(node)
        parts: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
        if not all(isinstance(part, dict) for part in parts):
            raise self._error("`<<` merges mappings only", node)
        return parts

    def _scalar(self, node: Node) -> str | int | float | bool | None:
        match node.tag:
            case "null":
                return None
            case "bool":
                return _BOOLS.get(node.text.lower(), node.text)  # `y` and `n` stay words, as MindFormers' loader has it
            case "int" | "float":
                number = _number(node.text, node.tag)
                if number is None:
                    raise self._error(f"{node.text[:40]!r} is not a number that can be read", node)
                return number
            case "str" | "timestamp" | "merge" | "value":
                return node.text
            case _:
                raise self._error(f"the tag {node.tag!r} is not understood", node, fix="remove the tag")

    def _error(self, fact: str, node: Node, *, fix: str | None = None) -> EvenloadError:
        return EvenloadError(fact, where=f"{self._name}:{node.place}", fix=fix)


def _number(text: str, tag: str) -> int | float | None:
    """A YAML 1.1 number (underscores, octal with a leading 0, 0x, 0b, base 60), None when it cannot be read."""
    plain = text.replace("_", "").lower()
    sign = -1 if plain.startswith("-") else 1
    digits = plain.lstrip("+-")
    try:
        if ":" in digits:
            value: float = 0
            for part in digits.split(":"):
                value = value * 60 + (int(part) if tag == "int" else float(part))
            return sign * value
        if tag == "float":
            return sign * float(digits.lstrip(".") if digits in {".inf", ".nan"} else digits)
        if digits.startswith(("0x", "0b")):
            return sign * int(digits, 0)
        return sign * int(digits, 8 if digits.startswith("0") and digits != "0" else 10)
    except ValueError:  # also more digits than Python converts
        return None
