"""Every private name of PyTorch that simulated ranks use, looked up once and checked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Final

import torch

from evenload.errors import EvenloadError


def _find(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        raise EvenloadError(
            f"this PyTorch ({torch.__version__}) has no {module}.{name}, which simulated ranks need",
            fix="use PyTorch 2.13 or 2.14",
        ) from None


FakeStore: Final[Any] = _find("torch.testing._internal.distributed.fake_pg", "FakeStore")
"""What ranks that do not exist agree by; importing it makes the backend `fake` known, which sends nothing."""
without_fake_tensors: Final[Callable[[], AbstractContextManager[Any]]] = _find(
    "torch._subclasses.fake_tensor", "unset_fake_temporarily"
)
"""A context in which tensors are real again: meshes and shards are laid out with real indices."""
group_named: Final[Callable[[str], Any]] = _find("torch.distributed.distributed_c10d", "_resolve_process_group")
"""The process group of a name, which is what functional collectives are given."""
GradBucket: Final[Any] = _find("torch.distributed", "GradBucket")
"""What DistributedDataParallel hands to communication hooks."""
PipelineSchedule: Final[Any] = _find("torch.distributed.pipelining.schedules", "_PipelineSchedule")
"""What every schedule derives from."""
schedules: Final[Any] = import_module("torch.distributed.pipelining.schedules")
"""Where schedules look for the function that exchanges tensors."""
InferenceMode: Final[Any] = _find("torch.distributed.pipelining.stage", "InferenceMode")
"""Whether stages are told the shapes of what they exchange."""


def forget_meshes() -> None:
    """Let DTensor forget earlier meshes: their groups are gone, and all meshes of one shape are equal to it."""
    _find("torch.distributed.tensor.debug", "_clear_sharding_prop_cache")()
    _find("torch.distributed.tensor._redistribute", "_gen_transform_infos").cache_clear()
