"""Chains of references in words: from a variable or an object down to a tensor."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from types import CellType, FrameType, FunctionType, GeneratorType, MethodType, TracebackType
from typing import Any, Final, NamedTuple, cast

import torch

from evenload.record import lines
from evenload.record.referrers import Root, is_a


class Step(NamedTuple):
    """One object of a chain, top first, and how the one above refers to it."""

    thing: Any
    how: str | None
    """Where the two objects do not say it: edges of the backward graph."""


# The methods of the classes themselves, where those of an object of the program could be its own.
_DICT: Final[Any] = dict
_LIST: Final[Any] = list
_TUPLE: Final[Any] = tuple
_DEQUE: Final[Any] = deque
_LONGEST: Final = 12
"""Parts of a chain that are told."""


def describe(steps: Sequence[Step], root: Root | None) -> tuple[str, str | None]:
    """A chain in words, and the line at which the variable or attribute nearest to the tensor is set.

    Args:
        steps: objects from the top down to the tensor.
        root: variable that holds the first one; None: nothing does.
    """
    parts, source = _begin(steps, root)
    above: Any = None
    module: torch.nn.Module | None = None
    for upper, lower in pairwise(steps):
        if is_a(upper.thing, torch.nn.Module):
            module = upper.thing
        label = lower.how if lower.how is not None else _label(upper.thing, lower.thing, above)
        found = _line(upper.thing, lower.thing, above, module)
        source = found or source
        if label.startswith((".", "[", "(")) or not label or not parts[-1]:
            parts[-1] += label
        else:
            parts.append(label)
        above = upper.thing
    parts = _without_nodes(parts)
    if root is not None:
        parts[0] += _place(root)
    if len(parts) > _LONGEST:
        parts = [*parts[: _LONGEST // 2], "...", *parts[-_LONGEST // 2 :]]
    return " -> ".join(parts), source


def _begin(steps: Sequence[Step], root: Root | None) -> tuple[list[str], str | None]:
    if root is None:
        return [kind(steps[0].thing)], None
    if root.kind == "variable":
        return [root.name], lines.of_variable(root.place, root.name)
    return [root.name if root.kind == "class" else ""], None  # the first label names the global


def _place(root: Root) -> str:
    if root.kind == "variable":
        return f" (variable of {root.place.co_qualname})"
    if root.kind == "class":
        return " (class)"
    return f" (global of {root.name})"


def kind(thing: Any) -> str:
    """What an object is: the name of its class, of a function its own; empty where its first label says it."""
    if is_a(thing, torch.Tensor):
        return "Tensor"
    if is_a(thing, FunctionType):
        return thing.__qualname__
    return "" if is_a(thing, FrameType) else type(thing).__name__


def _label(upper: Any, lower: Any, above: Any) -> str:
    """How an object refers to another: `.name`, `[3]`, `['key']`; empty where the next one says it."""
    for kinds, label in _LABELS:
        if is_a(upper, kinds):
            return label(upper, lower, above)
    return _attribute(upper, lower)


def _attribute(upper: Any, lower: Any) -> str:
    """Attribute of an instance that is an object; empty for its dictionary."""
    own: Any = _asked(upper, "__dict__")
    if own is lower:
        return ""
    for name, value in _DICT.items(own) if is_a(own, dict) else ():
        if value is lower:
            return f".{name}"
    for cls in type(upper).__mro__:
        for name in _slots(cls):
            if _asked(upper, name) is lower:
                return f".{name}"
    return f".({kind(lower)})"


def _asked(thing: Any, name: str) -> Any:
    """An attribute of an object of the program, whose own code may run and fail; None then."""
    try:
        return getattr(thing, name, None)
    except Exception:  # noqa: BLE001
        return None


def _slots(cls: type) -> Sequence[str]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if is_a(slots, str) else tuple(slots)


def _of_dict(upper: dict[Any, Any], lower: Any, above: Any) -> str:
    key = _key(upper, lower)
    if key is None:
        return "(a key)"
    if is_a(above, type):
        return f".{key}"
    if is_a(above, torch.nn.Module) and key in _TABLES:
        return ""
    if is_a(above, dict):
        table = cast("dict[Any, Any]", above)
        return f".{key}" if any(_DICT.get(table, name) is upper for name in _TABLES) else f"[{_short(key)}]"
    if above is not None and _asked(above, "__dict__") is upper and is_a(key, str):
        return f".{key}"
    if is_a(key, str) and _DICT.get(upper, "__name__") is not None and _DICT.__contains__(upper, "__builtins__"):
        return key  # the dictionary of a module
    return f"[{_short(key)}]"


def _key(upper: dict[Any, Any], lower: Any) -> Any:
    """The key of a value; None: it is none."""
    return next((key for key, value in _DICT.items(upper) if value is lower), None)


_TABLES: Final = ("_parameters", "_modules", "_buffers")
"""Dictionaries in which a module keeps what it shows as attributes."""


def _of_sequence(upper: Sequence[Any], lower: Any, above: Any) -> str:
    items: Iterator[Any] = (_LIST if is_a(upper, list) else _TUPLE).__iter__(upper)
    position = next((number for number, item in enumerate(items) if item is lower), None)
    if is_a(above, FunctionType) and above.__closure__ is upper and position is not None:
        return f".{above.__code__.co_freevars[position]}"
    return "[]" if position is None else f"[{position}]"


def _of_deque(upper: deque[Any], lower: Any, above: Any) -> str:
    bound = "" if upper.maxlen is None else f"(maxlen={upper.maxlen})"
    return bound + _of_sequence(list(_DEQUE.__iter__(upper)), lower, above)


def _of_function(upper: FunctionType, lower: Any, _above: Any) -> str:
    name = {id(upper.__closure__): "", id(upper.__defaults__): ".__defaults__", id(upper.__dict__): ""}.get(id(lower))
    return f".({kind(lower)})" if name is None else name


def _of_frame(upper: FrameType, lower: Any, _above: Any) -> str:
    variables = upper.f_locals
    name = next((name for name, value in variables.items() if value is lower), None)
    place = f"{upper.f_code.co_qualname}, {upper.f_code.co_filename}:{upper.f_lineno}"
    return f"{name} of {place}" if name else f"frame of {place}"


def _of_generator(upper: GeneratorType[Any, Any, Any], lower: Any, _above: Any) -> str:
    frame = upper.gi_frame
    return ".(generator)" if frame is None else _of_frame(frame, lower, None)


def _of_tensor(upper: torch.Tensor, lower: Any, _above: Any) -> str:
    if upper.grad is lower:
        return ".grad"
    if lower is upper.grad_fn:
        return f"grad_fn {kind(lower)}"
    return _attribute(upper, lower)


def _of_cache(upper: Any, _lower: Any, _above: Any) -> str:
    size = upper.cache_parameters()["maxsize"]
    return f" cache of {upper.__qualname__}" + ("" if size is None else f" (maxsize={size})")


def _nothing(_upper: Any, _lower: Any, _above: Any) -> str:
    return ""


def _of_method(upper: MethodType, lower: Any, _above: Any) -> str:
    return f".{upper.__name__}" if upper.__self__ is lower else ""


def _of_traceback(upper: TracebackType, lower: Any, _above: Any) -> str:
    return ".tb_next" if upper.tb_next is lower else ""


def _of_exception(upper: BaseException, lower: Any, _above: Any) -> str:
    for name in ("__traceback__", "__context__", "__cause__"):
        if getattr(upper, name) is lower:
            return f".{name}"
    return _attribute(upper, lower)


_CACHE: Final[Any] = type(lru_cache(int))
_LABELS: Final[Sequence[tuple[Any, Callable[[Any, Any, Any], str]]]] = (
    (type, _nothing),
    (torch.Tensor, _of_tensor),
    (dict, _of_dict),
    (deque, _of_deque),
    ((list, tuple), _of_sequence),
    (FunctionType, _of_function),
    (CellType, _nothing),
    (FrameType, _of_frame),
    (GeneratorType, _of_generator),
    (TracebackType, _of_traceback),
    (BaseException, _of_exception),
    (MethodType, _of_method),
    (_CACHE, _of_cache),
)


def _line(upper: Any, lower: Any, above: Any, module: torch.nn.Module | None) -> str | None:
    """Where the user's code sets what refers to the lower object."""
    if is_a(upper, dict):
        return _line_of_key(cast("dict[Any, Any]", upper), lower, above, module)
    if is_a(upper, FunctionType):
        return _users(f"{upper.__code__.co_filename}:{upper.__code__.co_firstlineno}")
    if is_a(upper, FrameType):
        name = next((name for name, value in upper.f_locals.items() if value is lower), None)
        return None if name is None else _users(lines.of_variable(upper.f_code, name))
    name = _attribute(upper, lower)[1:] if _asked(upper, "__dict__") is not None else ""
    return _users(lines.of_attribute(_class(upper), name)) if name.isidentifier() else None


def _line_of_key(upper: dict[Any, Any], lower: Any, above: Any, module: torch.nn.Module | None) -> str | None:
    key = _key(upper, lower)
    if not is_a(key, str):
        return None
    if is_a(above, type):
        return _users(lines.of_attribute(above, key))
    if above is not None and _asked(above, "__dict__") is upper:
        return _users(lines.of_attribute(_class(above), key))
    if module is not None and any(vars(module).get(table) is upper for table in _TABLES):
        return _users(lines.of_attribute(type(module), key))
    name = _DICT.get(upper, "__name__")
    if is_a(name, str) and _DICT.__contains__(upper, "__builtins__"):
        return _users(lines.of_global(sys.modules.get(name), key))
    return None


def _class(thing: object) -> type[object]:
    return type(thing)


def _users(place: str | None) -> str | None:
    """A line, unless it is PyTorch's own."""
    return None if place is None or "/torch/" in place.replace("\\", "/") else place


def _without_nodes(parts: list[str]) -> list[str]:
    """A run of nodes of a backward graph as its length, its last one kept."""
    short: list[str] = []
    passed = 0
    for part in parts:
        if part.startswith("node "):
            passed += 1
            name = part.removeprefix("node ")
            if passed > 1:
                short[-1] = f"... {name}"
            else:
                short.append(name)
        else:
            passed = 0
            short.append(part)
    return short


def _short(key: Any) -> str:
    plain = (str, int, float, bool, bytes, tuple)
    text = repr(cast("object", key)) if is_a(key, plain) else f"a {type(key).__name__}"
    return text if len(text) <= 40 else f"{text[:37]}..."
