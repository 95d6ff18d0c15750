"""Tensors inside arguments, results and other tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, cast

import torch

from evenload.record._torch_private import FakeTensor

_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Layout -> methods that give its tensors."""


def arguments(positions: tuple[int, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors among an operator's arguments; `positions` are those of the schema that may hold some."""
    found: list[torch.Tensor] = []
    count = len(args)
    for position in positions:
        if position >= count:
            break
        argument = args[position]
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif argument is not None:
            found.extend(flat(argument))
    if kwargs:
        found.extend(flat(kwargs))
    return found


def flat(value: object) -> list[torch.Tensor]:
    """Tensors in a value: itself, or inside lists, tuples and mappings, to any depth."""
    found: list[torch.Tensor] = []
    _gather(value, found)
    return found


def _gather(value: object, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in cast("Iterable[object]", value):
            _gather(item, found)
    elif isinstance(value, Mapping):
        for item in cast("Mapping[object, object]", value).values():
            _gather(item, found)


@cache
def is_wrapper(kind: type) -> bool:
    """Whether a tensor class runs operators on tensors that it holds: DTensor, nested tensors, quantized weights."""
    own = getattr(kind, "__torch_dispatch__", None) is not getattr(torch.Tensor, "__torch_dispatch__", None)
    return own and not issubclass(kind, FakeTensor)


def components(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with a storage of their own that a tensor consists of: itself, for a plain one."""
    if is_wrapper(type(tensor)):
        flatten = getattr(tensor, "__tensor_flatten__", None)
        names, _ = flatten() if flatten is not None else ((), None)  # it does not tell what it holds
        inner = [getattr(tensor, name) for name in names]  # a device mesh may be among them
        return [part for item in inner if isinstance(item, torch.Tensor) for part in components(item)]
    if (methods := _SPARSE.get(tensor.layout)) is not None:
        return [part for method in methods for part in components(getattr(tensor, method)())]
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return []  # opaque: what it holds is not to be seen from here
    return [tensor]
