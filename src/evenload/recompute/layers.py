"""Which modules of a model are its repeated layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch

from evenload.errors import EvenloadError, did_you_mean

Named = tuple[str, torch.nn.Module]


def find_layers(module: torch.nn.Module, layers: str | Iterable[str] | None) -> list[Named]:
    """The layers that a policy counts, in order, with their paths.

    Args:
        module: the model, or a single layer.
        layers: path of the container that holds them (`model.layers`), several such paths, or None to look for it.
            The empty path is the module itself, as one layer.

    Raises:
        EvenloadError: a path leads nowhere, or nothing, or more than one thing, looks like the repeated layers.
    """
    if not isinstance(module, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass anything
        raise EvenloadError(f"{type(module).__name__} is no module", fix="give the model, a torch.nn.Module")
    if layers is None:
        return list(_members(*_only_container(module)))
    if not isinstance(layers, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass anything
        raise EvenloadError(f"{layers!r} is no path of a module", where="$.layers", fix="write it as 'model.layers'")
    paths = [layers] if isinstance(layers, str) else list(layers)
    found: list[Named] = []
    for path in paths:
        if not isinstance(path, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass anything
            raise EvenloadError(f"{path!r} is no path of a module", where="$.layers", fix="write it as 'model.layers'")
        found += _at(module, path)
    if not found:
        raise EvenloadError("no layer is named", where="$.layers", fix="leave `layers` out, or name a container")
    return found


def modules(module: torch.nn.Module) -> list[Named]:
    """The modules below one, with their paths."""
    named = cast("Iterable[Named]", module.named_modules())  # its own type says nothing of what it yields
    return [(path, one) for path, one in named if path]


def _at(module: torch.nn.Module, path: str) -> Iterator[Named]:
    try:
        target = module.get_submodule(path)
    except AttributeError:
        known = [name for name, _ in modules(module)]
        raise EvenloadError(
            f"the model has no module {path!r}", where="$.layers", fix=did_you_mean(path, known)
        ) from None
    if _is_container(target):
        yield from _members(path, target)
    else:
        yield path, target


def _is_container(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential))


def _members(path: str, container: torch.nn.Module) -> Iterator[Named]:
    if not _is_container(container):
        yield path, container
        return
    for name, child in container.named_children():
        yield (f"{path}.{name}" if path else name), child


def _only_container(module: torch.nn.Module) -> Named:
    """The outermost container of equal layers, with most of the parameters that lie in such containers."""
    found = list(_containers("", module, least=2)) or list(_containers("", module, least=1))
    if not found:
        return "", module
    sizes = {path: sum(one.numel() for one in container.parameters()) for path, container in found}
    path, container = max(found, key=lambda one: sizes[one[0]])
    if len(found) > 1 and 2 * sizes[path] <= sum(sizes.values()):
        names = ", ".join(repr(one) for one, _ in found)
        raise EvenloadError(
            f"several modules hold repeated layers: {names}",
            where="$.layers",
            fix=f"name the one that is meant: layers={path!r}, or a list of those that are, in order",
        )
    return path, container


def _containers(path: str, module: torch.nn.Module, least: int) -> Iterator[Named]:
    """Containers of at least so many layers, all of one class and with modules of their own."""
    if _is_container(module):
        children = list(module.children())
        kinds = {type(child) for child in children}
        same = len(kinds) == 1 and not _is_container(children[0]) and next(children[0].children(), None) is not None
        if len(children) >= least and same:
            yield path, module
            return
    for name, child in module.named_children():
        yield from _containers(f"{path}.{name}" if path else name, child, least)
