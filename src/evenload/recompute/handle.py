"""`apply`: puts the engine round the layers of a model, and the handle that takes it off again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import update_wrapper
from types import MethodType
from typing import Any, Final, Self, cast

import torch

from evenload.errors import EvenloadError
from evenload.plan.patterns import compile_pattern
from evenload.plan.policy import LayerPolicy, Policy
from evenload.recompute.engine import LayerState, run
from evenload.recompute.layers import find_layers


class Handle:
    """Recomputation on the layers of one model.

    `remove` ends it; as a context manager it ends with the block.
    """

    def __init__(self, states: list[LayerState]) -> None:
        self._states: Final = states
        for state in states:
            state.layer.__dict__["forward"] = _Forward(state)

    def remove(self) -> None:
        """Give every layer its own forward back. What was saved for a backward that is still to come stays good."""
        for state in self._states:
            mine = state.layer.__dict__.get("forward")
            if isinstance(mine, _Forward) and mine.state is state:
                del state.layer.__dict__["forward"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Forward:
    """Stands in for a layer's `forward`.

    A copy of the layer (`copy.deepcopy`, for an average of weights) gets a stand-in of its own; a pickled layer is
    restored without.
    """

    def __init__(self, state: LayerState) -> None:
        self.state = state
        self._forward: Callable[..., Any] = MethodType(type(state.layer).forward, state.layer)
        update_wrapper(self, self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run(self.state, self._forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        layer = copy.deepcopy(self.state.layer, memo)
        return _Forward(LayerState(layer=layer, name=self.state.name, policy=self.state.policy))

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain_forward, (self.state.layer,)


def _plain_forward(layer: torch.nn.Module) -> Callable[..., Any]:
    return MethodType(type(layer).forward, layer)


def apply(
    module: torch.nn.Module,
    policy: Policy | LayerPolicy | Mapping[str, Any] | Iterable[str] | None = None,
    *,
    select: Iterable[str] = (),
    layers: str | Iterable[str] | None = None,
) -> Handle:
    r"""Recompute operators of a model's repeated layers in backward instead of keeping their results.

    Args:
        module: the model; neither its structure nor its `state_dict` changes.
        policy: what is recomputed on which layer: a `Policy`, a `LayerPolicy` or patterns for all layers, or a mapping
            of patterns to the numbers of the layers.
        select: patterns for all layers, in the place of `policy`.
        layers: path of the container that holds the layers, where it is not obvious.

    Raises:
        EvenloadError: a pattern cannot be read, the policy names a layer that the model does not have, or the layers
            cannot be found.

    Examples:
        >>> handle = apply(model, select=[r"mlp\.mul", r"mlp\.act_fn\.silu"])  # doctest: +SKIP
        >>> handle.remove()  # doctest: +SKIP
    """
    named = find_layers(module, layers)
    policies = _policies(policy if policy is not None else list(select), len(named))
    for name, layer in named:
        if isinstance(layer.__dict__.get("forward"), _Forward):
            raise EvenloadError(
                f"layer {name!r} is recomputed already", fix="call `remove()` on its handle before applying another"
            )
    return Handle(
        [LayerState(layer=layer, name=name, policy=of) for (name, layer), of in zip(named, policies, strict=True)]
    )


def _policies(policy: Any, count: int) -> list[LayerPolicy]:
    """What is in force on each layer."""
    if isinstance(policy, LayerPolicy):
        return [policy] * count
    if isinstance(policy, str):
        raise EvenloadError("the policy is one text", where="$.policy", fix=f"write a list: [{policy!r}]")
    if isinstance(policy, Mapping):
        everything = range(count)
        chosen = cast("Mapping[str, Any]", policy)
        policy = Policy(select={pattern: _layers(pattern, on, everything) for pattern, on in chosen.items()})
    if isinstance(policy, Policy):
        _require_layers(policy, count)
        return [policy.for_layer(layer) for layer in range(count)]
    patterns = tuple(policy)
    for pattern in patterns:
        compile_pattern(pattern)
    return [LayerPolicy(select=patterns)] * count


def _layers(pattern: str, on: Any, everything: range) -> frozenset[int]:
    where = f"$.policy[{pattern!r}]"
    if isinstance(on, bool):
        return frozenset(everything if on else ())
    if isinstance(on, (str, int)) or not isinstance(on, Iterable):
        raise EvenloadError(
            f"{on!r} names no layers", where=where, fix="write true, or the numbers of the layers: [0, 1]"
        )
    numbers = list(cast("Iterable[Any]", on))
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool):
            raise EvenloadError(f"{number!r} is no layer", where=where, fix="count layers from 0")
    return frozenset(numbers)


def _require_layers(policy: Policy, count: int) -> None:
    """Every pattern can be read, and every layer that is named exists."""
    groups = {
        "select": policy.select,
        "comm": policy.comm,
        "select_exclude": policy.select_exclude,
        "comm_exclude": policy.comm_exclude,
    }
    named = [("full", policy.full)]
    for name, patterns in groups.items():
        for pattern, on in patterns.items():
            compile_pattern(pattern)
            named.append((f"{name}[{pattern!r}]", on))
    for where, on in named:
        beyond = sorted(layer for layer in on if not 0 <= layer < count)
        if beyond:
            raise EvenloadError(
                f"the policy names layer {beyond[-1]}, but the model has {count} layers",
                where=f"$.policy.{where}",
                fix=f"layers count from 0 to {count - 1}",
            )
