"""Custom operators that say which arguments their backward needs, and keep nothing else.

The model is MindSpore's cell with a `bprop`: `forward(*inputs)` computes, `bprop(*inputs, out, dout)` returns the
gradients of the inputs, and `used_bprop_inputs` lists the arguments of `bprop` that are kept from forward until then.
A custom operator often needs none of them, and keeping its inputs is then memory for nothing.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, Final, cast

import torch
from torch import nn
from torch.autograd import Function

from evenload.errors import EvenloadError, shown
from evenload.recompute.nested import emptied, filled, holes, like
from evenload.units import plural


class CustomOperator(nn.Module):
    """A module with a backward of its own. Subclasses define `forward` and `bprop`.

    `forward(self, *inputs)` returns a tensor or a tuple; it runs without gradients. `bprop(self, *inputs, out, dout)`
    returns the gradient of every input: a tuple, or the gradient itself where there is one input. `None` is no
    gradient. With several outputs, `out` and `dout` are tuples.

    `used_bprop_inputs` says what is kept for `bprop`, by position in its arguments: with n inputs, 0 to n - 1 are the
    inputs, n is `out` and n + 1 is `dout`.

    - not set (None): all inputs and `out` are kept;
    - `[]`: nothing is kept;
    - otherwise: what is listed. Everything else arrives as `None`. `dout` always arrives, listed or not.

    What is kept is saved through autograd: changing it in place before backward is an error, hooks on saved tensors and
    checkpointing see it, and a saved output makes no reference cycle.

    A parameter must be an input to get a gradient: `self.weight` inside `forward` is only a value there, so a
    parameter of the operator that is trained and not passed in is refused. Arguments with a default count, given or
    not, so that positions mean the same in every call. Under autocast, `forward` and `bprop` get the tensors as they
    are passed and both run under it. `torch.func` and `vmap` see the operator as they see any other.

    Examples:
        >>> class Double(CustomOperator):
        ...     used_bprop_inputs = []
        ...
        ...     def forward(self, x):
        ...         return x * 2
        ...
        ...     def bprop(self, x, out, dout):
        ...         return dout * 2
        >>> x = torch.ones(3, requires_grad=True)
        >>> Double()(x).sum().backward()
        >>> x.grad
        tensor([2., 2., 2.])
    """

    used_bprop_inputs: Sequence[int] | None = None
    """Positions of the arguments of `bprop` that are kept; None: all. Set it in the class or in `__init__`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        forward = getattr(cls, _FORWARD)
        if forward is not nn.Module.forward and not hasattr(forward, _RECORDED):  # of the class, or of a plain mixin
            setattr(cls, _FORWARD, _recorded(forward))


_FORWARD: Final = "forward"
_BPROP: Final = "bprop"
_RECORDED: Final = "_evenload_recorded"
"""Attribute of a forward that goes through autograd."""
_CHECKED: Final = "_evenload_checked"
"""Attribute of an operator that is set once its definition has been found right."""


class _Running(threading.local):
    """The operators whose forward runs in this thread: `super().forward` then just computes."""

    def __init__(self) -> None:
        self.operators: list[CustomOperator] = []

    def has(self, operator: CustomOperator) -> bool:
        """Whether it is one of them."""
        return any(one is operator for one in self.operators)


_running: Final = _Running()


class _Call:
    """One call of an operator: what autograd hands through as it is."""

    def __init__(
        self, operator: CustomOperator, forward: Callable[..., Any], shape: tuple[Any, ...], kept: frozenset[int]
    ) -> None:
        self.operator, self.forward, self.shape, self.kept = operator, forward, shape, kept
        self.returned: Any = None
        """The tuple or list that forward returned, emptied; None: it was one tensor."""
        self.changed: list[int] = []
        """Tensors among the inputs, by number, that forward changed in place."""


def _recorded(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that goes through autograd as one operator."""
    signature = inspect.signature(forward)

    @wraps(forward)
    def recorded(self: CustomOperator, *inputs: Any, **named: Any) -> Any:
        if _running.has(self) or not torch.is_grad_enabled():
            return forward(self, *inputs, **named)
        try:
            bound = signature.bind(self, *inputs, **named)
        except TypeError:
            return forward(self, *inputs, **named)  # says in Python's own words what is missing
        arguments = _positional(bound)
        name = type(self).__name__
        kept = kept_positions(self.used_bprop_inputs, len(arguments), name=name)
        tensors, shape = emptied(arguments)
        if getattr(self, _CHECKED, None) != len(arguments):
            _check(self, len(arguments), tensors)
            setattr(self, _CHECKED, len(arguments))
        call = _Call(self, forward, shape, kept)
        outputs = _apply(call, *tensors)
        return _like_returned(call.returned, outputs)

    setattr(recorded, _RECORDED, True)
    return recorded


def kept_positions(used: Any, inputs: int, *, name: str = "the operator") -> frozenset[int]:
    """Positions that `used_bprop_inputs` names for an operator of some inputs, `dout` left out.

    Raises:
        EvenloadError: it is no list of integers, or names a position that `bprop` does not have.
    """
    if used is None:
        return frozenset(range(inputs + 1))
    if not isinstance(used, list | tuple):
        raise EvenloadError(
            f"used_bprop_inputs of {name} is {shown(used)}, not a list of positions", fix="write [] to keep nothing"
        )
    positions = cast("Sequence[Any]", used)
    for number, position in enumerate(positions):
        where = f"used_bprop_inputs[{number}]"
        if type(position) is not int:
            raise EvenloadError(f"{shown(position)} is no position of an argument of bprop", where=where)
        if not 0 <= position <= inputs + 1:
            raise EvenloadError(
                f"bprop of {name} has no argument {position}: it gets {plural(inputs, 'input')}, out and dout",
                where=where,
                fix=f"use 0 to {inputs - 1} for inputs, {inputs} for out, {inputs + 1} for dout" if inputs else None,
            )
    return frozenset(positions) - {inputs + 1}


def _positional(bound: inspect.BoundArguments) -> tuple[Any, ...]:
    """All arguments by position, as `bprop` gets them."""
    if bound.kwargs:
        names = ", ".join(bound.kwargs)
        raise EvenloadError(
            f"{names} can only be given by name, and bprop gets its arguments by position",
            fix="let forward take them by position",
        )
    bound.apply_defaults()  # positions mean the same whether a default is given or not
    return bound.args[1:]


def _check(operator: CustomOperator, inputs: int, tensors: Sequence[torch.Tensor]) -> None:
    """The mistakes in a definition that would give wrong gradients, or an error only in backward."""
    name = type(operator).__name__
    bprop = getattr(operator, _BPROP, None)
    if not callable(bprop):
        raise EvenloadError(f"{name} has no bprop", fix="define bprop(self, *inputs, out, dout) beside forward")
    try:
        inspect.signature(bprop).bind(*[None] * (inputs + 2))
    except TypeError:
        raise EvenloadError(
            f"bprop of {name} does not take what it gets: {plural(inputs, 'input')}, out and dout, by position",
            fix="define bprop(self, *inputs, out, dout) with the inputs of forward, those with a default too",
        ) from None
    missing = {id(parameter): path for path, parameter in operator.named_parameters() if parameter.requires_grad}
    if missing and not _reach(tensors, missing):
        path = next(iter(missing.values()))
        raise EvenloadError(
            f"{path} is a parameter of {name} and no input of it, so it would get no gradient",
            fix=f"pass it in: operator(x, operator.{path}), or set its requires_grad to False",
        )


def _reach(tensors: Sequence[torch.Tensor], missing: dict[int, str], *, most: int = 256) -> bool:
    """Whether all parameters are inputs, or what some inputs are made of; found ones are taken out of `missing`."""
    for tensor in tensors:
        missing.pop(id(tensor), None)
    pending = deque(tensor.grad_fn for tensor in tensors)
    seen: set[Any] = set()
    while pending and missing:
        node = pending.popleft()
        if node is None or node in seen:
            continue
        if len(seen) == most:  # too large a graph to tell
            return True
        seen.add(node)
        missing.pop(id(getattr(node, "variable", None)), None)
        pending.extend(following for following, _ in node.next_functions)
    return not missing


class _Operator(Function):
    """One call of a custom operator in the backward graph."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, *tensors: torch.Tensor) -> Any:
        before = [_version(tensor) for tensor in tensors]
        _running.operators.append(call.operator)
        try:
            out = call.forward(call.operator, *filled(call.shape, iter(tensors)))
        finally:
            _running.operators.pop()
        call.changed = [number for number, tensor in enumerate(tensors) if _version(tensor) != before[number]]
        outputs = _outputs(call.operator, out)
        _check_changed(call, tensors, outputs)
        call.returned = _container(out, outputs)
        return tuple(outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        call, *tensors = inputs
        if call.changed:
            ctx.mark_dirty(*[tensors[number] for number in call.changed])
        ctx.operator, ctx.several = call.operator, call.returned is not None
        ctx.holes = [holes(part) for part in call.shape]
        ctx.autocast = _autocast_of(tensors)
        _keep(ctx, call, tensors, output)

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        saved = iter(ctx.saved_tensors)  # read once: checkpointing allows no more
        inputs = [filled(part, saved) for part in ctx.kept_inputs]
        out = None if ctx.kept_outputs is None else filled(ctx.kept_outputs, saved)
        dout = douts if ctx.several else douts[0]
        with ctx.autocast():
            gradients = ctx.operator.bprop(*inputs, out, dout)
        return None, *_gradients(ctx, gradients)


_apply: Final[Callable[..., Any]] = cast("Any", _Operator).apply


def _version(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed; None: tensors made in inference mode do not count, and cannot be changed here."""
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001  # documented in the notes on autograd


def _autocast_of(tensors: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """What puts the autocast of forward in force again: backward runs outside of it, in a thread of its own."""
    device = tensors[0].device.type if tensors else "cpu"
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return partial(torch.autocast, device, dtype=dtype, enabled=enabled)


def _outputs(operator: CustomOperator, out: Any) -> list[Any]:
    name = type(operator).__name__
    outputs = list(cast("Sequence[Any]", out)) if isinstance(out, list | tuple) else [out]
    if not any(isinstance(one, torch.Tensor) for one in outputs):
        raise EvenloadError(
            f"forward of {name} returned {shown(cast('object', out))}, and no tensor",
            fix="return a tensor or a tuple with tensors",
        )
    if any(not isinstance(one, torch.Tensor) and emptied(one)[0] for one in outputs):
        raise EvenloadError(
            f"forward of {name} returned tensors inside of other values, and they would get no gradient",
            fix="return a tensor or a flat tuple of tensors",
        )
    return outputs


def _container(out: Any, outputs: Sequence[Any]) -> Any:
    """The tuple or list that was returned, without what is in it; None: it was one tensor."""
    if not isinstance(out, list | tuple):
        return None
    return [None] * len(outputs) if isinstance(out, list) else like(out, [None] * len(outputs))


def _like_returned(returned: Any, outputs: tuple[Any, ...]) -> Any:
    """Outputs of autograd as forward returned them: a tensor, a list or a tuple of its class."""
    if returned is None:
        return outputs[0]
    return list(outputs) if isinstance(returned, list) else like(returned, list(outputs))


def _check_changed(call: _Call, tensors: Sequence[torch.Tensor], outputs: Sequence[Any]) -> None:
    """Inputs that forward changed in place and that are no output would get wrong gradients."""
    for number in call.changed:
        if not any(one is tensors[number] for one in outputs):
            raise EvenloadError(
                f"forward of {type(call.operator).__name__} changed an input in place and did not return it",
                fix="return the changed input, or change a copy",
            )


def _keep(ctx: Any, call: _Call, tensors: Sequence[torch.Tensor], outputs: Sequence[Any]) -> None:
    """Save what is listed, through autograd; of the rest nothing stays."""
    kept: list[Any] = []
    saved: list[torch.Tensor] = []
    remaining = iter(tensors)
    for position, part in enumerate(call.shape):
        of_part = [next(remaining) for _ in range(holes(part))]
        kept.append(part if position in call.kept else None)
        saved += of_part if position in call.kept else []
    ctx.kept_inputs, ctx.kept_outputs = kept, None
    if len(call.shape) in call.kept:
        found, ctx.kept_outputs = emptied(tuple(outputs) if ctx.several else outputs[0])
        saved += found
    ctx.save_for_backward(*saved)


def _gradients(ctx: Any, gradients: Any) -> list[Any]:
    """The gradient of every tensor among the inputs, in their order."""
    name, inputs = type(ctx.operator).__name__, len(ctx.holes)
    several = isinstance(gradients, list | tuple)
    given = list(cast("Sequence[Any]", gradients)) if several else [gradients]
    if len(given) != inputs:
        raise EvenloadError(
            f"bprop of {name} returned {plural(len(given), 'gradient')} for {plural(inputs, 'input')}",
            fix="return a tuple with one gradient for every input; None is no gradient",
        )
    found: list[Any] = []
    for position, (count, gradient) in enumerate(zip(ctx.holes, given, strict=True)):
        found += _of_input(count, gradient, f"bprop of {name}, gradient of input {position}")
    return found


def _of_input(count: int, gradient: Any, where: str) -> list[Any]:
    """The gradients of the tensors of one input."""
    if gradient is None or count == 0:
        return [None] * count
    tensors, _ = emptied(gradient)
    if not tensors:
        raise EvenloadError(f"{shown(gradient)} is no tensor", where=where, fix="return a tensor; None is no gradient")
    if len(tensors) != count:
        raise EvenloadError(f"{plural(len(tensors), 'gradient')} for {plural(count, 'tensor')}", where=where)
    return tensors
