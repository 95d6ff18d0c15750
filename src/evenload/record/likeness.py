"""Whether two modules would do the same, as far as that can be seen without running them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, Final, cast

import torch
from torch import nn

_DEEPEST: Final = 4
"""How many objects inside each other are looked through."""
_WIDEST: Final = 256
"""Entries of a collection that are looked at."""
_BOOKKEEPING: Final = frozenset(("_parameters", "_buffers", "_modules", "_is_full_backward_hook"))
"""Attributes of every module that are described by what they hold, or that say nothing."""


def described(module: nn.Module) -> dict[str, Any]:
    """What tells a module from others, by a path of its own for every fact.

    Classes, tensors, attributes of any kind, hooks, and functions that are put in place of methods, of the module and
    of those in it.
    """
    facts: dict[str, Any] = {}
    for path, inner in cast("Any", module).named_modules():
        facts[f"{path}:class"] = _name(type(cast("object", inner)))
        for name, value in cast("dict[str, object]", vars(inner)).items():
            if name not in _BOOKKEEPING:
                facts[f"{path}.{name}"] = _look(value, inner)
        for name, tensor in (*inner.named_parameters(recurse=False), *inner.named_buffers(recurse=False)):
            facts[f"{path}:{name}"] = _tensor(tensor)
    return facts


def _look(value: Any, owner: object, depth: int = 0) -> object:
    """What can be seen of a value; equal for values that act alike."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if value is owner or depth == _DEEPEST or isinstance(value, nn.Module):  # modules are described where they belong
        return _name(type(cast("object", value)))
    return _look_inside(value, owner, depth)


def _look_inside(value: Any, owner: object, depth: int) -> object:
    if isinstance(value, type):
        return _name(cast("type[object]", value))
    if (inside := _inside_collection(value)) is not None:
        kind, parts = inside
        looks = [_look(part, owner, depth + 1) for part in parts[:_WIDEST]]
        return (kind, len(parts), *(sorted(looks, key=repr) if isinstance(value, set | frozenset) else looks))
    if (inside := _inside_callable(value)) is not None:
        kind, parts = inside
        return (kind, *(_look(part, owner, depth + 1) for part in parts))
    return _look_at_object(value, owner, depth)


def _inside_collection(value: Any) -> tuple[str, list[Any]] | None:
    """(kind, entries) of a collection."""
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        if any(isinstance(key, int) for key, _ in pairs):  # hooks: their numbers count all hooks of the process
            return _name(type(cast("object", value))), [entry for _, entry in pairs]
        return _name(type(cast("object", value))), [part for pair in pairs for part in pair]
    if isinstance(value, tuple | list | set | frozenset):
        return _name(type(cast("object", value))), list(cast("tuple[Any, ...]", value))
    return None


def _inside_callable(value: Any) -> tuple[object, list[Any]] | None:
    """(code, what it is given beforehand) of a function, method or partial function."""
    if isinstance(value, partial):
        made = cast("partial[Any]", value)
        return "partial", [made.func, made.args, made.keywords]
    if isinstance(value, MethodType):
        return "method", [value.__func__, value.__self__]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        return _code(value.__code__), [value.__defaults__, value.__kwdefaults__, cells]
    if isinstance(value, BuiltinFunctionType):
        return value.__qualname__, []
    return None


def _look_at_object(value: object, owner: object, depth: int) -> object:
    text = repr(value)
    if " at 0x" not in text and len(text) < _WIDEST:  # dtypes, enumerations, devices, small data classes
        return (_name(type(value)), text)
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict):
        return _name(type(value))
    return (_name(type(value)), _look(cast("dict[str, object]", own), owner, depth + 1))


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not set yet
        return False


def _code(code: CodeType) -> object:
    return (code.co_filename, code.co_firstlineno, code.co_qualname, code.co_code)


def _tensor(tensor: torch.Tensor) -> object:
    return (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
