"""evenload fits, balances and proves the memory of large-model training."""

from typing import TYPE_CHECKING

from evenload._version import __version__
from evenload.errors import EvenloadError
from evenload.plan.layer_setting import LayerSetting

if TYPE_CHECKING:
    from evenload.record.recorder import record as record

__all__ = ["EvenloadError", "LayerSetting", "__version__"]


def __getattr__(name: str) -> object:
    """The rooms that import torch come in when they are asked for."""
    from importlib import import_module  # noqa: PLC0415  # `import evenload` stays free of torch

    if name in {"recompute", "record", "runtime"}:
        return import_module(f"evenload.{name}")
    homes = {
        "CustomOperator": "recompute.bprop",
        "PeriodicGC": "record.periodic_gc",
        "audit_functions": "record.audit",
        "dryrun": "record.dryrun",
        "parallelize": "runtime.pipeline",
    }
    if name in homes:
        return getattr(import_module(f"evenload.{homes[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
