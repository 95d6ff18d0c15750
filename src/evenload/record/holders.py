"""Which parts of storages are still referred to."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Final

from evenload.record._torch_private import address, plainly, use_count
from evenload.record.living import living_tensors

_OURS: Final = 3
"""References to a tensor that looking at it adds: the list, the variable, the argument of the count."""


@plainly
def held_parts() -> dict[int, dict[int, int]]:
    """Address of a storage -> offset and bytes of every tensor on it that somebody holds.

    A view keeps its base alive as a tensor. Such a base counts only if Python or the backward graph holds it as well.
    Tensors that never had a Python object are not seen.
    """
    tensors = living_tensors()
    views = Counter(id(view._base) for view in tensors if view._is_view())  # noqa: SLF001  # both are documented
    parts: dict[int, dict[int, int]] = {}
    for tensor in tensors:
        uses = use_count(tensor)
        by_python = sys.getrefcount(tensor) - (1 if uses > 1 else 0) > _OURS
        by_graph = uses > 1 + views[id(tensor)]
        if not (by_python or by_graph):
            continue
        try:
            held = parts.setdefault(address(tensor.untyped_storage()), {})
        except (NotImplementedError, RuntimeError):  # sparse, opaque, or without a storage any more
            continue
        offset = int(tensor.storage_offset())
        held[offset] = max(tensor.nbytes, held.get(offset, 0))
    return parts
