"""Runs modules on fake tensors, so that layers are recorded without memory or computation."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from evenload.recompute._torch_private import tensor_dictionaries
from evenload.recompute.errors import RecomputeError
from evenload.recompute.likeness import SIMPLE
from evenload.recompute.wrappers import tensors


def rehearse(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run a module's forward on fake tensors; its own parameters and buffers stay as they are.

    A module on the meta device runs as if it were on the device of its first argument, whose kernels it will use.

    Raises:
        RecomputeError: it cannot run on fake tensors, for example because its code depends on data.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    first = next(tensors((args, dict(kwargs))), None)
    device = first.device if first is not None else torch.device("cpu")
    fake_args, fake_kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, dict(kwargs)))
    try:
        with _faked(module, mode, device), mode:
            module(*fake_args, **fake_kwargs)
    except Exception as error:  # data-dependent code, operators that know no fake tensors, ...
        raise RecomputeError(
            f"the model cannot be rehearsed on fake tensors: {type(error).__name__}: {error}",
            fix="leave the rehearsal out: the first real forward records the layers",
        ) from error


@contextmanager
def _faked(module: torch.nn.Module, mode: FakeTensorMode, device: torch.device) -> Generator[None]:
    """Fake tensors in the place of a module's parameters and buffers.

    `torch.func.functional_call` would do it, but it leaves fakes behind where one module stands in two places.
    """
    held = [dictionary for one in module.modules() for dictionary in tensor_dictionaries(one)]
    before = [dict(dictionary) for dictionary in held]
    fakes = {id(tensor): _fake(mode, tensor, device) for one in before for tensor in one.values() if tensor is not None}
    try:
        for dictionary, own in zip(held, before, strict=True):
            dictionary.update({name: fakes[id(one)] for name, one in own.items() if one is not None})
        yield
    finally:
        for dictionary, own in zip(held, before, strict=True):
            dictionary.clear()
            dictionary.update(own)


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not tensor.is_meta:
        return mode.from_tensor(tensor)
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def can_rehearse(tree: Any) -> bool:
    """Whether a layer with these arguments can run twice: nothing among them can be changed by the first run."""
    if isinstance(tree, (tuple, list)):
        return all(map(can_rehearse, cast("tuple[Any, ...]", tree)))
    if isinstance(tree, dict):
        return all(map(can_rehearse, cast("dict[Any, Any]", tree).values()))
    return isinstance(tree, SIMPLE) or type(tree) in {torch.Tensor, torch.nn.Parameter}
