"""NumPy arrays over the memory of tensors: they hold a tensor where the garbage collector does not look."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple


class Holder(NamedTuple):
    """An object that refers to another, both alive."""

    above: Any
    below: Any
    how: str | None
    """How, where the two objects do not say it."""


def holders_of(tensors: Mapping[int, Any]) -> list[Holder]:
    """From tensors, given by their identity, up over arrays to the objects that the collector knows.

    `tensor.numpy()` makes an array whose base is the tensor. Arrays are no containers to the collector, so they are
    looked for in everything that it does know.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None or not tensors:
        return []
    found: dict[tuple[int, int], Holder] = {}
    for thing in gc.get_objects():
        for path in _arrays_in(thing, numpy.ndarray):
            array = path[-1]
            while issubclass(type(array), numpy.ndarray) and array.base is not None:
                path.append(array := array.base)
            if id(array) in tensors:
                for above, below in pairwise(path):
                    how = ".base" if issubclass(type(above), numpy.ndarray) else None
                    found[id(above), id(below)] = Holder(above, below, how)
    return list(found.values())


def _arrays_in(thing: Any, array: type) -> Iterator[list[Any]]:
    """Ways from an object down to arrays, through containers of things that the collector need not know."""
    for held in gc.get_referents(thing):
        if issubclass(type(held), array):
            yield [thing, held]
        elif type(held) in (tuple, dict) and not gc.is_tracked(held):
            for path in _arrays_in(held, array):
                yield [thing, *path]
