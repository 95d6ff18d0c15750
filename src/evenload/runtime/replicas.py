"""DistributedDataParallel on tensors without data."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import distributed, nn

from evenload.runtime._torch_private import GradBucket


def without_data(model: nn.Module, group: Any) -> None:
    """Let a DistributedDataParallel run on fake tensors; what it allocates stays the same.

    Its C++ takes two results apart that only a real process group has: that of an all-reduce, which therefore goes
    through a hook here, and the order of the buckets that the first replica announces, which stays as it was made.
    """
    wrapped: Any = model
    wrapped.register_comm_hook(group, _summed)
    wrapped.reducer = _SameBuckets(wrapped.reducer)


class _SameBuckets:
    """A reducer that never deals its buckets anew."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _summed(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    total = cast("torch.Tensor", bucket.buffer())
    cast("Any", distributed).all_reduce(total, group=group)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(total)
    return done


_summed.__annotations__ |= {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
"""PyTorch compares the annotations of a hook as objects; those of this file are text."""
