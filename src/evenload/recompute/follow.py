"""Follows a forward operator by operator, where saved-tensor hooks alone cannot.

It takes values that pass only inside a module and the states of generators, and it checks every operator with its
arguments against the recording, so that code which depends on data is followed only as long as it goes the same way.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch

from evenload.recompute._torch_private import TorchDispatchMode, is_wrapper_type, storage_key
from evenload.recompute.aten import generator_state, is_inert
from evenload.recompute.frame import Frame, attribute
from evenload.recompute.geometry import Ref, is_plain, matches
from evenload.recompute.recording import written
from evenload.recompute.values import Source, Step
from evenload.recompute.wrappers import tensors, unwrap


class Follower(TorchDispatchMode):
    """Active while a layer runs; fills the cells of a frame that hooks cannot."""

    def __init__(self, frame: Frame, layer: torch.nn.Module, arguments: list[torch.Tensor]) -> None:
        cast("Any", super()).__init__()
        self._frame: Final = frame
        self._plan: Final = frame.plan
        self._at = 0
        self._taken: list[tuple[int, torch.Tensor]] = []
        self._shows: dict[int, int] = {}
        """Storage -> value that it shows now."""
        self._bound: set[int] = set()
        """Values from outside whose storage is known."""
        for value, source in frame.plan.outside.items():
            if source is not None:
                plain = unwrap(_given(source, layer, arguments))[0]
                if plain is not None and is_plain(plain):
                    self._bind(storage_key(plain), value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_wrapper_type, types)):
            return NotImplemented
        if is_inert(func) or self._frame.mismatch is not None:
            result = func(*args, **kwargs)
            self._hand_on(args, result)
            return result
        at = self._at
        self._at = at + 1
        step = self._plan.trace[at] if at < len(self._plan.trace) else None
        if step is None or not self._alike(step, func, args, kwargs):
            what = "the end" if step is None else f"{step.path}.{step.name}".strip(".")
            self._frame.differs(f"operator {at} is {func} with other arguments than in the recording, at {what}")
            return func(*args, **kwargs)
        if at in self._plan.from_generators and step.generator is not None:
            self._frame.cells[self._plan.from_generators[at]].fill(generator_state(step.generator))
        result = func(*args, **kwargs)
        self._note(step, written(func, args, kwargs), list(tensors(result)))
        return result

    def finish(self) -> None:
        """Hand over what was taken, when the layer has returned."""
        if self._frame.mismatch is None and self._at < len(self._plan.trace):
            self._frame.differs(f"it runs {self._at} operators instead of {len(self._plan.trace)}")
        for leaf, tensor in self._taken:
            self._frame.take(leaf, tensor)
        self._taken = []

    def _hand_on(self, args: tuple[Any, ...], result: Any) -> None:
        """On fake tensors, what waiting for a collective gives back is another tensor that stands for what came in."""
        for tensor, given in zip(tensors(result), tensors(args), strict=False):
            if is_plain(tensor) and is_plain(given) and storage_key(given) in self._shows:
                self._shows[storage_key(tensor)] = self._shows[storage_key(given)]

    def _note(self, step: Step, changed: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        for write, tensor in zip(step.writes, changed, strict=False):
            self._shows[storage_key(tensor)] = write.after
        for value, tensor in zip(step.made, results, strict=False):
            if value is not None:
                self._shows[storage_key(tensor)] = value
        for leaf, result in self._plan.from_steps.get(step.number, ()):
            self._taken.append((leaf, results[result]))

    def _alike(self, step: Step, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is the recorded one: the same operator on the same values with the same numbers."""
        if func is not step.func:
            return False
        if step.once and not step.args and args:
            return True  # an operator on something that is no strided memory: its arguments were not recorded
        if len(args) != len(step.args) or kwargs.keys() != step.kwargs.keys():
            return False
        return all(map(self._equal, step.args, args)) and all(
            self._equal(step.kwargs[name], one) for name, one in kwargs.items()
        )

    def _equal(self, recorded: Any, given: Any) -> bool:
        if isinstance(recorded, Ref):
            return isinstance(given, torch.Tensor) and self._shows_value(recorded, given)
        if isinstance(recorded, list):
            items = cast("list[Any]", recorded)
            if not isinstance(given, (list, tuple)):
                return False
            others = cast("list[Any]", given)
            return len(items) == len(others) and all(map(self._equal, items, others))
        return type(recorded) is type(given) and (recorded is given or bool(recorded == given))

    def _shows_value(self, recorded: Ref, given: torch.Tensor) -> bool:
        alike = is_plain(given) and matches(given, recorded.size, recorded.stride, recorded.dtype)
        return alike and self.shown(given, recorded.value)

    def shown(self, given: torch.Tensor, value: int) -> bool:
        """Whether a plain tensor shows a value of the recording now."""
        key = storage_key(given)
        if value in self._plan.outside and value not in self._bound:
            self._bind(key, value)
        return self._shows.get(key) == value

    def _bind(self, key: int, value: int) -> None:
        self._bound.add(value)
        self._shows[key] = value


def _given(source: Source, layer: torch.nn.Module, arguments: list[torch.Tensor]) -> torch.Tensor:
    """The argument or parameter at a source."""
    (at,) = source.at
    return arguments[cast("int", at)] if source.kind == "argument" else attribute(layer, cast("str", at))
