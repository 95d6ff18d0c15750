"""What custom autograd functions keep for backward, and what their backward really reads.

A function keeps what it passes to `save_for_backward` and, unseen by PyTorch, what it stores in attributes of its
context. Reading is seen where it happens: an operator that backward runs takes the tensor as an argument. What is kept
and not read is memory for nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, cast

import torch
from torch.autograd import Function

from evenload.record._torch_private import DispatchMode, address, current_node, graph_task, saved
from evenload.units import human_bytes

How = Literal["save_for_backward", "attribute"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """One tensor that a function keeps."""

    name: str
    """`saved_tensors[0]`, or the attribute: `ctx.kept`."""
    how: How
    nbytes: int
    """Bytes of its storage."""
    is_input: bool
    """An argument of the function: alive anyway if the program still holds it."""
    is_output: bool
    """A result of the function. As an attribute it makes a cycle that only the garbage collector frees."""
    read: bool | None
    """Whether backward read it; None: backward has not run."""

    def __str__(self) -> str:
        origin = " (output)" if self.is_output else " (input)" if self.is_input else ""
        used = "backward has not run" if self.read is None else "read by backward" if self.read else "never read"
        return f"{self.name}{origin}: {used}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionAudit:
    """One class of functions over all its calls."""

    name: str
    source: str | None
    """`file:line` of the class."""
    calls: int
    kept: tuple[Kept, ...]
    """What a call keeps: that of the call that kept most."""

    @property
    def nbytes(self) -> int:
        """Bytes that a call keeps."""
        return sum(kept.nbytes for kept in self.kept)

    @property
    def unread(self) -> int:
        """Bytes that a call keeps and its backward never reads."""
        return sum(kept.nbytes for kept in self.kept if kept.read is False)


@dataclass(slots=True)
class _Call:
    """One call: what it keeps, by storage."""

    cls: type
    kept: dict[int, Kept]
    """By the address of the storage."""
    read: set[int] = field(default_factory=set[int])
    done: bool = False
    """Whether its backward has run."""


class Audit:
    """What was seen; made by `audit_functions`."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._by_node: dict[int, _Call] = {}

    @property
    def functions(self) -> tuple[FunctionAudit, ...]:
        """Every class of custom functions that ran, the one that keeps most for nothing first."""
        by_class: dict[type, list[_Call]] = {}
        for call in self._calls:
            by_class.setdefault(call.cls, []).append(call)
        audits = [_audit(cls, calls) for cls, calls in by_class.items()]
        return tuple(sorted(audits, key=lambda one: (-one.unread * one.calls, -one.nbytes)))

    def __str__(self) -> str:
        lines: list[str] = []
        for function in self.functions:
            place = f" ({function.source})" if function.source else ""
            calls = "1 call" if function.calls == 1 else f"{function.calls} calls"
            lines.append(f"{function.name}{place}, {calls}: keeps {human_bytes(function.nbytes)} a call")
            lines += [f"  {human_bytes(kept.nbytes):>12}  {kept}" for kept in function.kept]
            lines += [f"  {note}" for note in _notes(function)]
        return "\n".join(lines) or "no custom function ran"

    def called(self, cls: type, inputs: tuple[Any, ...], result: Any) -> None:
        """A function has been applied."""
        node = next((one.grad_fn for one in _tensors(result) if one.grad_fn is not None), None)
        if node is None or not isinstance(node, getattr(cls, "_backward_cls", ())):
            return
        # Attributes first: where a tensor is kept in both ways, the hidden one is the one to know about.
        hidden = ((f"ctx.{name}", one) for name, value in vars(node).items() for one in _tensors(value))
        found: list[tuple[str, How, Any]] = [(name, "attribute", one) for name, one in hidden]
        for number, (_, data) in enumerate(saved(node)):
            found.append((f"saved_tensors[{number}]", "save_for_backward", data))
        kept = _kept(found, given=_keys(inputs), returned=_keys(result))
        call = _Call(cls=cls, kept=kept)
        self._calls.append(call)
        self._by_node[id(node)] = call

    def ran(self, node: Any, tensors: Iterator[torch.Tensor]) -> None:
        """An operator of backward has run, on behalf of a node of the graph, and has read some tensors."""
        call = self._by_node.get(id(node))
        if call is not None and isinstance(node, getattr(call.cls, "_backward_cls", ())):
            call.done = True
            call.read.update(key for tensor in tensors if (key := _key(tensor)) in call.kept)


@contextmanager
def audit_functions() -> Generator[Audit]:
    """Watch the custom autograd functions that run inside the block, forward and backward.

    Examples:
        >>> import torch
        >>> class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * 2
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return grad * 2
        >>> with audit_functions() as audit:
        ...     Double.apply(torch.ones(4, requires_grad=True)).sum().backward()
        >>> audit.functions[0].unread
        16
    """
    audit = Audit()
    original = Function.__dict__["apply"]
    called = original.__func__

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        result = called(cls, *args, **kwargs)
        audit.called(cls, args, result)
        return result

    Function.apply = classmethod(apply)  # type: ignore[assignment]  # put back below
    try:
        with _Reads(audit.ran):
            yield audit
    finally:
        Function.apply = original


class _Reads(DispatchMode):
    """Sees the operators that backward runs."""

    def __init__(self, ran: Callable[[Any, Iterator[torch.Tensor]], None]) -> None:
        DispatchMode.__init__(self)
        self._ran = ran

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator and note what it read."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if graph_task() >= 0:
            tensors = iter(()) if _is_view(func) else _tensors((args, tuple(kwargs.values())))
            self._ran(current_node(), tensors)
        return result


_VIEWS: Final[dict[Any, bool]] = {}


def _is_view(operator: Any) -> bool:
    """Whether an operator only makes another view of its argument."""
    known = _VIEWS.get(operator)
    if known is None:
        schema = operator._schema  # noqa: SLF001  # the way to an operator's schema that PyTorch documents
        aliases = [result.alias_info for result in schema.returns]
        known = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        _VIEWS[operator] = known
    return known


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(cast("dict[Any, Any]", value).values()))
    elif isinstance(value, list | tuple | set):
        for item in cast("Iterable[Any]", value):
            yield from _tensors(item)


def _key(tensor: torch.Tensor) -> int:
    try:
        return address(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse, opaque, or without a storage
        return 0


def _keys(value: Any) -> set[int]:
    return {key for tensor in _tensors(value) if (key := _key(tensor))}


def _kept(found: Iterable[tuple[str, How, Any]], *, given: set[int], returned: set[int]) -> dict[int, Kept]:
    """What a call keeps, every storage once."""
    kept: dict[int, Kept] = {}
    for name, how, data in found:
        key = _key(data) if isinstance(data, torch.Tensor) else 0
        if key and key not in kept:
            kept[key] = Kept(
                name=name,
                how=how,
                nbytes=data.untyped_storage().nbytes(),
                is_input=key in given,
                is_output=key in returned and key not in given,
                read=None,
            )
    return kept


def _audit(cls: type, calls: list[_Call]) -> FunctionAudit:
    largest = max(calls, key=lambda call: sum(kept.nbytes for kept in call.kept.values()))
    done = [call for call in calls if call.done]
    read = {call.kept[key].name for call in done for key in call.read}
    return FunctionAudit(
        name=cls.__qualname__,
        source=_source(cls),
        calls=len(calls),
        kept=tuple(replace(kept, read=kept.name in read if done else None) for kept in largest.kept.values()),
    )


def _source(cls: type) -> str | None:
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return None


def _notes(function: FunctionAudit) -> Iterator[str]:
    if function.unread:
        names = ", ".join(kept.name for kept in function.kept if kept.read is False)
        yield f"{human_bytes(function.unread)} a call are kept and never read: do not save {names}"
    for kept in function.kept:
        if kept.how == "attribute":
            leak = "; an output there makes a cycle that only the garbage collector frees" if kept.is_output else ""
            yield (
                f"{kept.name} is hidden from PyTorch: hooks, checkpointing and the check for changes in place do not "
                f"see it{leak}: use ctx.save_for_backward"
            )
