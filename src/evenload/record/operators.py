"""What a recording needs to know about an operator, from its schema, once per operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from evenload.ledger.cells import UPPER
from evenload.ledger.log import Log
from evenload.ledger.words import Role

_SENDS: Final = frozenset({"send"})
"""Operators of `c10d` that write nothing; those that move tensors write their first argument, but for this one."""
_TALKING: Final = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
_SILENT: Final = frozenset({"wait_tensor", "barrier", "monitored_barrier_"})
"""Operators of those namespaces that move no tensor."""
_RECEIVES: Final = frozenset({"recv_", "recv_any_source_"})
_MANY: Final = 64
"""More arguments than any operator without a schema has."""
_RESIZES: Final = frozenset({"resize_", "resize_as_", "set_", "resize"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What a recording needs to know about an operator."""

    name: str
    """`aten.mm`; the overload is told only where it is not the default one."""
    label: int
    """The name's half of word 4 of an allocation."""
    passes: bool
    """Makes nothing, reads nothing: a view, or a question about a tensor."""
    detach: bool
    """Hands a gradient over to a parameter, when backward runs it for a leaf."""
    tensors: tuple[int, ...]
    """Positions of the arguments that may be tensors or lists of them."""
    resizes: bool
    """May give the storage of a tensor that it writes another size."""
    fresh: bool
    """Brings in a storage that was made without any operator: `torch.tensor`, `set_`."""
    waits: bool
    """Returns its argument when a collective is done."""
    pins: bool
    """Makes page-locked memory."""
    writes: Role
    """Role of its results and of `out`, for operators that communicate."""
    writes_first: bool
    """Writes its first argument, which gets the same role."""
    talks: bool
    """Sends something to other ranks, or receives it."""


class TraitsTable:
    """Traits of operators, made when an operator is first seen."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.known: dict[Any, Traits] = {}

    def add(self, operator: Any) -> Traits:
        """Traits of an operator that is not in `known` yet."""
        traits = self.known[operator] = _traits(operator, self._log)
        return traits


def _traits(operator: Any, log: Log) -> Traits:
    if not hasattr(operator, "_schema"):
        return _higher_order(operator, log)
    schema = operator._schema  # noqa: SLF001  # the way to an operator's schema that PyTorch documents
    namespace, name = schema.name.split("::")
    full = f"{namespace}.{name}" + (f".{schema.overload_name}" if schema.overload_name else "")
    written = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    aliases = bool(schema.returns) and all(result.alias_info is not None for result in schema.returns)
    tensors = tuple(
        position
        for position, argument in enumerate(schema.arguments)
        if not argument.kwarg_only and "Tensor" in str(argument.type)
    )
    lifts = name in ("lift_fresh", "lift")
    return Traits(
        name=full,
        label=(log.string(full) + 1) << UPPER,
        passes=(aliases and not written and not lifts) or namespace == "prim",
        detach=full == "aten.detach",
        tensors=tensors,
        resizes=name in _RESIZES or any(argument.is_out for argument in schema.arguments),
        fresh=lifts or name == "set_",
        waits=full == "_c10d_functional.wait_tensor",
        pins=name == "_pin_memory",
        writes=_writes(namespace, name),
        writes_first=namespace == "c10d" or name.endswith("_"),
        talks=namespace in _TALKING and name not in _SILENT,
    )


def _higher_order(operator: Any, log: Log) -> Traits:
    """An operator that takes functions, such as flex_attention: what it does inside is its own."""
    name = f"higher_order.{operator.name()}"
    return Traits(
        name=name,
        label=(log.string(name) + 1) << UPPER,
        passes=False,
        detach=False,
        tensors=tuple(range(_MANY)),
        resizes=False,
        fresh=False,
        waits=False,
        pins=False,
        writes=Role.NONE,
        writes_first=False,
        talks=False,
    )


def _writes(namespace: str, name: str) -> Role:
    if name in _SILENT:  # what it waits for has been written by another operator, in a phase of its own
        return Role.NONE
    if namespace == "fsdp" or (namespace == "c10d" and name in _RECEIVES):
        return Role.BUFFER
    if (namespace == "c10d" and name not in _SENDS) or namespace in ("_c10d_functional", "_c10d_functional_autograd"):
        return Role.COLLECTIVE
    return Role.NONE
