"""Paths of modules, and the parameters below them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Final, cast

import torch
from torch import nn

from evenload.ledger.log import Log

_WRAPPERS: Final = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"})
"""Classes that hold the model as `module`."""
_HIDDEN: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Path segments that wrappers add and no user wrote."""


class ModulePaths:
    """Paths of modules as positions in the strings of a log.

    The paths are those of the model, the outermost module that was called first or the one that was named. Other
    outermost modules, a loss or a second network, are told by their class.
    """

    def __init__(self, log: Log, model: nn.Module | None = None) -> None:
        self._log = log
        self._known: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
        self._names: dict[int, str] = {}
        self._taken: set[str] = set()
        if model is not None:
            self.add(model)

    def position(self, module: nn.Module) -> int | None:
        """Position of a module's path; None: not known yet."""
        known = self._known.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def add(self, root: nn.Module) -> None:
        """Learn the paths below an outermost module, unless it is known."""
        if self.position(root) is not None:
            return
        prefix = self._prefix(root)
        for module, path in _paths(root):
            self.put(module, ".".join(part for part in (prefix, path) if part))

    def add_below(self, module: nn.Module, caller: int) -> int:
        """Learn a module that is not below any known one: told by its class, under the module that calls it."""
        above = self._names.get(caller, "")
        return self.put(module, ".".join(part for part in (above, type(module).__name__) if part))

    def parameters(self, root: nn.Module) -> Iterator[tuple[torch.Tensor, int]]:
        """Parameters and buffers below a module, each with the position of the path of the module that owns it."""
        seen: set[int] = set()
        for module in root.modules():
            position = self.position(module)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if position is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor, position

    def _prefix(self, root: nn.Module) -> str:
        """Nothing for the model, and for what wraps it; the class, numbered where needed, for others."""
        if not self._known or any(self._known.get(id(module)) for module in root.modules()):
            return ""
        name = type(root).__name__
        number = 1
        while (unique := name if number == 1 else f"{name}#{number}") in self._taken:
            number += 1
        self._taken.add(unique)
        return unique

    def put(self, module: nn.Module, path: str) -> int:
        """Say what the path of a module is; returns its position."""
        position = self._log.string(path)
        self._names[position] = path
        self._known[id(module)] = (weakref.ref(module), position)
        return position


def _paths(root: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules below a root with their paths, without what wrappers add to them."""
    hidden = {""} if type(root).__name__ in _WRAPPERS else set[str]()
    for name, module in cast("Iterator[tuple[str, nn.Module]]", root.named_modules()):
        if type(module).__name__ in _WRAPPERS:
            hidden.add(name)
        kept: list[str] = []
        parts = name.split(".") if name else []
        for depth, part in enumerate(parts):
            above = ".".join(parts[:depth])
            if part not in _HIDDEN and not (part == "module" and above in hidden):
                kept.append(part)
        yield module, ".".join(kept)
