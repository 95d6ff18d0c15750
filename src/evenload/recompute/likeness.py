"""When two forwards of a layer do the same: what is looked at before a recorded plan is followed.

The arguments, the state of autocast and everything simple that the layer's modules hold (numbers, flags, names, which
modules are inside) make up a key; forwards with equal keys run the same operators, unless the layer's code depends on
data, which the recording notices, or on something out of reach, such as a global variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, cast

import torch

from evenload.recompute._torch_private import kind_of, parameter_dictionaries, storage_key
from evenload.recompute.wrappers import unwrap

Key = tuple[Any, ...]
SIMPLE: Final = (
    *(bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format),
    *(type, FunctionType, BuiltinFunctionType),
)
"""What is compared as it is. Of other things it is their class that counts, and what is simple in them."""


def arguments_key(tree: Any, found: list[torch.Tensor]) -> Key:
    """A key of a layer's arguments; appends their tensors to `found` in order."""
    parts: list[Any] = []
    _describe(tree, parts, found)
    if len(found) > 1:
        # tensors that share memory are one value in the recording
        first: dict[int, int] = {}
        for position, tensor in enumerate(found):
            plain = unwrap(tensor)[0] if type(tensor) is not torch.Tensor else tensor
            if plain is not None and plain.layout is torch.strided:
                other = first.setdefault(storage_key(plain), position)
                if other != position:
                    parts.append((other, position, plain.storage_offset() - found[other].storage_offset()))
    return tuple(parts)


def _describe(tree: Any, parts: list[Any], found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
        strides = tree.stride() if tree.layout is torch.strided else None
        parts += (kind_of(tree), tree.shape, strides, tree.dtype, tree.device, tree.requires_grad, tree.is_leaf)
    elif isinstance(tree, SIMPLE):
        parts += (type(tree), tree)
    elif isinstance(tree, (tuple, list)):
        items = cast("tuple[Any, ...]", tree)
        parts += (type(items), len(items))
        for item in items:
            _describe(item, parts, found)
    elif isinstance(tree, dict):
        for name, item in cast("dict[Any, Any]", tree).items():
            parts.append(name)
            _describe(item, parts, found)
        parts.append(None)
    elif is_dataclass(tree):
        parts.append(type(tree))
        for field in fields(tree):
            _describe(getattr(tree, field.name), parts, found)
    else:
        parts += (type(tree), _simple_state(tree))


def _simple_state(thing: Any) -> Key:
    """What is simple among the attributes of an object."""
    held = getattr(thing, "__dict__", None)
    if not isinstance(held, dict):
        return ()
    return tuple((name, one) for name, one in cast("dict[str, Any]", held).items() if isinstance(one, SIMPLE))


def _contents(thing: Any) -> Any:
    """What is simple in nested lists and dictionaries."""
    if isinstance(thing, SIMPLE):
        return thing
    if isinstance(thing, (list, tuple, set, frozenset)):
        return tuple([_contents(one) for one in cast("list[Any]", thing)])
    if isinstance(thing, dict):
        return tuple([(name, _contents(one)) for name, one in cast("dict[Any, Any]", thing).items()])
    return cast("Any", type(thing))


def surroundings(device: str) -> Key:
    """The state of autocast, for the processor and for a device."""
    state: Key = ()
    for kind in dict.fromkeys(("cpu", device)):
        enabled = torch.is_autocast_enabled(kind)
        state += (enabled, torch.get_autocast_dtype(kind) if enabled else None)
    return state


class Watch:
    """What is simple in a layer's modules, read as fast as Python can."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._readers: Final = tuple(_readers(layer))
        dictionaries = [parameter_dictionaries(module)[0] for module in layer.modules()]
        self._parameters: Final = tuple(
            (held, name) for held in dictionaries for name, one in held.items() if one is not None
        )

    def key(self) -> Key:
        """All of it, as it is now."""
        try:
            state = tuple([read(held) for held, read in self._readers])
            return state, tuple([_parameter(held[name]) for held, name in self._parameters])
        except (KeyError, AttributeError):  # something was taken away
            return (object(),)


_Reader = Callable[[dict[str, Any]], Any]


def _readers(layer: torch.nn.Module) -> Iterator[tuple[dict[str, Any], _Reader]]:
    """(dictionary, how to read what is simple in it) of every module, and of every object that a module holds."""
    seen: set[int] = set()
    for module in layer.modules():
        held = module.__dict__
        yield held, _reader(held)
        yield parameter_dictionaries(module)[1], _values  # which modules are inside
        for name, one in cast("dict[str, object]", held).items():
            if name.startswith("_") or callable(one) or isinstance(one, torch.Tensor):
                continue
            if isinstance(one, (list, tuple, dict, set)):
                yield held, partial(_item, name)
                continue
            other: dict[str, Any] = getattr(one, "__dict__", {})
            if other and id(other) not in seen:  # a configuration that the modules share
                seen.add(id(other))
                yield other, _reader(other)


def _reader(held: dict[str, Any]) -> _Reader:
    names = tuple(name for name, one in held.items() if isinstance(one, SIMPLE))
    return cast("_Reader", itemgetter(*names)) if names else len


def _item(name: str, held: dict[str, Any]) -> Any:
    return _contents(held[name])


def _parameter(one: torch.Tensor) -> Key:
    return one.requires_grad, one.dtype, kind_of(one)


def _values(held: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(held.values())
