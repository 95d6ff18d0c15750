"""What stands in the place of a layer's `forward` while the layer is recomputed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import update_wrapper
from types import MethodType
from typing import Any, Final, cast

import torch

from evenload.errors import EvenloadError
from evenload.recompute.engine import run
from evenload.recompute.state import LayerState

_run: Final[Callable[..., Any]] = cast("Any", torch.compiler).disable(
    run, reason="evenload recomputes this layer; evenload.recompute.selective_checkpoint does so in compiled blocks"
)


class StandIn:
    """Stands in for a layer's `forward`.

    A copy of the layer (`copy.deepcopy`, for an average of weights) gets a stand-in of its own; a pickled layer is
    restored without.
    """

    def __init__(self, state: LayerState, own: Callable[..., Any] | None, *, copied: bool = False) -> None:
        self._forward: Callable[..., Any] = own or MethodType(type(state.layer).forward, state.layer)
        update_wrapper(self, self._forward)
        self.state = state
        self.copied: Final = copied
        """It came with a copy of the layer, so that no handle takes it off."""
        self._own: Final = own
        self._removed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, recomputed or, when this was removed, as it is."""
        if self._removed:
            return self._forward(*args, **kwargs)
        return _run(self.state, self._forward, args, kwargs)

    def remove(self) -> None:
        """Give the layer its own forward back. Who wrapped this stand-in meanwhile goes on through it to that."""
        self._removed = True
        held = self.state.layer.__dict__
        if held.get("forward") is self:
            del held["forward"]
            if self._own is not None:
                held["forward"] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        layer = copy.deepcopy(self.state.layer, memo)
        return StandIn(self.state.of_copy(layer), copy.deepcopy(self._own, memo), copied=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_forward, (self.state.layer, self._own)


def put_on(state: LayerState) -> StandIn:
    """Put a stand-in on a layer, in the place of one that came with a copy of it."""
    there = stand_in(state.layer)
    if there is not None:
        there.remove()
    made = StandIn(state, state.layer.__dict__.get("forward"))
    state.layer.__dict__["forward"] = made
    return made


def stand_in(layer: torch.nn.Module) -> StandIn | None:
    """What stands in for a layer's forward now, if anything."""
    found = layer.__dict__.get("forward")
    return found if isinstance(found, StandIn) else None


def require_none(layer: torch.nn.Module, name: str, within: torch.nn.Module | None = None) -> None:
    """Raise if a layer, something in it, or something that it lies in is recomputed already.

    Args:
        layer: the layer.
        name: what to call it.
        within: the model that it belongs to.
    """
    there = list(filter(_is_taken, layer.modules()))
    if not there and within is not None:
        there = [one for one in filter(_is_taken, within.modules()) if any(inner is layer for inner in one.modules())]
    if there:
        found = stand_in(there[0])
        where = "" if found is None or found.state.layer is layer else f", as part of {found.state.name!r} or with it"
        raise EvenloadError(
            f"layer {name!r} is recomputed already{where}", fix="call `remove()` on its handle before applying another"
        )


def _is_taken(module: torch.nn.Module) -> bool:
    found = stand_in(module)
    return found is not None and not found.copied


def _own_forward(layer: torch.nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
    return own or MethodType(type(layer).forward, layer)
