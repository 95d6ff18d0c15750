"""The repeated layers of a module: which list they are in, which are alike, and how single ones are recomputed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
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
    """Module path of the list, `model.layers`."""
    modules: nn.ModuleList

    def __len__(self) -> int:
        return len(self.modules)

    @property
    def kinds(self) -> tuple[int, ...]:
        """For every layer, the number of the first layer that is like it: same classes, tensors, attributes, hooks.

        An attribute that counts the layers, such as `layer_idx`, makes no difference.
        """
        facts = [described(layer) for layer in self.modules]
        counted = {
            key
            for key in facts[0]
            if all(type(one.get(key)) is int and one[key] == facts[0][key] + i for i, one in enumerate(facts))
        }
        first: dict[tuple[Any, ...], int] = {}
        kinds: list[int] = []
        for number, one in enumerate(facts):
            key = tuple(sorted((name, repr(value)) for name, value in one.items() if name not in counted))
            kinds.append(first.setdefault(key, number))
        return tuple(kinds)


def find_layers(model: nn.Module, path: str | None = None) -> Layers:
    """The repeated layers of a model: its largest `ModuleList` by parameters, or the one at a path.

    Raises:
        EvenloadError: there is no such list, or none at all.
    """
    lists = {
        name: module
        for name, module in cast("Any", model).named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    if path is not None:
        if path not in lists:
            raise EvenloadError(
                f"the model has no torch.nn.ModuleList at {path!r}",
                where="--layers",
                fix=did_you_mean(path, list(lists))
                or (f"lists of the model: {', '.join(list(lists)[:8])}" if lists else "it has none at all"),
            )
        return Layers(path=path, modules=lists[path])
    if not lists:
        raise EvenloadError(
            "no repeated layers are found: the model has no torch.nn.ModuleList",
            fix="keep the layers in a torch.nn.ModuleList, or run all of the model with --full",
        )
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in lists.items()}
    best = max(lists, key=lambda name: (sizes[name], -len(name)))
    return Layers(path=best, modules=lists[best])


@contextmanager
def only(model: nn.Module, layers: Layers, numbers: Sequence[int]) -> Generator[Layers]:
    """Leave only some layers in a model, for as long as the block lasts.

    A configuration of transformers that counts or lists the layers is told, and put back.
    """
    whole, count = list(layers.modules), len(layers)
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
        _fill(layers.modules, [whole[number] for number in numbers])
        yield layers
    finally:
        _fill(layers.modules, whole)
        for facts, values in saved:
            facts.clear()
            facts.update(values)


def _fill(modules: nn.ModuleList, kept: Sequence[nn.Module]) -> None:
    del modules[:]
    modules.extend(kept)


def recompute_layers(layers: Layers, numbers: Collection[int]) -> None:
    """Run forward of some layers again in backward instead of keeping what it makes."""
    for number in numbers:
        layer: Any = layers.modules[number]
        layer.forward = partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return cast("Any", checkpoint).checkpoint(forward, *args, use_reentrant=False, **kwargs)
