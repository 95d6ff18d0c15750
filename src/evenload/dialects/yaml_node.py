"""The syntax tree of a YAML text: what is written where. The one module that talks to the YAML parser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from evenload.errors import EvenloadError

Step = str | int
"""A key of a mapping or an index of a list: paths are sequences of steps."""


Kind = Literal["mapping", "list", "scalar"]
_KINDS: Final[dict[type, Kind]] = {MappingNode: "mapping", SequenceNode: "list"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One value as it is written. An alias is the very node of its anchor."""

    kind: Kind
    tag: str
    """`int`, `bool`, `str`, `null`, `merge` ..., the standard prefix removed."""
    text: str
    """A scalar's value before it is resolved, quotes removed."""
    keys: tuple[Node, ...]
    """Keys of a mapping, in order."""
    values: tuple[Node, ...]
    """Values of a mapping or items of a list, in order."""
    flow: bool
    """Written in brackets rather than by indentation."""
    anchor: str | None
    line: int
    """From 0."""
    column: int
    """From 0."""
    start: int
    """Index of its first character in the text."""
    end: int
    """Index after its last character; for a block mapping or list the comments after it are included."""

    @property
    def place(self) -> str:
        """`line:column`, both from 1."""
        return f"{self.line + 1}:{self.column + 1}"

    def child(self, step: Step) -> tuple[Node | None, Node] | None:
        """(key, value) one step down, own entries before merged ones; None when there is no such entry."""
        if self.kind == "list":
            return (None, self.values[step]) if isinstance(step, int) and step < len(self.values) else None
        merges: list[Node] = []
        for key, value in zip(self.keys, self.values, strict=False):
            if key.text == str(step) and key.tag != "merge":
                return key, value
            if key.tag == "merge":
                merges += value.values if value.kind == "list" else [value]
        return next((found for merge in merges if (found := merge.child(step)) is not None), None)


def compose(text: str, *, name: str) -> Node:
    """The tree of a YAML text; scalars are tagged as YAML 1.1 resolves them.

    Raises:
        EvenloadError: not valid YAML, cyclic or nested too deeply.
    """
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.version = "1.1"
    try:
        root = yaml.compose(text)
        if root is None:
            raise EvenloadError("the file holds only comments", where=name)
        return _convert(root, name, {}, set())
    except ReaderError as error:
        raise EvenloadError(
            "this is not valid YAML: a control character", where=_reader_place(name, text, error), fix="remove it"
        ) from None
    except MarkedYAMLError as error:
        raise _syntax_error(name, text, error) from None
    except YAMLError as error:
        raise EvenloadError(f"this is not valid YAML: {error}", where=name) from None
    except RecursionError:
        raise EvenloadError("the values are nested too deeply", where=name) from None


def _convert(node: Any, name: str, made: dict[int, Node], opened: set[int]) -> Node:
    if id(node) in made:
        return made[id(node)]
    mark, end = node.start_mark, node.end_mark
    if id(node) in opened:
        raise EvenloadError(
            "a value contains itself through an alias", where=f"{name}:{mark.line + 1}:{mark.column + 1}"
        )
    opened.add(id(node))
    kind = _KINDS.get(node.__class__, "scalar")
    pairs: Sequence[tuple[Any, Any]] = node.value if kind == "mapping" else ()
    items: Sequence[Any] = node.value if kind == "list" else [value for _, value in pairs]
    new = Node(
        kind=kind,
        tag=str(node.tag).removeprefix("tag:yaml.org,2002:"),
        text=str(node.value) if kind == "scalar" else "",
        keys=tuple(_convert(key, name, made, opened) for key, _ in pairs),
        values=tuple(_convert(item, name, made, opened) for item in items),
        flow=bool(getattr(node, "flow_style", False)),
        anchor=node.anchor,
        line=mark.line,
        column=mark.column,
        start=mark.index,
        end=end.index,
    )
    opened.discard(id(node))
    made[id(node)] = new
    return new


def _reader_place(name: str, text: str, error: Any) -> str:
    before = text[: int(error.position)]
    return f"{name}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


def _syntax_error(name: str, text: str, error: Any) -> EvenloadError:
    mark = error.problem_mark or error.context_mark
    place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    said = ", ".join(part for part in (error.context, error.problem) if part)
    line = "".join(text.splitlines()[mark.line : mark.line + 1]) if mark else ""
    return EvenloadError(f"this is not valid YAML: {said}", where=place, fix=_hint(line, error.problem or ""))


def _hint(line: str, problem: str) -> str | None:
    if "\t" in line:
        return "indent with spaces, not tabs"
    if "mapping values are not allowed" in problem:
        return "put quotes around a value that holds a colon, or check the indentation of this line"
    if "another document" in problem:
        return "keep one document in the file"
    if "escape character" in problem:
        return "write patterns in single quotes: 'feed_forward\\.mul'"
    return None
