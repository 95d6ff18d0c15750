"""A storage that is alive.

PyTorch keeps one Python object per storage for as long as the storage lives, so a weak reference to that object says
when it is gone.
"""

from __future__ import annotations

import weakref
from typing import Final

import torch

WHOLE: Final[dict[int, int]] = {}
"""Stands for a storage that backward read as a whole."""


class Entry(weakref.ref[torch.UntypedStorage]):
    """A living storage."""

    __slots__ = ("collected", "key", "nbytes", "outside", "parts", "position")

    key: int
    nbytes: int
    position: int
    """Of its allocation in the log; -1: it never had any bytes."""
    outside: bool
    """Made outside the phases, and not read by forward yet."""
    parts: dict[int, int] | None
    """Offset -> bytes of the parts that backward read; `WHOLE`; None: nothing yet."""
    collected: bool
    """Freed by Python's garbage collector."""

    def read(self, tensor: torch.Tensor) -> None:
        """Note which part of the storage backward reads."""
        nbytes = tensor.nbytes
        if nbytes >= self.nbytes:
            self.parts = WHOLE
            return
        if self.parts is None:
            self.parts = {}
        offset = int(tensor.storage_offset())
        self.parts[offset] = max(nbytes, self.parts.get(offset, 0))
