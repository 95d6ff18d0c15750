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
        RecomputeError: it runs inside a transform of `torch.func`, inside a checkpoint, under saved-tensor hooks of
            others, or where such hooks are switched off.
    """
    outer = outer_saved_tensor_hooks()
    checkpointed = getattr(layer, "gradient_checkpointing", False) and layer.training
    if outer is not None and outer[0].__module__ == "torch.utils.checkpoint":
        checkpointed = True
    if checkpointed or graph_task() != NO_TASK:  # a reentrant checkpoint runs its layers inside backward
        raise _checkpointed(name)
    if outer is not None:
        raise RecomputeError(
            f"layer {name!r} runs under saved-tensor hooks ({outer[0].__qualname__}), which would see nothing of what "
            "recomputation keeps",
            fix="recompute the layers that run outside of these hooks, or leave the hooks out",
        )
    if in_functorch():
        raise RecomputeError(
            f"layer {name!r} runs inside a transform of torch.func, which does not support recomputation",
            fix="call `handle.remove()` first, or use `loss.backward()` and `torch.autograd.grad`",
        )
    message = saved_tensor_hooks_error()
    if message is not None:
        raise RecomputeError(
            f"saved-tensor hooks are switched off round layer {name!r}: {message}",
            fix="call `handle.remove()` before running the model there",
        )


def _checkpointed(name: str) -> RecomputeError:
    return RecomputeError(
        f"layer {name!r} is checkpointed already, so that recomputing operators in it would change nothing",
        fix="switch checkpointing off (`model.gradient_checkpointing_disable()`), or use policy `full` for this layer",
    )
