"""Recomputes chosen operators of a model in backward instead of keeping their results.

Importing this package does not import torch; its names do when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from evenload.recompute.handle import Handle, apply

__all__ = ["Handle", "apply"]

_HOMES: Final = {"Handle": "handle", "apply": "handle"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
