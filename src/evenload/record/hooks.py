"""Hooks into PyTorch for as long as a recording lasts: modules, optimizers, backward calls, resized storages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from threading import get_ident
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from evenload.record._torch_private import PROPAGATE, graph_task, propagator
from evenload.record.guard import Guard
from evenload.record.mode import LedgerMode
from evenload.record.modules import ModulePaths
from evenload.record.phases import Phases
from evenload.record.roles import Roles
from evenload.record.steps import Steps
from evenload.record.storages import Storages

_GRAPH_POSITION: Final = {"backward": 3, "grad": 4}
"""Position of `create_graph` among the arguments of the functions that run backward."""


class Hooks:
    """Everything that has to be told where the step is. `install` it, and `remove` it again."""

    def __init__(
        self,
        *,
        mode: LedgerMode,
        storages: Storages,
        phases: Phases,
        steps: Steps,
        roles: Roles,
        paths: ModulePaths,
        guard: Guard,
    ) -> None:
        self._guard = guard
        self._mode = mode
        self._storages = storages
        self._phases = phases
        self._steps = steps
        self._roles = roles
        self._paths = paths
        self._thread = get_ident()
        self._walked: dict[int, int] = {}
        self._stack = ExitStack()
        self._pauses = False
        self.unseen = False
        """Whether modules ran in a thread that is not recorded."""
        mode.met = self.pause_propagation

    def install(self) -> None:
        """Put every hook in its place."""
        kept = self._guard.kept
        handles = (
            register_module_forward_pre_hook(kept(self._module_begins)),
            register_module_forward_hook(kept(self._module_ends), always_call=True),
            register_module_parameter_registration_hook(kept(self._registered)),
            register_module_buffer_registration_hook(kept(self._registered)),
            register_optimizer_step_pre_hook(kept(self._optimizer_begins)),
            register_optimizer_step_post_hook(kept(self._optimizer_ends)),
        )
        for handle in handles:
            self._stack.callback(handle.remove)
        for name in _GRAPH_POSITION:
            self._replace(torch.autograd, name, self._backward)
        self._replace(torch.UntypedStorage, "resize_", self._resize)
        if torch.distributed.is_available():
            self._replace(torch.distributed.Work, "wait", self._wait)
        for owner in (torch, torch.random, torch.cuda):
            self._replace(owner, "get_rng_state", self._state)
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code hides its allocations
        self.pause_propagation()

    def remove(self) -> None:
        """Take every hook away."""
        self._stack.close()

    def pause_propagation(self, _kind: type | None = None) -> None:
        """Pause the recording while DTensor tries shapes out; also once DTensor is first met."""
        owner = propagator()
        if owner is not None and not self._pauses:
            self._pauses = True
            self._replace(owner, PROPAGATE, self._propagation)

    def _replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put a function in the place of another one, until `remove`."""
        original = getattr(owner, name)
        inherited = name not in vars(owner)
        setattr(owner, name, make(original))
        if inherited:
            self._stack.callback(delattr, owner, name)
        else:
            self._stack.callback(setattr, owner, name, original)

    # Modules

    def _elsewhere(self) -> bool:
        """Whether this thread is neither the recorded one nor one that runs its backward."""
        return get_ident() != self._thread and graph_task() < 0

    def _module_begins(self, module: nn.Module, _args: Any) -> None:
        if self._elsewhere():
            self.unseen = True
            return
        position = self._paths.position(module)
        if self._phases.outermost and graph_task() < 0:
            self._root_begins(module)
            position = self._paths.position(module)
        if position is None:
            position = self._paths.add_below(module, self._phases.where.module)
        self._phases.enter_module(position)

    def _root_begins(self, module: nn.Module) -> None:
        self._steps.forward_begins()
        self._paths.add(module)
        if self._walked.get(id(module)) != self._steps.number:
            self._walked[id(module)] = self._steps.number
            self._roles.model(module)
        self._phases.begin_forward()

    def _module_ends(self, _module: nn.Module, _args: Any, _result: Any) -> None:
        if self._elsewhere():
            return
        self._phases.leave_module()
        if self._phases.outermost and graph_task() < 0:
            self._phases.end_forward()

    def _registered(self, _module: nn.Module, _name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None and not self._elsewhere():
            self._roles.registered(tensor)

    # Optimizers

    def _optimizer_begins(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._elsewhere():
            self._roles.gradients()
            self._phases.begin_optimizer()

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._elsewhere():
            self._roles.optimizer(optimizer)
            self._phases.end_optimizer()
            self._steps.optimizer_stepped(optimizer, in_backward=graph_task() >= 0)

    # Functions that are replaced

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        position = _GRAPH_POSITION[original.__name__]
        begins, ends = self._guard.kept(self._phases.begin_backward), self._guard.kept(self._backward_ends)

        @wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._elsewhere():
                return original(*args, **kwargs)
            graph = kwargs.get("create_graph", args[position] if len(args) > position else False)
            begins(graph=bool(graph))
            try:
                return original(*args, **kwargs)
            finally:
                ends()

        return backward

    def _backward_ends(self) -> None:
        self._phases.end_backward()
        if graph_task() < 0:
            self._roles.gradients()

    def _resize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        resized = self._guard.kept(self._mode.resized)

        @wraps(original)
        def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = original(storage, nbytes)
            if not self._elsewhere():
                resized(storage)
            return result

        return resize

    def _state(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A copy of a random state is made without an operator; checkpointing keeps one for every region."""
        appeared = self._guard.kept(self._mode.appeared)

        @wraps(original)
        def get_rng_state(*args: Any, **kwargs: Any) -> Any:
            state = original(*args, **kwargs)
            if not self._elsewhere():
                appeared(state, "torch.get_rng_state")
            return state

        return get_rng_state

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Gloo copies results out of memory of its own when one waits for them."""

        @wraps(original)
        def wait(*args: Any, **kwargs: Any) -> Any:
            self._storages.waiting += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._storages.waiting -= 1

        return wait

    def _propagation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def propagate(*args: Any, **kwargs: Any) -> Any:
            self._mode.paused += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._mode.paused -= 1

        return propagate
