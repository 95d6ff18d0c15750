"""Change single values of a YAML text in place: every other byte of the user's file stays as it was."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from evenload.dialects.typed import mapping
from evenload.dialects.yaml_node import Node, Step
from evenload.dialects.yaml_source import YamlSource, parse_yaml
from evenload.dialects.yaml_text import flow, scalar
from evenload.errors import EvenloadError

_ALIAS: Final = re.compile(r"\s*\*[^\s,\]}]+")
_COMMENT: Final = re.compile(r"[ \t]*(#[^\n\r]*)")
_TAB: Final = 2
_LOWER: Final = ("false", "true")
_TITLE: Final = ("False", "True")
Words = tuple[str, str]
"""How the file writes false and true."""


def edit(source: YamlSource, changes: Mapping[tuple[str, ...], Any]) -> str:
    """The text with the values at some paths changed or added, comments and order kept.

    Args:
        source: the file.
        changes: path of keys -> new value (a scalar, nested lists, or a mapping of those).

    Raises:
        EvenloadError: a path runs through something that is no mapping, or a value is shared by an anchor, so that
            changing it would change something else as well.
    """
    line_end = "\r\n" if "\r\n" in source.text else "\n"
    current = source
    for path, value in changes.items():
        if _has(current.data, path, _plain(value)):
            continue  # as it is, down to the way it is written
        text = _set(current, path, value).replace("\r\n", "\n").replace("\n", line_end)
        expected = _with(current.data, path, value)
        try:
            after = parse_yaml(text, name=source.name)
        except EvenloadError:
            after = None
        if after is None or after.data != expected:
            raise source.error(
                f"{'.'.join(path)} cannot be changed without changing something else",
                *path,
                fix="write this value out where it stands, without an anchor or an alias",
            )
        current = after
    return current.text


def _set(source: YamlSource, path: tuple[str, ...], value: Any) -> str:
    words = _TITLE if re.search(r":\s+(True|False)\b", source.text) else _LOWER
    node = source.root
    for depth, step in enumerate(path):
        if node.kind != "mapping":
            raise source.error(f"{'.'.join(path[:depth])} is no mapping", *path[:depth])
        own = _own(node, step)
        if own is None:
            return _insert(source.text, node, path[depth:], value, words=words)
        key, below = own
        last = depth == len(path) - 1
        if last or below.tag == "null":
            rest = _nested(path[depth + 1 :], value)
            return _replace(source.text, node, key, below, rest, words=words)
        node = below
    raise source.error("there is no path to change")


def _own(node: Node, step: Step) -> tuple[Node, Node] | None:
    """The entry of the mapping itself, not one that it merges."""
    for key, value in zip(node.keys, node.values, strict=True):
        if key.text == step and key.tag != "merge":
            return key, value
    return None


def _replace(text: str, parent: Node, key: Node, old: Node, value: Any, *, words: Words) -> str:
    colon = text.index(":", key.end)
    alias = _ALIAS.match(text, colon + 1)
    if alias is not None and old.start < key.start:
        return text[: colon + 1] + " " + flow(value, words) + text[alias.end() :]
    empty = old.tag == "null" and old.start == old.end
    inside = not empty and old.kind != "scalar" and not old.flow
    if not inside and not isinstance(value, Mapping) and not empty:
        return text[: old.start] + flow(value, words) + _tail(text, old)
    # The value starts on a line of its own, or will: what stands between the colon and the line's end is a comment.
    comment = _COMMENT.match(text, colon + 1)
    remark = f"  {comment[1]}" if comment else ""
    line_end = comment.end() if comment else colon + 1
    rest = text[line_end:] if empty else text[_last(old).end :] if inside else _tail(text, old)
    if isinstance(value, Mapping) and value and not parent.flow:
        entries = cast("Mapping[str, Any]", value)
        if not comment and not inside and (after := _COMMENT.match(rest)) is not None:
            remark, rest = f"  {after[1]}", rest[after.end() :]
        return text[: colon + 1] + remark + "\n" + block(entries, key.column + _TAB, words).rstrip("\n") + rest
    return text[: colon + 1] + " " + flow(value, words) + remark + rest


def _insert(text: str, node: Node, path: tuple[str, ...], value: Any, *, words: Words) -> str:
    """Add an entry at the end of a mapping."""
    key, rest = path[0], _nested(path[1:], value)
    if node.flow:
        end = node.end - 1
        while text[end] != "}":
            end -= 1
        head = text[:end].rstrip()
        comma = "" if head.endswith(("{", ",")) else ","
        space = "" if head.endswith("{") else " "
        return f"{head}{comma}{space}{scalar(key)}: {flow(rest, words)}{text[end:]}"
    last = _last(node)
    start = text.find("\n", max(last.start, last.end - 1))  # a block scalar ends behind its line end
    line = block({key: rest}, node.column, words)
    if start < 0:
        return text + ("\n" if not text.endswith("\n") else "") + line
    return text[: start + 1] + line + text[start + 1 :]


def _last(node: Node) -> Node:
    """The last thing that is written inside a block: comments after it belong to what follows."""
    while not node.flow and node.kind != "scalar" and node.values:
        value = node.values[-1]
        key = node.keys[-1] if node.keys else None
        if key is not None and (value.start < key.start or (value.tag == "null" and value.start == value.end)):
            return key  # an alias, or nothing, on the line of the key
        node = value
    return node


def _tail(text: str, node: Node) -> str:
    """What follows a scalar or a bracketed value; a block scalar ends with the line end that must stay."""
    written = text[node.start : node.end]
    kept = len(written) - len(written.rstrip()) if node.kind == "scalar" else 0
    return text[node.end - kept :]


def _nested(path: tuple[str, ...], value: Any) -> Any:
    for step in reversed(path):
        value = {step: value}
    return value


def block(value: Mapping[str, Any], column: int = 0, words: Words = _TITLE) -> str:
    """A mapping as indented lines; only nested mappings get lines of their own."""
    return "".join(f"{' ' * column}{line}\n" for line in _lines(value, words))


def _lines(value: Mapping[str, Any], words: Words) -> Iterator[str]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield f"{scalar(key)}:"
            for line in _lines(cast("Mapping[str, Any]", item), words):
                yield " " * _TAB + line
        else:
            yield f"{scalar(key)}: {flow(item, words)}"


def _has(data: Any, path: tuple[str, ...], value: Any) -> bool:
    for step in path:
        if not isinstance(data, dict) or step not in data:
            return False
        data = cast("dict[str, Any]", data)[step]
    return _same(data, value)


def _same(one: Any, other: Any) -> bool:
    """Equal, and of equal types: true is not 1 here."""
    return one == other and repr(one) == repr(other)


def _with(data: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy of the data with the value at the path; lists and mappings off the path are shared, not copied."""
    head, *rest = path
    below = data.get(head)
    new = _plain(value) if not rest else _with(mapping(below) or {}, tuple(rest), value)
    return data | {head: new}


def _plain(value: Any) -> Any:
    """Tuples as lists, as a parsed file has them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("list[Any]", value)]
    return value
