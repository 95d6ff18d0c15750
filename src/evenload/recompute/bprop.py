"""Custom operators that say which arguments their backward needs, and keep nothing else.

The model is MindSpore's cell with a `bprop`: `forward(*inputs)` computes, `bprop(*inputs, out, dout)` returns the
gradients of the inputs, and `used_bprop_inputs` lists the arguments of `bprop` that are kept from forward until then.
A custom operator often needs none of them, and keeping its inputs is then memory for nothing.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final, cast

import torch
from torch import nn
from torch.autograd import Function

from evenload.errors import EvenloadError, shown


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
    parameter of the operator that is trained and not passed in is refused. Under autocast, `forward` and `bprop` get
    the tensors as they are passed: nothing is cast for them.

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
        if _FORWARD in vars(cls):
            setattr(cls, _FORWARD, _recorded(vars(cls)[_FORWARD]))


_FORWARD: Final = "forward"
_BPROP: Final = "bprop"
_RUNNING: Final = "_evenload_running"
"""Attribute of an operator that is set while its forward runs: `super().forward` then just computes."""
_CHECKED: Final = "_evenload_checked"
"""Attribute of an operator that is set once its definition has been found right."""


def _recorded(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that goes through autograd as one operator."""

    @wraps(forward)
    def recorded(self: CustomOperator, *inputs: Any, **named: Any) -> Any:
        if getattr(self, _RUNNING, False) or not torch.is_grad_enabled():
            return forward(self, *inputs, **named)
        arguments = _positional(forward, self, inputs, named)
        kept = kept_positions(self.used_bprop_inputs, len(arguments), name=type(self).__name__)
        tensors, shape = _flatten(arguments)
        if not getattr(self, _CHECKED, False):
            _check(self, tensors)
            setattr(self, _CHECKED, True)
        return _apply(self, forward, shape, kept, *tensors)

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
                f"bprop of {name} has no argument {position}: it gets {_count(inputs, 'input')}, out and dout",
                where=where,
                fix=f"use 0 to {inputs - 1} for inputs, {inputs} for out, {inputs + 1} for dout" if inputs else None,
            )
    return frozenset(positions) - {inputs + 1}


def _positional(
    forward: Callable[..., Any], operator: CustomOperator, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, ...]:
    """All arguments by position, as `bprop` gets them."""
    if not named:
        return inputs
    bound = inspect.signature(forward).bind(operator, *inputs, **named)
    bound.apply_defaults()
    if bound.kwargs:
        names = ", ".join(bound.kwargs)
        raise EvenloadError(
            f"{names} can only be given by name, and bprop gets its arguments by position",
            fix="let forward take them by position",
        )
    return bound.args[1:]


class _Hole:
    """Stands for a tensor in arguments whose tensors have been taken out."""


_HOLE: Final = _Hole()


def _flatten(value: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors in nested tuples, lists and dictionaries, and the same with holes in their places."""
    tensors: list[torch.Tensor] = []
    return tensors, _take(value, tensors)


def _take(part: Any, tensors: list[torch.Tensor]) -> Any:
    # No function inside a function: one that calls itself is a cycle, and would hold the tensors until it is collected.
    if isinstance(part, torch.Tensor):
        tensors.append(part)
        return _HOLE
    if isinstance(part, list):
        return [_take(item, tensors) for item in cast("list[Any]", part)]
    if isinstance(part, tuple):
        return _like(part, [_take(item, tensors) for item in cast("tuple[Any, ...]", part)])
    if isinstance(part, dict):
        return {key: _take(item, tensors) for key, item in cast("dict[Any, Any]", part).items()}
    return part


def _like(part: Any, items: list[Any]) -> Any:
    """A tuple of the same class."""
    return type(part)(*items) if hasattr(part, "_fields") else tuple(items)


def _fill(shape: Any, tensors: Any) -> Any:
    """The value with tensors, taken one by one, in the places of the holes."""
    if shape is _HOLE:
        return next(tensors)
    if isinstance(shape, list):
        return [_fill(item, tensors) for item in cast("list[Any]", shape)]
    if isinstance(shape, tuple):
        return _like(shape, [_fill(item, tensors) for item in cast("tuple[Any, ...]", shape)])
    if isinstance(shape, dict):
        return {key: _fill(item, tensors) for key, item in cast("dict[Any, Any]", shape).items()}
    return shape


def _check(operator: CustomOperator, tensors: Sequence[torch.Tensor]) -> None:
    """The mistakes in a definition that would give wrong gradients, or an error only in backward."""
    name = type(operator).__name__
    if not callable(getattr(operator, _BPROP, None)):
        raise EvenloadError(f"{name} has no bprop", fix="define bprop(self, *inputs, out, dout) beside forward")
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

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        operator, forward, shape, kept, *tensors = arguments
        versions = [tensor._version for tensor in tensors]  # noqa: SLF001  # documented in the notes on autograd
        inputs = _fill(shape, iter(tensors))
        setattr(operator, _RUNNING, True)
        try:
            out = forward(operator, *inputs)
        finally:
            setattr(operator, _RUNNING, False)
        outputs = _outputs(operator, out)
        changed = [tensor for tensor, version in zip(tensors, versions, strict=True) if tensor._version != version]  # noqa: SLF001
        _mark_changed(ctx, operator, changed, outputs)
        ctx.operator, ctx.several, ctx.inputs = operator, isinstance(out, list | tuple), len(inputs)
        _keep(ctx, inputs, outputs, kept)
        ctx.shape = shape
        return tuple(outputs) if ctx.several else out

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        saved = iter(ctx.saved_tensors)  # read once: checkpointing allows no more
        inputs = [_fill(part, saved) for part in ctx.kept_inputs]
        out = None if ctx.kept_outputs is None else _fill(ctx.kept_outputs, saved)
        dout = douts if ctx.several else douts[0]
        gradients = ctx.operator.bprop(*inputs, out, dout)
        return None, None, None, None, *_gradients(ctx, gradients)


_apply: Final[Callable[..., Any]] = cast("Any", _Operator).apply


def _outputs(operator: CustomOperator, out: Any) -> list[Any]:
    outputs = list(cast("Sequence[Any]", out)) if isinstance(out, list | tuple) else [out]
    if not any(isinstance(one, torch.Tensor) for one in outputs):
        raise EvenloadError(
            f"forward of {type(operator).__name__} returned {shown(cast('object', out))}, and no tensor",
            fix="return a tensor or a tuple with tensors",
        )
    return outputs


def _mark_changed(ctx: Any, operator: CustomOperator, changed: Sequence[torch.Tensor], outputs: Sequence[Any]) -> None:
    """Tell autograd of inputs that forward changed in place; those that are no output would get wrong gradients."""
    for tensor in changed:
        if not any(one is tensor for one in outputs):
            raise EvenloadError(
                f"forward of {type(operator).__name__} changed an input in place and did not return it",
                fix="return the changed input, or change a copy",
            )
    if changed:
        ctx.mark_dirty(*changed)


def _keep(ctx: Any, inputs: Sequence[Any], outputs: Sequence[Any], kept: frozenset[int]) -> None:
    """Save what is listed, through autograd; of the rest not even the shape stays."""
    tensors: list[torch.Tensor] = []
    shapes: list[Any] = []
    for position, one in enumerate(inputs):
        if position in kept:
            found, shape = _flatten(one)
            tensors += found
            shapes.append(shape)
        else:
            shapes.append(None)
    ctx.kept_inputs, ctx.kept_outputs = shapes, None
    if len(inputs) in kept:
        found, shape = _flatten(tuple(outputs) if ctx.several else outputs[0])
        tensors += found
        ctx.kept_outputs = shape
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, gradients: Any) -> list[Any]:
    """The gradient of every tensor among the inputs, in their order."""
    name = type(ctx.operator).__name__
    several = isinstance(gradients, list | tuple)
    given = list(cast("Sequence[Any]", gradients)) if several else [gradients]
    if len(given) != ctx.inputs:
        raise EvenloadError(
            f"bprop of {name} returned {_count(len(given), 'gradient')} for {_count(ctx.inputs, 'input')}",
            fix="return a tuple with one gradient for every input; None is no gradient",
        )
    found: list[Any] = []
    for position, (shape, gradient) in enumerate(zip(ctx.shape, given, strict=True)):
        _match(found, shape, gradient, f"bprop of {name}, gradient of input {position}")
    return found


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _match(found: list[Any], shape: Any, gradient: Any, where: str) -> None:
    """Append the gradients of the tensors of one input."""
    holes = _holes(shape)
    if gradient is None:
        found += [None] * holes
        return
    tensors, _ = _flatten(gradient)
    if holes == 0:
        return
    if len(tensors) != holes:
        raise EvenloadError(f"{len(tensors)} gradients for {holes} tensors", where=where)
    found += tensors


def _holes(shape: Any) -> int:
    if shape is _HOLE:
        return 1
    if isinstance(shape, list | tuple):
        return sum(_holes(item) for item in cast("Sequence[Any]", shape))
    return sum(_holes(item) for item in cast("dict[Any, Any]", shape).values()) if isinstance(shape, dict) else 0
