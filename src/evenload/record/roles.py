"""Who holds a storage: parameters, gradients and optimizer states are found where PyTorch keeps them."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import nn

from evenload.ledger.words import Role
from evenload.record._torch_private import plainly
from evenload.record.modules import ModulePaths
from evenload.record.phases import Phases
from evenload.record.storages import Storages
from evenload.record.tensors import flat


class Roles:
    """Marks storages as parameters, gradients and optimizer states, with the module that they belong to."""

    def __init__(self, storages: Storages, phases: Phases, paths: ModulePaths) -> None:
        self._storages = storages
        self._phases = phases
        self._paths = paths
        self._owners: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    @plainly
    def model(self, root: nn.Module) -> None:
        """Mark what a model's modules hold, and the gradients that are there."""
        self._owners = {key: owner for key, owner in self._owners.items() if owner[0]() is not None}
        for tensor, module in self._paths.parameters(root):
            self._storages.mark(tensor, Role.PARAMETER, module)
            self._owners[id(tensor)] = (weakref.ref(tensor), module)
        self._phases.own({key: module for key, (_, module) in self._owners.items()})
        self.gradients()

    @plainly
    def registered(self, tensor: torch.Tensor) -> None:
        """Mark a parameter or buffer that a module has just been given."""
        self._storages.mark(tensor, Role.PARAMETER)

    @plainly
    def gradients(self) -> None:
        """Mark the gradients of known parameters: those that something else than backward has put there too."""
        for reference, module in self._owners.values():
            tensor = reference()
            if tensor is not None and tensor.is_leaf and (gradient := tensor.grad) is not None:
                self._storages.mark(gradient, Role.GRADIENT, module)

    @plainly
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark an optimizer's states, and parameters that no module knows."""
        for parameter in flat([group["params"] for group in optimizer.param_groups]):
            if id(parameter) not in self._owners:
                role = Role.OPTIMIZER if self._owners else Role.PARAMETER
                self._storages.mark(parameter, role)
                if parameter.grad is not None:
                    self._storages.mark(parameter.grad, Role.GRADIENT)
        for parameter, state in cast("dict[Any, Any]", optimizer.state).items():
            owner = self._owners.get(id(parameter))
            for tensor in flat(state):
                self._storages.mark(tensor, Role.OPTIMIZER, None if owner is None else owner[1])
