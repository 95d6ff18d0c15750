"""Recomputes chosen operators of a model in backward instead of keeping their results.

Importing this package does not import torch; its names do when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from evenload.recompute.bprop import CustomOperator
    from evenload.recompute.errors import RecomputeError, StaleTensorError
    from evenload.recompute.handle import Handle, apply
    from evenload.recompute.report import Report
    from evenload.recompute.selective import Selective, selective_checkpoint

__all__ = [
    "CustomOperator",
    "Handle",
    "RecomputeError",
    "Report",
    "Selective",
    "StaleTensorError",
    "apply",
    "selective_checkpoint",
]

_HOMES: Final = {
    "CustomOperator": "bprop",
    "Handle": "handle",
    "RecomputeError": "errors",
    "Report": "report",
    "Selective": "selective",
    "StaleTensorError": "errors",
    "apply": "handle",
    "selective_checkpoint": "selective",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
