"""The parameters and buffers of one rank, made from the structure of the whole model.

What has no values yet gets memory last, after it has been divided: a rank never holds more than its own part, and one
module's parameters whole while their first values are drawn.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evenload.errors import EvenloadError
from evenload.runtime._torch_private import without_fake_tensors
from evenload.runtime.skeleton import Init, fill, meta_buffers, on_meta


class Materials:
    """Where the chunks of a rank come from. Chunks that share a parameter or a buffer get the same object."""

    def __init__(self, model: nn.Module, device: torch.device, *, seed: int, init: Init | None) -> None:
        """Prepare.

        Args:
            model: the whole model, with or without values.
            device: where parameters and buffers will be.
            seed: of first values.
            init: the user's own way to first values.

        Raises:
            EvenloadError: the model has buffers without values.
        """
        empty = meta_buffers(model)
        if empty:
            raise EvenloadError(
                f"the buffer {empty[0]!r} has no values: the model was made on the meta device",
                fix="pass the function that makes it, which evenload calls so that only parameters have no values",
            )
        self.model = model
        self._device = device
        self._seed = seed
        self._init = init
        self._parameters: dict[int, nn.Parameter] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._made: dict[int, nn.Parameter] = {}

    def copy(self, own: frozenset[str], layers: frozenset[str]) -> nn.Module:
        """The model's structure, with the values that it has where they are named, and without those of all others.

        Args:
            own: names of the parameters that keep their values.
            layers: paths of layers that are left out.
        """
        memo: dict[int, Any] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name in own:
                if id(parameter) not in self._parameters:
                    self._parameters[id(parameter)] = self.own(parameter)
                memo[id(parameter)] = self._parameters[id(parameter)]
        for parameter in self.model.parameters():
            if id(parameter) not in memo:
                memo[id(parameter)] = parameter if parameter.is_meta else on_meta(parameter)
        for buffer in self.model.buffers():
            if id(buffer) not in self._buffers:
                self._buffers[id(buffer)] = self.buffer(buffer)
            memo[id(buffer)] = self._buffers[id(buffer)]
        for path in layers:
            memo[id(self.model.get_submodule(path))] = nn.Identity()
        try:
            return copy.deepcopy(self.model, memo)
        except Exception as error:  # whatever a model holds that cannot be copied
            raise EvenloadError(
                f"the model cannot be copied: {type(error).__name__}: {error}",
                fix="keep what cannot be copied outside the model",
            ) from error

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter of this rank: itself where it has values and is on the device."""
        if parameter.is_meta:
            return on_meta(parameter)
        if parameter.device == self._device:
            return parameter
        return nn.Parameter(parameter.detach().to(self._device), parameter.requires_grad)

    def buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """A buffer on the device."""
        return buffer.to(self._device)

    def dividing(self) -> AbstractContextManager[Any]:
        """What has to hold while chunks are divided."""
        return nullcontext()

    def fill(self, model: nn.Module, names: Mapping[str, str]) -> None:
        """Give the parameters of a chunk that have no values memory and their first ones.

        Args:
            model: the chunk's model, divided as it is going to be.
            names: of its own parameters -> those in the whole model.
        """
        for path, own in _by_module(names).items():
            module = model.get_submodule(path)
            drawn: dict[str, torch.Tensor] = {}
            for name, full in own.items():
                parameter = cast("nn.Parameter", getattr(module, name))
                source = id(self.model.get_parameter(full))
                if not parameter.is_meta:
                    continue
                if source not in self._made:
                    drawn = drawn or self.drawn(full.rpartition(".")[0])
                    self._made[source] = nn.Parameter(self.part(drawn.pop(name), parameter), parameter.requires_grad)
                setattr(module, name, self._made[source])
        model.to(self._device)  # everything is there: FSDP2 takes note of what stands in its modules now

    def drawn(self, path: str) -> dict[str, torch.Tensor]:
        """First values of the parameters that a module itself holds, whole."""
        module = self.model.get_submodule(path)
        before = dict(module.named_parameters(recurse=False))
        try:
            for name, parameter in before.items():
                empty = torch.empty_like(parameter, device=self._device)
                setattr(module, name, nn.Parameter(empty, parameter.requires_grad))
            fill(self.model, module, path, seed=self._seed, init=self._init)
            return {name: getattr(module, name).detach() for name in before}
        finally:
            for name, parameter in before.items():
                setattr(module, name, parameter)

    def part(self, whole: torch.Tensor, like: nn.Parameter) -> torch.Tensor:
        """What this rank holds of a tensor that is divided as a parameter is."""
        if not isinstance(like, DTensor):
            return whole
        local = _own(whole, like)
        if local.untyped_storage().nbytes() > local.nbytes:  # a view, which would keep the whole
            local = local.clone(memory_format=torch.contiguous_format)
        return _divided(local, like)


class Shapes(Materials):
    """Parameters and buffers as fake tensors, inside the mode that they belong to."""

    def __init__(self, model: nn.Module, fake: Any) -> None:
        super().__init__(model, torch.device("cpu"), seed=0, init=None)
        self._fake = fake

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter that has no values yet."""
        return on_meta(parameter)

    def buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """A fake buffer."""
        return self._fake.from_tensor(buffer)

    def dividing(self) -> AbstractContextManager[Any]:
        """Meshes and shards are laid out with real indices."""
        return without_fake_tensors()

    def drawn(self, path: str) -> dict[str, torch.Tensor]:
        """Nothing is drawn: the whole tensors, still without memory."""
        return {name: one.detach() for name, one in self.model.get_submodule(path).named_parameters(recurse=False)}

    def part(self, whole: torch.Tensor, like: nn.Parameter) -> torch.Tensor:
        """Memory for what this rank holds."""
        if not isinstance(like, DTensor):
            return torch.empty(whole.shape, dtype=whole.dtype, device="cpu")
        local = like.to_local()
        return _divided(torch.empty(local.shape, dtype=local.dtype, device="cpu"), like)


def _own(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of a tensor, as a view: the innermost ranks divide it first, because FSDP2 comes last."""
    mesh, own = like.device_mesh, whole
    for dimension in reversed(range(mesh.ndim)):
        placement: Any = like.placements[dimension]
        if not placement.is_replicate():
            pieces = own.chunk(mesh.size(dimension), placement.dim)
            number = mesh.get_local_rank(dimension)
            own = pieces[number] if number < len(pieces) else own.narrow(placement.dim, 0, 0)
    return own


def _divided(local: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _by_module(names: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Path of a module -> its own parameters -> their names in the whole model."""
    found: dict[str, dict[str, str]] = {}
    for local, full in names.items():
        path, _, name = local.rpartition(".")
        found.setdefault(path, {})[name] = full
    return found
