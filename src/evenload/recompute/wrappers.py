"""Tensors that hold other tensors: DTensor, and the result of a collective that is still under way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, cast

import torch

from evenload.recompute._torch_private import AsyncCollectiveTensor, is_wrapper


class Wrapping(NamedTuple):
    """How to put one wrapper back on a tensor."""

    kind: Any
    """Class of the wrapper."""
    name: str
    """Its attribute that holds the inner tensor."""
    others: dict[str, Any]
    """What else it is put together from: DTensor's mesh."""
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


def unwrap(tensor: torch.Tensor) -> tuple[torch.Tensor | None, tuple[Wrapping, ...]]:
    """The plain tensor inside, and the wrappers round it, outermost first.

    None where a wrapper holds several tensors. The wrapper of a pending collective is no part of what must be put back:
    by the time of backward it has arrived.
    """
    wrappings: list[Wrapping] = []
    while is_wrapper(tensor):
        wrapper = cast("Any", tensor)
        names, context = wrapper.__tensor_flatten__()
        parts = {name: getattr(wrapper, name) for name in names}
        inner = [name for name, part in parts.items() if isinstance(part, torch.Tensor)]
        if len(inner) != 1:
            return None, ()
        held = parts.pop(inner[0])
        if not isinstance(tensor, AsyncCollectiveTensor):
            wrappings.append(Wrapping(type(tensor), inner[0], parts, context, tensor.shape, tensor.stride()))
        tensor = held
    return tensor, tuple(wrappings)


def strided_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The strided tensors in whose memory a tensor lies."""
    if is_wrapper(tensor):
        names, _ = cast("Any", tensor).__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, torch.Tensor):
                yield from strided_parts(part)
    elif tensor.layout is torch.strided:
        yield tensor


def wrap(tensor: torch.Tensor, wrappings: tuple[Wrapping, ...]) -> torch.Tensor:
    """Put wrappers back on, without gradient."""
    for one in reversed(wrappings):
        tensor = one.kind.__tensor_unflatten__({one.name: tensor, **one.others}, one.context, one.size, one.stride)
    return tensor.detach() if wrappings else tensor


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested tuples, lists, dictionaries and dataclasses, in order; other containers are not opened."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in cast("tuple[Any, ...]", tree):
            yield from tensors(item)
    elif isinstance(tree, dict):
        for item in cast("dict[Any, Any]", tree).values():
            yield from tensors(item)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from tensors(getattr(tree, field.name))
