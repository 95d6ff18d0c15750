"""The repeated layers of a module: which list they are in, which are alike, and how single ones are recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

from torch import nn
from torch.utils import checkpoint

from evenload.errors import EvenloadError, did_you_mean
from evenload.record.likeness import described

_COUNTS: Final = frozenset(("num_hidden_layers", "n_layer", "n_layers", "num_layers"))
"""What configurations call the number of layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """The repeated layers of a model."""

    path: str
    """Module path of what holds them, `model.layers`; empty for the model itself."""
    container: nn.Module
    """The `ModuleList`, `Sequential` or `ModuleDict`, whose modules are called 0, 1, 2, ..."""

    def __len__(self) -> int:
        return len(_names(self.container))

    @property
    def modules(self) -> list[nn.Module]:
        """The layers, in order."""
        return [cast("nn.Module", getattr(self.container, name)) for name in _names(self.container)]

    @property
    def kinds(self) -> tuple[int, ...]:
        """For every layer, the number of the first layer that is like it: same classes, tensors, attributes, hooks.

        An attribute that counts the layers, such as `layer_idx`, makes no difference.
        """
        facts = [described(layer) for layer in self.modules]
        counted = {key for key in set[str]().union(*facts) if _counts(key, facts)}
        first: dict[tuple[Any, ...], int] = {}
        kinds: list[int] = []
        for number, one in enumerate(facts):
            key = tuple(sorted((name, "" if name in counted else repr(value)) for name, value in one.items()))
            kinds.append(first.setdefault(key, number))
        return tuple(kinds)


def find_layers(model: nn.Module, path: str | None = None) -> Layers:
    """The repeated layers of a model.

    At a path, any `ModuleList`, `Sequential` or `ModuleDict` whose modules are called by their numbers. By default the
    largest, by parameters, of the `ModuleList`s and of what else holds blocks, mostly of one class.

    Raises:
        EvenloadError: there is no such list, or none at all.
    """
    lists = _lists(model)
    if path is not None:
        if path not in lists:
            known = [name for name in lists if name]
            raise EvenloadError(
                f"the model has no list of layers at {path!r}",
                where="--layers",
                fix=did_you_mean(path, known)
                or (f"lists of the model: {', '.join(known[:8])}" if known else "it has none at all"),
            )
        return Layers(path=path, container=lists[path])
    found = repeated_layers(model)
    if found is None:
        raise EvenloadError(
            "no repeated layers are found: the model has no torch.nn.ModuleList, nor a torch.nn.Sequential of blocks",
            fix="keep the layers in a torch.nn.ModuleList, or name what holds them by --layers; "
            "evenload dryrun runs any module as a whole",
        )
    return found


def repeated_layers(model: nn.Module) -> Layers | None:
    """The repeated layers that are found without a path; None where there are none."""
    lists = _lists(model)
    repeating = {name: one for name, one in lists.items() if isinstance(one, nn.ModuleList) or _repeats(one)}
    # of lists in each other, a Sequential is taken for the outer frame, which the layers are not in a row in
    frames = {
        name
        for name, one in repeating.items()
        if not isinstance(one, nn.ModuleList)
        and any(id(inner) in map(id, one.children()) for inner in repeating.values())
    }
    sizes = {
        name: sum(parameter.numel() for parameter in one.parameters())
        for name, one in repeating.items()
        if name not in frames
    }
    if not sizes:
        return None
    best = max(sizes, key=lambda name: (sizes[name], -len(name)))
    return Layers(path=best, container=lists[best])


def _lists(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> everything in a model that holds modules called 0, 1, 2, ... and nothing else."""
    return {
        name: module
        for name, module in cast("Any", model).named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        and len(module)
        and all(hasattr(module, number) for number in _names(module))
    }


def _names(container: nn.Module) -> list[str]:
    return [str(number) for number in range(len(cast("Any", container)))]


def _repeats(container: nn.Module) -> bool:
    """Whether at least half of the modules in it, and two, are blocks of one class, not layers of PyTorch's own."""
    modules = Layers(path="", container=container).modules
    blocks = Counter(
        type(one)
        for one in modules
        if next(one.children(), None) is not None or not type(one).__module__.startswith("torch.nn.")
    )
    most = max(blocks.values(), default=0)
    return most >= 2 and 2 * most >= len(modules)


def _counts(key: str, facts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an attribute is the number of the layer, but for where it starts."""
    having = [(number, one[key]) for number, one in enumerate(facts) if key in one]
    if len(having) == 1 or any(type(value) is not int for _, value in having):
        return False
    return len({value - number for number, value in having}) == 1


@contextmanager
def only(model: nn.Module, layers: Layers, numbers: Sequence[int]) -> Generator[Layers]:
    """Leave only some layers in a model, for as long as the block lasts.

    A configuration of transformers that counts or lists the layers is told, and put back.
    """
    whole, count = layers.modules, len(layers)
    configs: dict[int, Any] = {
        id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None and hasattr(c, "__dict__")
    }
    saved = [(facts, dict(facts)) for config in configs.values() if (facts := cast("dict[str, Any]", vars(config)))]
    try:
        for facts, values in saved:
            for name, value in values.items():
                if type(value) is int and value == count and name in _COUNTS:
                    facts[name] = len(numbers)
                elif type(value) is list and len(listed := cast("list[Any]", value)) == count:
                    facts[name] = [listed[number] for number in numbers]
        _fill(layers.container, [whole[number] for number in numbers])
        yield layers
    finally:
        _fill(layers.container, whole)
        for facts, values in saved:
            facts.clear()
            facts.update(values)


def _fill(container: nn.Module, kept: Sequence[nn.Module]) -> None:
    for name in _names(container):
        delattr(container, name)
    for number, layer in enumerate(kept):
        container.add_module(str(number), layer)


def recompute_layers(layers: Layers, numbers: Collection[int]) -> None:
    """Run forward of some layers again in backward instead of keeping what it makes."""
    modules = layers.modules
    for number in numbers:
        layer: Any = modules[number]
        layer.forward = partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return cast("Any", checkpoint).checkpoint(forward, *args, use_reentrant=False, **kwargs)
