"""What a model's own loop does between its layers, at full depth: forward with stand-ins that return what layers do.

A run of few layers stands for one of all only where the model treats the others alike. Whether it does shows in a
forward in which no layer runs, but for one of every kind: each returns tensors like those that the first one like it
returned. Such a walk over all layers costs little more than what the model does outside of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, cast
from weakref import ref

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from evenload.errors import EvenloadError
from evenload.record._torch_private import DispatchMode
from evenload.record.layers import Layers
from evenload.record.tensors import components, flat, is_wrapper
from evenload.simulate.composition import NO_LAYER, Reduction, compose

TAIL: Final = 0
KEPT: Final = -1
_LOOP: Final = 2
"""Calls of layers that a result lives through because the variable of a loop holds it."""
_TELLING: Final = (bool, str, type(None))
"""Classes of arguments that tell calls of a layer apart; numbers may count the layers."""


@dataclass(kw_only=True, eq=False)
class Walk:
    """One forward, and what it did between calls of layers."""

    calls: list[int] = field(default_factory=list[int])
    """Numbers of the layers, in the order in which they were called."""
    asked: list[object] = field(default_factory=list[object])
    """[call]: what the layer was called with."""
    gaps: list[list[object]] = field(default_factory=lambda: [[]])
    """[call + 1]: operators that ran after it; the first entry: before all of them."""
    lives: list[int] = field(default_factory=list[int])
    """[call]: how many calls later what it returned was gone; `TAIL`: after the last one; `KEPT`: not even then."""


def odd_layer(reduced: Reduction, few: Walk, full: Walk) -> int | None:
    """A layer that the model treats in another way than the traced one that stands for it; None: there is none.

    Args:
        reduced: which layers stand for all.
        few: the walk over the traced layers.
        full: the walk over all.
    """
    try:
        expected = compose([NO_LAYER, *few.calls, NO_LAYER], reduced)
    except EvenloadError:
        return 0
    pieces, layers = expected.piece.tolist()[1:-1], expected.layer.tolist()[1:-1]
    for wanted, called in zip(layers, full.calls, strict=False):
        if wanted != called:
            return called
    if len(layers) != len(full.calls):
        return layers[len(full.calls)] if len(full.calls) < len(layers) else full.calls[len(layers)]
    if full.gaps[0] != few.gaps[0]:
        return 0
    for position, piece in enumerate(pieces):
        seen = (full.asked[position], full.gaps[position + 1])
        if seen != (few.asked[piece - 1], few.gaps[piece]) or not _lives_like(reduced, few, piece - 1, full, position):
            return layers[position]
    return None


def _lives_like(reduced: Reduction, few: Walk, call: int, full: Walk, position: int) -> bool:
    """Whether what a layer returned is there as long as what the one that stands for it did.

    Of the traced layers that stand for the same ones, the later may be so late that their results see the end.
    """
    same = {few.calls[call], *(twin for pair in reduced.twins if few.calls[call] in pair for twin in pair)}
    seen = {few.lives[one] for one, layer in enumerate(few.calls) if layer in same}
    life = full.lives[position]
    if life == TAIL and len(full.calls) - position > _LOOP:
        return seen == {TAIL}
    return life in seen


def walk(layers: Layers, kinds: Sequence[object], step: Callable[[], object]) -> Walk:
    """Run one forward with stand-ins for layers.

    Args:
        layers: the layers, as they are in the model now.
        kinds: kind of every layer; of each the first one that is called really runs.
        step: a training step; it ends where it calls for a backward.
    """
    done = Walk()
    watching, lives = _Watching(done), _Lives(done)
    with _stand_ins(layers, kinds, done, watching, lives), _no_backward(lives.end), watching:
        try:
            step()
            lives.end()
        except _Backward:
            pass
    return done


class _Backward(BaseException):
    """The forward is over; no `except Exception` of a step keeps it."""


class _Watching(DispatchMode):
    """Notes operators that run between layers."""

    def __init__(self, done: Walk) -> None:
        DispatchMode.__init__(self)
        self._done = done
        self.paused = False

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and note it."""
        if any(map(is_wrapper, types)):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if not self.paused and getattr(func, "namespace", None) != "prim":
            self._done.gaps[-1].append((func, *((tuple(one.shape), one.dtype) for one in flat(result))))
        return result


class _Lives:
    """Follows what layers return until it is gone."""

    def __init__(self, done: Walk) -> None:
        self._done = done
        self._alive: dict[int, list[ref[torch.UntypedStorage]]] = {}

    def begin(self) -> None:
        """A layer is called."""
        position = len(self._done.calls)
        self._done.lives.append(KEPT)
        for call in self._gone():
            self._done.lives[call] = position - call

    def returned(self, result: Any) -> None:
        """It has returned something."""
        storages = [ref(part.untyped_storage()) for one in flat(result) for part in components(one)]
        self._alive[len(self._done.calls) - 1] = storages

    def end(self) -> None:
        """The forward is over."""
        for call in self._gone():
            self._done.lives[call] = TAIL

    def _gone(self) -> list[int]:
        gone = [call for call, storages in self._alive.items() if all(storage() is None for storage in storages)]
        for call in gone:
            del self._alive[call]
        return gone


@dataclass(frozen=True, kw_only=True, eq=False)
class _Returned:
    """What the first layer of a kind returned."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    passed: tuple[int | None, ...]
    """[leaf]: which tensor of the arguments it is itself; None: a new one."""

    @classmethod
    def of(cls, given: Sequence[Any], result: Any) -> _Returned:
        """Describe a result; `given` are the leaves of the arguments."""
        leaves, spec = tree_flatten(result)
        places = {id(leaf): place for place, leaf in enumerate(given) if isinstance(leaf, torch.Tensor)}
        return cls(
            leaves=tuple(_copy(leaf) for leaf in leaves),
            spec=spec,
            passed=tuple(places.get(id(leaf)) for leaf in leaves),
        )

    def again(self, given: Sequence[Any]) -> Any:
        """A result like it, for other arguments."""
        leaves = [
            _copy(leaf) if place is None else given[place] for leaf, place in zip(self.leaves, self.passed, strict=True)
        ]
        return tree_unflatten(leaves, self.spec)


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


@contextmanager
def _stand_ins(
    layers: Layers, kinds: Sequence[object], done: Walk, watching: _Watching, lives: _Lives
) -> Generator[None]:
    """Let calls of layers return what the first of their kind did.

    A layer stays what it is, with all its attributes: only its class is called in another way.
    """
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, layer in enumerate(layers.modules):
        numbers[id(layer)].append(number)
    known: dict[object, _Returned] = {}

    def enter(layer: nn.Module, given: Sequence[Any]) -> object:
        """Note a call; returns what it has in common with those that return the same."""
        lives.begin()
        same = numbers[id(layer)]  # one layer may be in several places
        number = same[sum(call in same for call in done.calls) % len(same)]
        done.calls.append(number)
        done.asked.append(tuple(map(_seen, given)))
        return kinds[number], done.asked[-1]

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(layer) not in numbers or watching.paused:
                return original(layer, *args, **kwargs)
            watching.paused = True
            given, _ = tree_flatten((args, kwargs))
            key = enter(layer, given)
            if key not in known:
                known[key] = _Returned.of(given, original(layer, *args, **kwargs))
            result = known[key].again(given)
            lives.returned(result)
            watching.paused = False
            done.gaps.append([])
            return result

        return called

    with _called_in_another_way({type(layer) for layer in layers.modules}, around):
        yield


@contextmanager
def _called_in_another_way(
    classes: set[type[nn.Module]], around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Generator[None]:
    name = "__call__"
    own = {kind: vars(kind).get(name) for kind in classes}
    wrapped = {kind: around(getattr(kind, name)) for kind in classes}
    try:
        for kind in classes:
            setattr(kind, name, wrapped[kind])
        yield
    finally:
        for kind, original in own.items():
            delattr(kind, name) if original is None else setattr(kind, name, original)


@contextmanager
def _no_backward(end: Callable[[], None]) -> Generator[None]:
    """End a step where it asks for gradients, after calling `end`."""
    owner = cast("Any", torch.autograd)
    saved = {name: getattr(owner, name) for name in ("backward", "grad")}

    def enough(*_args: Any, **_kwargs: Any) -> None:
        end()
        raise _Backward

    try:
        for name in saved:
            setattr(owner, name, enough)
        yield
    finally:
        for name, original in saved.items():
            setattr(owner, name, original)


def _seen(leaf: Any) -> object:
    """What of an argument of a layer tells one call from another."""
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return leaf if isinstance(leaf, _TELLING) else type(cast("object", leaf)).__name__
