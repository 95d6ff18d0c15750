"""When two forwards of a layer do the same: what is looked at before a recorded plan is followed.

The arguments, the state of autocast, the hooks on the layer's modules and everything simple that these hold (numbers,
flags, names, which modules are inside) make up a key; forwards with equal keys run the same operators, unless the
layer's code depends on data, which the recording notices, or on something out of reach, such as a global variable.

A *nature* says less: layers of one nature look alike, so that the plan of one may do for another, which is found out by
comparing one forward with it operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, cast

import torch
from torch.nn.parameter import is_lazy

from evenload.recompute._torch_private import (
    global_hook_dictionaries,
    hook_dictionaries,
    kind_of,
    parameter_dictionaries,
    storage_key,
    tensor_dictionaries,
)
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
        enabled = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # not on meta tensors
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
        inner = [one for module in layer.modules() if module is not layer for one in hook_dictionaries(module)]
        self._hooks: Final = (*inner, *global_hook_dictionaries())

    def key(self) -> Key:
        """All of it, as it is now."""
        try:
            state = tuple([read(held) for held, read in self._readers])
            hooks = [tuple(one) for one in self._hooks if one]  # by number: to hold a hook would hold what it holds
            return state, tuple([_parameter(held[name]) for held, name in self._parameters]), tuple(hooks)
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
    if not names:
        return len
    read = cast("_Reader", itemgetter(*names))
    return lambda held: (len(held), read(held))  # something new may hide something of the class


def _item(name: str, held: dict[str, Any]) -> Any:
    return _contents(held[name])


def _parameter(one: torch.Tensor) -> Key:
    return one.requires_grad, one.dtype, kind_of(one)


def nature(layer: torch.nn.Module, number: int) -> Key:
    """What layers have in common of which one plan may do for all.

    Args:
        layer: the layer.
        number: its place in the model; that it knows it itself (`layer_idx`) makes it no other.
    """
    parts: list[Any] = [type(layer)]
    first: dict[int, str] = {}
    for path, module in cast("Iterator[tuple[str, torch.nn.Module]]", layer.named_modules(remove_duplicate=False)):
        parts += (path, type(module), first.setdefault(id(module), path))
        held: dict[str, Any] = module.__dict__
        for name, one in held.items():
            if type(one) is int and _counts(name):
                parts += (name, "place", one - number)
            elif not isinstance(one, torch.nn.Module) and not name.startswith("_"):
                parts += (name, _contents(one), _simple_state(one))
        for name, one in (item for tensors in tensor_dictionaries(module) for item in tensors.items()):
            if one is None:
                continue
            if is_lazy(one) or one.layout is not torch.strided:
                return (object(),)  # like no other
            parts += (name, one.shape, one.stride(), one.requires_grad, one.dtype, kind_of(one), one.device)
            parts.append(first.setdefault(id(one), f"{path}.{name}"))
    return tuple(parts)


def _counts(name: str) -> bool:
    """Whether an attribute may be the number of a layer."""
    return "layer" in name or "block" in name or name.endswith(("idx", "index", "id"))


def _values(held: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(held.values())
