"""Models without their parameters: what a rank does not train is never there.

Parameters are put on the meta device the moment a module registers them, before anything fills them. Buffers stay
real: what a module computes when it is made, such as the frequencies of rotary positions, is small and needed on
every stage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules import module as hooks

from evenload.errors import EvenloadError

Init = Callable[[nn.Module], object]
"""Fills the parameters that a module itself holds."""


@contextmanager
def without_parameters() -> Generator[None]:
    """Make modules whose parameters are on the meta device, for as long as the block lasts."""
    handle = cast("Any", hooks).register_module_parameter_registration_hook(_to_meta)
    try:
        yield
    finally:
        handle.remove()


def _to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:  # one that is tied stays the same object
        return None
    return on_meta(parameter)


def on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of the same shape without memory."""
    made = torch.empty_like(parameter, device="meta")
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


def fill(model: nn.Module, module: nn.Module, path: str, *, seed: int, init: Init | None) -> None:
    """Give the parameters that a module itself holds their first values.

    The random numbers depend on the seed and on the module's path in the whole model, never on which rank draws them:
    a model begins the same under every plan.

    Args:
        model: the whole model, which may know how its modules begin (`transformers`).
        module: one that holds parameters.
        path: its path in the whole model.
        seed: of the run.
        init: the user's own way; None: that of `transformers`, or the module's `reset_parameters`.

    Raises:
        EvenloadError: nobody knows how this module begins.
    """
    begin = init or _known(model, module, path)
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    own = [parameter for parameter in module.parameters(recurse=False) if not parameter.is_meta]
    devices = sorted({parameter.device.index or 0 for parameter in own if parameter.device.type == "cuda"})
    random = cast("Any", torch.random)
    with random.fork_rng(devices=devices), torch.no_grad():
        random.manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
        begin(module)


def _known(model: nn.Module, module: nn.Module, path: str) -> Init:
    for name in ("_init_weights", "init_module"):
        of_model = getattr(model, name, None)
        if callable(of_model):
            return cast("Init", of_model)
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        return lambda _: reset()
    raise EvenloadError(
        f"nobody knows how the parameters of {path or 'the model'} ({type(module).__name__}) begin",
        where="$.init",
        fix="give the module a `reset_parameters`, pass init=, or pass a model that has its values",
    )


def meta_buffers(model: nn.Module) -> list[str]:
    """Names of buffers without values: they were computed when the model was made, on the meta device."""
    named = cast("Mapping[str, torch.Tensor]", dict(model.named_buffers()))
    return [name for name, buffer in named.items() if buffer.is_meta]
