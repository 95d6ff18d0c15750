"""What a decoder is made of: what comes before its repeated layers, what after, and what passes between them.

The model runs once, on fake tensors, and is watched. Nothing is known about its family: a parameter belongs to the
zone in which it is used, and the tensor that one layer hands to the next is what a pipeline sends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from evenload.errors import EvenloadError
from evenload.recompute.errors import RecomputeError
from evenload.recompute.layers import find_layers
from evenload.recompute.rehearsal import rehearse
from evenload.runtime.anatomy import Anatomy, Passed, take_result

Zone = Literal["before", "layers", "after"]
_WHERE: Final = "$.layers"
_OTHER: Final = "/"
"""Stands for the results of layers that are no parameter: no name of one has a slash."""


def examine(model: nn.Module, batch: tuple[Any, ...], layers: str | None = None) -> Anatomy:
    """Run a model once on fake tensors, and see what it is made of.

    Args:
        model: a decoder, with or without values; it stays as it is.
        batch: what it is called with, for one micro-batch.
        layers: path of the container of its repeated layers, where that is not obvious.

    Raises:
        EvenloadError: the model cannot be cut between its layers; with the reason.
    """
    named = find_layers(model, layers)
    if len(named) == 1 and not named[0][0]:
        raise EvenloadError(
            "no repeated layers are found in the model", where=_WHERE, fix="name what holds them: layers='model.layers'"
        )
    _require_own(model, named)
    watch = _Watch(model, named, tuple(batch[0].shape))
    try:
        with watch:
            rehearse(model, batch, {})
    except RecomputeError as error:
        if isinstance(error.__cause__, EvenloadError):
            raise error.__cause__ from None
        raise EvenloadError(f"the model cannot be cut into stages: {error.fact}") from error
    return watch.found()


def _require_own(model: nn.Module, named: Sequence[tuple[str, nn.Module]]) -> None:
    """No two layers share a parameter: they may be on different ranks."""
    holder: dict[int, str] = {}
    container: Any = model.get_submodule(named[0][0].rpartition(".")[0])
    everything = cast("Iterable[tuple[str, nn.Module]]", container.named_modules(remove_duplicate=False))
    for path, layer in ((path, one) for path, one in everything if path and "." not in path):
        for name, parameter in layer.named_parameters():
            first = holder.setdefault(id(parameter), path)
            if first != path:
                raise EvenloadError(
                    f"layers {first!r} and {path!r} share the parameter {name!r}, and may be on different ranks",
                    where=_WHERE,
                    fix="give every layer its own, or train this model without a pipeline",
                )


@dataclass(kw_only=True)
class _Seen:
    zone: Zone = "before"
    zones: dict[str, set[Zone]] = field(default_factory=lambda: defaultdict(set))
    handed: object = None
    """What the last layer returned."""
    argument: int | str | None = None
    in_tuple: bool | None = None
    hidden: Passed | None = None
    result: Passed | None = None
    names: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    """Fake parameters of the run."""
    others: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """What layers return beside what they hand on."""


class _Watch(TorchFunctionMode):
    """Notes where parameters are used, and what layers take and return."""

    def __init__(self, model: nn.Module, named: Sequence[tuple[str, nn.Module]], given: tuple[int, ...]) -> None:
        super().__init__()
        self._given = given
        self._model = model
        self._named = named
        self._seen = _Seen()
        self._handles: list[Any] = []
        self._container = named[0][0].rpartition(".")[0]
        self._loose: set[str] = set()

    def __enter__(self) -> Any:
        inside = tuple(f"{path}." for path, _ in self._named)
        around = {".".join(self._container.split(".")[:i]) for i in range(len(self._container.split(".")) + 1)}
        for path, module in cast("Any", self._model).named_modules():
            own = [f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)]
            if not own or (f"{path}.").startswith(inside):
                continue
            if path in around:
                self._loose.update(own)
            else:
                self._on(module.register_forward_pre_hook(self._uses(own)))
        self._on(self._model.register_forward_pre_hook(self._begins))
        for number, (path, layer) in enumerate(self._named):
            self._on(layer.register_forward_pre_hook(self._enters(number, path), with_kwargs=True))
            self._on(layer.register_forward_hook(self._leaves(number, path)))
        self._on(self._model.register_forward_hook(self._ends))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        cast("Any", super()).__exit__(*error)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, dict(kwargs or {}))):
            if isinstance(leaf, torch.Tensor):
                for name in self._seen.names.get(id(leaf), ()):
                    if name in self._loose:
                        self._seen.zones[name].add(self._seen.zone)
        if getattr(function, "__name__", "").endswith("grouped_mm"):  # knows only bf16 on fake tensors
            return args[0] @ args[1][0]  # of the same shape
        return function(*args, **(kwargs or {}))

    def found(self) -> Anatomy:
        seen = self._seen
        assert seen.hidden is not None  # noqa: S101  # `_ends` makes sure
        assert seen.result is not None  # noqa: S101
        everything = [name for name, _ in self._model.named_parameters(remove_duplicate=False)]
        inside = tuple(f"{path}." for path, _ in self._named)
        outer = [name for name in everything if not name.startswith(inside)]
        return Anatomy(
            container=self._container,
            layers=tuple(path for path, _ in self._named),
            before=frozenset(name for name in outer if "before" in seen.zones[name] or not seen.zones[name]),
            after=frozenset(name for name in outer if "after" in seen.zones[name]),
            tied=tuple(names for names in self._aliases() if {"before", "after"} <= self._zones_of_all(names)),
            given=self._given,
            hidden=seen.hidden,
            result=seen.result,
            argument=seen.argument if seen.argument is not None else 0,
            in_tuple=bool(seen.in_tuple),
        )

    def _aliases(self) -> list[tuple[str, ...]]:
        """The names of every parameter."""
        names: dict[int, list[str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return list(map(tuple, names.values()))

    def _zones_of_all(self, names: Sequence[str]) -> set[Zone]:
        return {zone for name in names for zone in self._seen.zones[name]}

    def _on(self, handle: Any) -> None:
        self._handles.append(handle)

    def _uses(self, own: list[str]) -> Callable[..., None]:
        def use(*_: Any) -> None:
            for name in own:
                if self._seen.zone == "layers":
                    raise EvenloadError(
                        f"the parameter {name!r} is outside the layers and used between them",
                        where=_WHERE,
                        fix="it would be needed on every stage: train this model without a pipeline",
                    )
                self._seen.zones[name].add(self._seen.zone)

        return use

    def _begins(self, *_: Any) -> None:
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            self._seen.names.setdefault(id(parameter), []).append(name)

    def _enters(self, number: int, path: str) -> Callable[..., Any]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            seen = self._seen
            place = _place_of_hidden(args, kwargs, seen.argument, path)
            hidden = args[place] if isinstance(place, int) else kwargs[place]
            if number and (seen.handed is not hidden):
                raise EvenloadError(
                    f"something happens to what passes from {self._named[number - 1][0]!r} to {path!r}",
                    where=_WHERE,
                    fix="put it inside a layer: a pipeline is cut where a layer's result is the next one's input",
                )
            _require_alone(args, kwargs, place, path)
            if not number:
                seen.zone, seen.argument = "layers", place
                seen.hidden = Passed(shape=tuple(hidden.shape), dtype=hidden.dtype)
                hidden = hidden.detach().requires_grad_()  # so that whatever goes round the layers shows
                return (
                    ((*args[:place], hidden, *args[place + 1 :]), kwargs)
                    if isinstance(place, int)
                    else (args, {**kwargs, place: hidden})
                )
            return None

        return enter

    def _leaves(self, number: int, path: str) -> Callable[..., Any]:
        def leave(_: nn.Module, _args: Any, result: Any) -> Any:
            seen = self._seen
            seen.in_tuple = isinstance(result, tuple)
            hidden, *others = cast("tuple[Any, ...]", result) if seen.in_tuple else (result,)
            if not isinstance(hidden, torch.Tensor) or seen.hidden is None:
                raise EvenloadError(f"layer {path!r} returns {type(hidden).__name__}, not a tensor", where=_WHERE)
            now = Passed(shape=tuple(hidden.shape), dtype=hidden.dtype)
            if now != seen.hidden and number < len(self._named) - 1:
                raise EvenloadError(
                    f"layer {path!r} takes {seen.hidden} and returns {now}: a pipeline sends one shape", where=_WHERE
                )
            seen.handed = hidden
            if number == len(self._named) - 1:
                seen.zone = "after"
            return (hidden, *tree_map_only(torch.Tensor, self._apart, others)) if seen.in_tuple else None

        return leave

    def _apart(self, other: torch.Tensor) -> torch.Tensor:
        """Cut off what a layer returns beside what it hands on, and remember it: a gradient must not come this way."""
        if not other.requires_grad:
            return other
        self._seen.others.append(other.detach().requires_grad_())
        return self._seen.others[-1]

    def _ends(self, _: nn.Module, _args: Any, result: Any) -> None:
        seen = self._seen
        if seen.zone != "after":
            raise EvenloadError("the model does not run through its layers one after the other", where=_WHERE)
        logits = take_result(result)
        seen.result = Passed(shape=tuple(logits.shape), dtype=logits.dtype)
        names = seen.names | {id(other): [_OTHER] for other in seen.others}
        reached = set(_reached(logits, names))
        if _OTHER in reached:
            raise EvenloadError(
                "the end of the model uses more of what layers return than what they hand on",
                where=_WHERE,
                fix="a pipeline sends only what passes between layers: train this model without one",
            )
        here = {name for names in self._aliases() if self._zones_of_all(names) == {"before"} for name in names}
        around = reached & here
        if around:
            raise EvenloadError(
                f"what the parameter {min(around)!r} makes goes round the layers, to the end of the model",
                where=_WHERE,
                fix="a pipeline sends only what passes between layers: train this model without one",
            )


def _place_of_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any], known: int | str | None, path: str) -> int | str:
    if known is not None:
        if (isinstance(known, int) and known < len(args)) or known in kwargs:
            return known
    elif args and isinstance(args[0], torch.Tensor):
        return 0
    else:
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1:
                return name
    raise EvenloadError(f"layer {path!r} is called without a tensor that could pass from layer to layer", where=_WHERE)


def _require_alone(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int | str, path: str) -> None:
    others = [*(value for i, value in enumerate(args) if i != place), *(v for n, v in kwargs.items() if n != place)]
    if any(isinstance(one, torch.Tensor) and one.requires_grad for one in tree_leaves(others)):
        raise EvenloadError(
            f"layer {path!r} gets a second tensor that gradients flow through",
            where=_WHERE,
            fix="a pipeline sends only what passes between layers: train this model without one",
        )


def _reached(result: torch.Tensor, names: Mapping[int, list[str]]) -> Iterator[str]:
    """Names of the parameters that a result's gradient would reach."""
    known: set[Any] = set()
    waiting: list[Any] = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield from names.get(id(variable), ())
        waiting += [one for one, _ in node.next_functions]
