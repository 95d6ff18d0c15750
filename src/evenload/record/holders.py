"""Which parts of storages Python's tensors still refer to."""

from __future__ import annotations

import gc

import torch

from evenload.record._torch_private import address


def held_parts() -> dict[int, dict[int, int]]:
    """Address of a storage -> offset and bytes of every tensor on it that Python holds.

    Tensors that only the backward graph holds are not among them.
    """
    parts: dict[int, dict[int, int]] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            tensor: torch.Tensor = thing
            try:
                held = parts.setdefault(address(tensor.untyped_storage()), {})
            except (NotImplementedError, RuntimeError):  # sparse, opaque, or without a storage any more
                continue
            offset = int(tensor.storage_offset())
            held[offset] = max(tensor.nbytes, held.get(offset, 0))
    return parts
