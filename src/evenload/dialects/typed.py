"""Typed decoding of a parsed file: errors of the decoder become errors with a place and a hint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from evenload.dialects.yaml_node import Step
from evenload.dialects.yaml_source import YamlSource, steps
from evenload.errors import EvenloadError, did_you_mean

T = TypeVar("T")
_PATH: Final = re.compile(r"(.*?) - at `(\$.*)`", re.DOTALL)


def decode(source: YamlSource, path: tuple[Step, ...], kind: type[T]) -> T:
    """The value at a path as a frozen dataclass of plain fields; nothing missing, nothing unknown, nothing coerced.

    Raises:
        EvenloadError: with `file:line:column`, the expected type or values, and what an unknown key may have meant.
    """
    found = at(source, path)
    value = mapping(found)
    if value is None:
        raise source.error(f"{shown(found)} stands where a mapping should", *path, fix=f"give {_names(kind)}")
    # callers pass dataclasses, which `type` cannot say
    refuse_unknown(source, path, value, [field.name for field in fields(kind)])  # pyright: ignore[reportArgumentType]
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, EvenloadError):
            raise relocated(source, error.__cause__, path) from None
        raise _translated(source, path, kind, str(error)) from None


def mapping(value: object) -> dict[str, Any] | None:
    """The value if it is a mapping."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def listed(value: object) -> list[Any] | None:
    """The value if it is a list."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def at(source: YamlSource, path: Iterable[Step]) -> Any:
    """The value at a path, None where there is none."""
    value: Any = source.data
    for step in path:
        below, items = mapping(value), listed(value)
        if below is not None:
            value = below.get(str(step))
        elif items is not None and isinstance(step, int) and step < len(items):
            value = items[step]
        else:
            return None
    return value


def refuse_unknown(source: YamlSource, path: tuple[Step, ...], value: Mapping[str, Any], known: list[str]) -> None:
    """Raise for the first key that is not known.

    Raises:
        EvenloadError: at the key, with the nearest known one.
    """
    for key in value:
        if key not in known:
            near = did_you_mean(key, known) or f"the keys here are {', '.join(known)}"
            raise source.error(f"the key {key!r} is not known here", *path, key, key=True, fix=near)


def relocated(source: YamlSource, error: EvenloadError, path: tuple[Step, ...] = ()) -> EvenloadError:
    """An error of an inner room, whose place is a `$.path` below `path`, with its place in the file."""
    inner = steps(error.where) if error.where and error.where.startswith("$") else ()
    return error.at(source.where(*path, *inner))


def shown(value: Any) -> str:
    """A value in a message: never more than a line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _translated(source: YamlSource, path: tuple[Step, ...], kind: type, message: str) -> EvenloadError:
    match = _PATH.fullmatch(message)
    fact, inner = (match[1], steps(match[2])) if match else (message, ())
    found = shown(at(source, (*path, *inner)))
    if inner and fact.startswith("Invalid enum value"):
        hint = get_type_hints(kind).get(str(inner[0]))
        legal = [str(item) for option in (hint, *get_args(hint)) for item in _literals(option)]
        return source.error(f"{inner[-1]} is {found}", *path, *inner, fix=f"use one of {', '.join(legal)}")
    plain = fact.replace("`", "").replace("Expected", "expected").replace("Object", "the mapping")
    return source.error(f"{inner[-1]} is {found}: {plain}" if inner else plain, *path, *inner)


def _literals(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _names(kind: type) -> str:
    # callers pass dataclasses, which `type` cannot say
    return ", ".join(field.name for field in fields(kind))  # pyright: ignore[reportArgumentType]
