"""Where a tensor lies in its storage, and how to make it again from another tensor on the same storage.

A *value* is the content of one storage (`evenload.plan.operators.Value`). Operators read it through tensors of many
shapes; each such view is noted by its distance from the value's *anchor*, the first tensor that was seen on the
storage. Distances are in bytes, because a view may have another type than the anchor, and relative, because a
micro-batch may be a slice of a larger tensor that starts elsewhere next time.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from evenload.recompute._torch_private import is_wrapper, wait
from evenload.recompute.wrappers import unwrap


class Geometry(NamedTuple):
    """How a tensor lies in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """Bytes from the start of the storage."""
    dtype: torch.dtype


class Ref(NamedTuple):
    """A tensor on a value."""

    value: int
    """Number of the value."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    distance: int
    """Bytes from the start of the value's anchor."""
    dtype: torch.dtype


def geometry(tensor: torch.Tensor) -> Geometry:
    """How a strided tensor lies in its storage."""
    start = cast("int", tensor.storage_offset()) * tensor.element_size()
    return Geometry(tuple(tensor.shape), tensor.stride(), start, tensor.dtype)


def ref(value: int, tensor: torch.Tensor, anchor: Geometry) -> Ref:
    """A tensor relative to the anchor of its value."""
    size, stride, start, dtype = geometry(tensor)
    return Ref(value, size, stride, start - anchor.start, dtype)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided memory and nothing more: no sparse layout, no lazy conjugate or negative."""
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def matches(tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a tensor has this shape, layout and type."""
    return tensor.shape == size and tensor.dtype is dtype and same_layout(size, tensor.stride(), stride)


def same_layout(size: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether tensors of one size with these strides lie alike.

    Along a dimension of one element the stride says nothing, and fake tensors choose it otherwise than real ones.
    """
    if one == other:
        return True
    return len(one) == len(other) and all(a == b or n == 1 for n, a, b in zip(size, one, other, strict=True))


def view(base: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], distance: int, dtype: torch.dtype):
    """The tensor at `distance` bytes from `base`, on the same storage.

    Args:
        base: any plain tensor on the storage.
        size: shape of the result.
        stride: in elements of the result.
        distance: bytes from the start of `base` to the start of the result.
        dtype: type of the result.
    """
    if dtype is base.dtype:
        if not distance and base.shape == size and base.stride() == stride:
            return base
        return base.as_strided(size, stride, base.storage_offset() + distance // base.element_size())
    start = base.storage_offset() * base.element_size() + distance
    made = torch.empty(0, dtype=dtype, device=base.device)
    return cast("Any", made).set_(base.untyped_storage(), start // made.element_size(), size, stride)


def whole_copy(base: torch.Tensor) -> torch.Tensor:
    """A copy of the whole storage under `base`; the result lies in it as `base` does in its own."""
    flat = base.as_strided((int(base.untyped_storage().nbytes()) // base.element_size(),), (1,), 0)
    return flat.clone().as_strided(base.shape, base.stride(), base.storage_offset())


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same content, bit for bit: a no-number equals itself.

    Of tensors that ranks divide, each rank compares its own part: a DTensor's `equal` would ask every process of the
    run, and those of other stages of a pipeline do not answer.
    """
    first, second = (unwrap(each)[0] for each in (one, other))
    if first is None or second is None or first.shape != second.shape:
        return False
    if is_wrapper(one):
        first, second = wait(first), wait(second)
    return torch.equal(_bytes(first), _bytes(second))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
