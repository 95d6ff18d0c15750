"""Sends tensors that are asked for on the target to the stand-in that a dry run computes on."""

from __future__ import annotations

from typing import Any

import torch

from evenload.record._torch_private import DispatchMode, to_copy


class Redirect(DispatchMode):
    """Makes on fake CPU tensors what is asked for on a device that this host need not have.

    In a dry run every tensor stands for one on the target, so moving one there changes nothing: it stays the same
    storage, as on a device that it is on already.
    """

    def __init__(self, kind: str) -> None:
        DispatchMode.__init__(self)
        self._kind = kind
        self._here = torch.device("cpu")

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, on the stand-in where it names the target."""
        if not kwargs or (device := kwargs.get("device")) is None or device.type != self._kind:
            return func(*args, **(kwargs or {}))
        if func is to_copy and _only_moves(args[0], kwargs):
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **{**kwargs, "device": self._here})


def _only_moves(tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether a copy is asked for because of the device alone."""
    if kwargs.get("memory_format") not in (None, torch.preserve_format):
        return False
    return kwargs.get("dtype") in (None, tensor.dtype) and kwargs.get("layout") in (None, tensor.layout)
