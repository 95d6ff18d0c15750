"""Where recomputation cannot work, and what to do about it."""

from __future__ import annotations

import torch

from evenload.recompute._torch_private import (
    NO_TASK,
    graph_task,
    in_functorch,
    outer_saved_tensor_hooks,
    saved_tensor_hooks_error,
)
from evenload.recompute.errors import RecomputeError


def require_room(layer: torch.nn.Module, name: str) -> None:
    """Raise unless a layer can be recomputed where it runs now.

    Raises:
        RecomputeError: it runs inside a transform of `torch.func`, a checkpoint, or where saved-tensor hooks are off.
    """
    outer = outer_saved_tensor_hooks()
    if outer is not None and outer[0].__module__ == "torch.utils.checkpoint":
        raise _checkpointed(name)
    if getattr(layer, "gradient_checkpointing", False) and layer.training:
        raise _checkpointed(name)
    if graph_task() != NO_TASK:
        raise _checkpointed(name)
    if in_functorch():
        raise RecomputeError(
            f"layer {name!r} runs inside a transform of torch.func, which does not support recomputation",
            fix="call `handle.remove()` first, or use `loss.backward()` and `torch.autograd.grad`",
        )
    message = saved_tensor_hooks_error()
    if message is not None:
        raise RecomputeError(f"saved-tensor hooks are switched off round layer {name!r}: {message}")


def _checkpointed(name: str) -> RecomputeError:
    return RecomputeError(
        f"layer {name!r} is checkpointed already, so that recomputing operators in it would change nothing",
        fix="switch checkpointing off (`model.gradient_checkpointing_disable()`), or use policy `full` for this layer",
    )
