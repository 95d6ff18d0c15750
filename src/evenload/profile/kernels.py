"""Which kernel `scaled_dot_product_attention` runs on a recent CUDA device (compute capability 8.0 or more)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal

Kernel = Literal["flash", "efficient", "math"]
HALF: Final = 2
"""Bytes of an element of bf16 and fp16."""
SINGLE: Final = 4
"""Bytes of an element of fp32."""
WIDEST: Final = 256
"""Widest head that the flash kernel takes."""
PADDED_TO: Final = 8
"""Heads of the flash kernel, and rows of a mask, are padded to a multiple of this."""
_ALIGNED: Final = {HALF: 8, SINGLE: 4}
"""Bytes of an element -> elements of which heads of the memory-efficient kernel must be a multiple: 16 bytes."""


def kernel(*, width: int, dims: Collection[int], same_heads: bool, masked: bool = False, square: bool = True) -> Kernel:
    """The first kernel that takes the tensors: flash, memory-efficient, or products and a softmax.

    Source: PyTorch, `use_flash_attention` and `use_mem_efficient_attention`, asked in this order, in
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.

    Args:
        width: bytes of an element of a floating-point type that kernels know (bf16, fp16, fp32); others have none.
        dims: widths of the heads of queries, keys and values.
        same_heads: keys and values have as many heads as queries; only the flash kernel reads grouped ones.
        masked: there is a mask beside causality; the flash kernel takes none.
        square: as many keys as queries, or no causality.

    Examples:
        >>> kernel(width=2, dims={100}, same_heads=False)
        'flash'
        >>> kernel(width=4, dims={128}, same_heads=True), kernel(width=4, dims={128}, same_heads=False)
        ('efficient', 'math')
    """
    if width == HALF and not masked and square and len(set(dims)) == 1 and max(dims) <= WIDEST:
        return "flash"
    align = _ALIGNED.get(width)
    if align and same_heads and all(dim % align == 0 for dim in dims):
        return "efficient"
    return "math"


def rounded(size: int, multiple: int) -> int:
    """The least multiple of a number that is not below a size."""
    return -(-size // multiple) * multiple
