"""Runs a plan on `torch.distributed`. Importing this package does not import torch; its names do when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from evenload.runtime.pipeline import Pipeline, next_token_loss, parallelize
    from evenload.runtime.ranks import device_mesh

__all__ = ["Pipeline", "device_mesh", "next_token_loss", "parallelize"]

_HOMES: Final = {
    "Pipeline": "pipeline",
    "device_mesh": "ranks",
    "next_token_loss": "pipeline",
    "parallelize": "pipeline",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
