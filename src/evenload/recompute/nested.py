"""Tensors inside of tuples, lists and dictionaries: taken out, counted and put back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final, cast

import torch


class _Hole:
    """Stands for a tensor in arguments whose tensors have been taken out."""


_HOLE: Final = _Hole()


def emptied(value: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors in nested tuples, lists and dictionaries, and the same with holes in their places."""
    tensors: list[torch.Tensor] = []
    return tensors, _take(value, tensors)


def _take(part: Any, tensors: list[torch.Tensor]) -> Any:
    # No function inside a function: one that calls itself is a cycle, and would hold the tensors until it is collected.
    if isinstance(part, torch.Tensor):
        tensors.append(part)
        return _HOLE
    if isinstance(part, list):
        return [_take(item, tensors) for item in cast("list[Any]", part)]
    if isinstance(part, tuple):
        return like(part, [_take(item, tensors) for item in cast("tuple[Any, ...]", part)])
    if isinstance(part, dict):
        return _of_class(
            cast("dict[Any, Any]", part),
            {key: _take(item, tensors) for key, item in cast("dict[Any, Any]", part).items()},
        )
    return part


def like(part: Any, items: list[Any]) -> Any:
    """A tuple of the same class."""
    return type(part)(*items) if hasattr(part, "_fields") else tuple(items)


def _of_class(part: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """A dictionary of the same class: ordered, with defaults, or with keys as attributes."""
    if type(part) is dict:
        return items
    made = copy.copy(part)
    for key, item in items.items():
        made[key] = item
    return made


def filled(shape: Any, tensors: Any) -> Any:
    """The value with tensors, taken one by one, in the places of the holes."""
    if shape is _HOLE:
        return next(tensors)
    if isinstance(shape, list):
        return [filled(item, tensors) for item in cast("list[Any]", shape)]
    if isinstance(shape, tuple):
        return like(shape, [filled(item, tensors) for item in cast("tuple[Any, ...]", shape)])
    if isinstance(shape, dict):
        return _of_class(
            cast("dict[Any, Any]", shape),
            {key: filled(item, tensors) for key, item in cast("dict[Any, Any]", shape).items()},
        )
    return shape


def holes(shape: Any) -> int:
    """How many tensors were taken out."""
    if shape is _HOLE:
        return 1
    if isinstance(shape, list | tuple):
        return sum(holes(item) for item in cast("Sequence[Any]", shape))
    return sum(holes(item) for item in cast("dict[Any, Any]", shape).values()) if isinstance(shape, dict) else 0
