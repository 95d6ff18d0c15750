"""Records one forward of a layer: which operators ran on which data, and what autograd saved.

A dispatch mode sees every aten operator below autograd and autocast, with the tensors as the kernel gets them; a pair
of saved-tensor hooks sees what autograd keeps. The content of a storage is one value until somebody writes to it, which
makes the next value; views make none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from evenload.recompute._torch_private import (
    TorchDispatchMode,
    is_wrapper_type,
    kind_of,
    next_node,
    schema,
    storage_key,
)
from evenload.recompute.aten import draws, flops, is_autocast, is_inert, reads_data, reads_only_shape, unrepeatable
from evenload.recompute.geometry import Ref, geometry, is_plain, ref
from evenload.recompute.names import CallNames, ModulePath
from evenload.recompute.values import Recording, Saved, Sighting, Source, Step, Value, Write
from evenload.recompute.wrappers import strided_parts, tensors, unwrap


class Recorder(TorchDispatchMode):
    """Active while the layer runs; `finish` gives the recording."""

    def __init__(self) -> None:
        cast("Any", super()).__init__()
        self.calls = CallNames()
        """To be active while the layer runs."""
        self.path = ModulePath()
        self._values: list[Value] = []
        self._steps: list[Step] = []
        self._saved: list[Saved] = []
        self._current: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []
        self._sure: tuple[int, int] | None = None
        self._input: int | None = None

    # What is there before the layer runs

    def parameter(self, name: str, tensor: torch.Tensor) -> None:
        """Make a parameter or buffer of the layer known."""
        plain, _ = unwrap(tensor)
        if plain is not None and is_plain(plain):
            value = self._value(plain)
            value.held = True
            value.trainable = tensor.requires_grad
            _sight(value, Source("parameter", (name,)), plain)

    def argument(self, position: int, tensor: torch.Tensor) -> None:
        """Make a tensor argument of the layer known."""
        plain, _ = unwrap(tensor)
        if plain is not None and is_plain(plain):
            value = self._value(plain)
            _sight(value, Source("argument", (position,)), plain)
            if tensor.is_leaf and tensor.requires_grad:
                value.held = True  # autograd's graph holds it, to give it its gradient
            if self._input is None:
                self._input = value.number

    def seen(self, path: str, call: int, end: str, tree: Any) -> None:
        """Note the tensors that enter or leave a module: there a hook can take them."""
        for position, tensor in enumerate(tensors(tree)):
            plain, _ = unwrap(tensor)
            if plain is not None and is_plain(plain):
                source = Source("module", (path, call, end, position), self._is_late())
                _sight(self._value(plain), source, plain)

    # What the layer does

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_wrapper_type, types)):
            return NotImplemented
        if is_inert(func):
            result = func(*args, **kwargs)
            self._hand_on(args, result)
            return result
        self._is_late()
        aten, call = func.overloadpacket.__name__, self.calls.current
        step = Step(
            number=len(self._steps),
            func=func,
            args=(),
            kwargs={},
            path=self.path.current,
            name=aten if is_autocast(aten, call) else call,
            aten=aten,
            node=next_node(),
        )
        reads: dict[int, None] = {}
        try:
            step.args = tuple(self._encoded(one, reads) for one in args)
            step.kwargs = {name: self._encoded(one, reads) for name, one in kwargs.items()}
        except _NotPlainError:
            step.once = True
        draw = draws(func, args, kwargs)
        result = func(*args, **kwargs)
        if draw is not None and draw.used(result):
            step.random, step.generator = draw.state, draw.device
        step.flops = flops(func, args, kwargs, result)
        step.once = step.once or unrepeatable(func, args, kwargs)
        step.writes = tuple(self._written(step, tensor) for tensor in written(func, args, kwargs))
        step.made = tuple(self._made(step, number, tensor) for number, tensor in enumerate(tensors(result)))
        step.reads = () if reads_only_shape(func) else tuple(reads)
        self._steps.append(step)
        if reads_data(func, args):
            self.calls.read_data = True
        return result

    def pack(self, tensor: torch.Tensor) -> None:
        """Told by the saved-tensor hook of every tensor that autograd saves."""
        plain, wrappings = unwrap(tensor)
        at = None
        number = len(self._saved)
        late = self._is_late()
        holds: tuple[int, ...] = ()
        if plain is None or not is_plain(plain):
            keys = [storage_key(part) for part in strided_parts(tensor)]
            holds = tuple(self._current[key] for key in keys if key in self._current)
        else:
            value = self._value(plain)
            at = ref(value.number, plain, value.anchor)
            _sight(value, Source("pack", (number,), late), plain)
            outside = value.step is None and value.number != self._input
            if outside or isinstance(tensor, torch.nn.Parameter):
                # what nobody in the layer made stays with recomputation as without; so does a weight, which FSDP may
                # gather while the layer runs
                value.held = True
        self._saved.append(
            Saved(
                number=number,
                kind=kind_of(tensor),
                size=tuple(tensor.shape),
                stride=tensor.stride() if tensor.layout is torch.strided else None,
                dtype=tensor.dtype,
                wrappings=wrappings,
                at=at,
                node=next_node(),
                holds=holds,
            )
        )

    def finish(self, result: Any) -> Recording:
        """The recording, when the layer has returned. It holds none of autograd's graph."""
        self._is_late()
        outputs = [unwrap(tensor)[0] for tensor in tensors(result)]
        known = [tensor for tensor in outputs if tensor is not None and is_plain(tensor)]
        numbers = tuple(self._value(tensor).number for tensor in known)
        self._part_with_what_is_gone()
        for value in self._values:
            if value.tensor is not None:
                value.differentiable = value.tensor.requires_grad
                value.tensor = value.tensor.detach()
            for sighting in value.sightings:
                if sighting.tensor is not None:
                    sighting.tensor = sighting.tensor.detach()
        return Recording(
            values=self._values,
            steps=self._steps,
            saved=self._saved,
            input=self._input,
            outputs=numbers,
            sure_steps=self._sure[0] if self._sure else len(self._steps),
            sure_saves=self._sure[1] if self._sure else len(self._saved),
        )

    def _part_with_what_is_gone(self) -> None:
        """Steps that read weights which FSDP has let go of by now cannot run again until it gathers them again."""
        gone = {
            value.number
            for value in self._values
            if value.nbytes and value.tensor is not None and not value.tensor.untyped_storage().nbytes()
        }
        for step in self._steps:
            step.once = step.once or not gone.isdisjoint(step.reads)

    def _is_late(self) -> bool:
        """Whether the layer's code has looked at data by now."""
        if self._sure is None and self.calls.read_data:
            self._sure = len(self._steps), len(self._saved)
        return self._sure is not None

    # Values

    def _value(self, tensor: torch.Tensor) -> Value:
        """The value that a plain tensor shows now."""
        key = storage_key(tensor)
        number = self._current.get(key)
        if number is None:
            self._storages.append(tensor.untyped_storage())  # held: its address must not be used again
            number = self._current[key] = self._new(tensor)
        return self._values[number]

    def _new(self, tensor: torch.Tensor, step: int | None = None) -> int:
        number = len(self._values)
        self._values.append(
            Value(
                number=number,
                nbytes=tensor.untyped_storage().nbytes(),
                device=tensor.device,
                anchor=geometry(tensor),
                tensor=tensor,
                step=step,
            )
        )
        return number

    def _written(self, step: Step, tensor: torch.Tensor) -> Write:
        before = self._value(tensor)
        before.overwritten = True
        base = before.tensor if before.tensor is not None else tensor
        before.differentiable = base.requires_grad  # before autograd learns of the write
        after = self._new(base, step.number)
        before.tensor = None
        self._current[storage_key(tensor)] = after
        return Write(before=before.number, after=after)

    def _made(self, step: Step, result: int, tensor: torch.Tensor) -> int | None:
        if not is_plain(tensor):
            step.once = True
            return None
        key = storage_key(tensor)
        if key in self._current:
            value = self._values[self._current[key]]
        else:
            self._storages.append(tensor.untyped_storage())
            value = self._values[self._new(tensor, step.number)]
            self._current[key] = value.number
        _sight(value, Source("step", (step.number, result)), tensor)
        return value.number if value.step == step.number and not _wrote(step, value.number) else None

    def _hand_on(self, args: tuple[Any, ...], result: Any) -> None:
        """Waiting for a collective gives back what came in; on fake tensors it gives another that stands for it."""
        for tensor, given in zip(tensors(result), tensors(args), strict=False):
            if is_plain(tensor) and is_plain(given) and storage_key(tensor) not in self._current:
                self._storages.append(tensor.untyped_storage())
                self._current[storage_key(tensor)] = self._value(given).number

    def _encoded(self, argument: Any, reads: dict[int, None]) -> Any:
        """An argument with tensors turned into what they show."""
        if isinstance(argument, torch.Tensor):
            if not is_plain(argument):
                raise _NotPlainError
            value = self._value(argument)
            reads[value.number] = None
            return ref(value.number, argument, value.anchor)
        if isinstance(argument, (list, tuple)):
            return [self._encoded(one, reads) for one in cast("list[Any]", argument)]
        return argument


def _sight(value: Value, source: Source, tensor: torch.Tensor) -> None:
    value.sightings.append(Sighting(source, geometry(tensor), tensor))


class _NotPlainError(Exception):
    """An argument is no strided memory."""


def _wrote(step: Step, value: int) -> bool:
    return any(write.after == value for write in step.writes)


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors that a call changes in place, each storage once."""
    if not schema(func).is_mutable:
        return []
    found: dict[int, torch.Tensor] = {}
    for position, argument in enumerate(schema(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in tensors(given):
                if is_plain(tensor):
                    found.setdefault(storage_key(tensor), tensor)
    return list(found.values())


def refs(tree: Any, found: Callable[[Ref], None]) -> None:
    """Visit the tensors in the arguments of a step."""
    if isinstance(tree, Ref):
        found(tree)
    elif isinstance(tree, (list, tuple)):
        for item in cast("list[Any]", tree):
            refs(item, found)
    elif isinstance(tree, dict):
        for item in cast("dict[str, Any]", tree).values():
            refs(item, found)
