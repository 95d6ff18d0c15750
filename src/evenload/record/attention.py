"""Fused attention as the target chooses it, on fake and meta tensors."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from evenload.profile.kernels import PADDED_TO, Kernel, kernel
from evenload.record._torch_private import efficient_attention, flash_attention, math_attention

_KNOWN = (torch.float16, torch.bfloat16, torch.float32)


def choose(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
) -> Kernel:
    """What `scaled_dot_product_attention` runs on a recent CUDA device; see `evenload.profile.kernels`."""
    tensors = (query, key, value)
    if any(tensor.dim() != 4 or tensor.stride(-1) != 1 or tensor.numel() == 0 for tensor in tensors):
        return "math"
    return kernel(
        width=query.element_size() if query.dtype in _KNOWN else 0,
        dims={tensor.shape[-1] for tensor in tensors},
        same_heads=query.shape[1] == key.shape[1] == value.shape[1],
        masked=mask is not None,
        square=query.shape[-2] == key.shape[-2] or not causal,
    )


def attention(  # noqa: PLR0917  # the signature of the operator
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` with the operators that run on the target.

    Source of the padding and of what becomes of masks: aten/src/ATen/native/transformers/attention.cpp.
    """
    backend = choose(query, key, value, attn_mask, causal=is_causal)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, torch.full((), float("-inf"), dtype=query.dtype, device=query.device))
    if backend == "flash":
        width = query.shape[-1]
        beyond = -width % PADDED_TO
        if beyond:
            scale = width**-0.5 if scale is None else scale
            query, key, value = (pad(tensor, (0, beyond)) for tensor in (query, key, value))
        out = flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
        return out[0][..., :width] if beyond else out[0]
    if backend == "efficient":
        keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        return efficient_attention(query, key, value, bias, keep, dropout_p, is_causal, scale=scale)[0]
    return math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as the memory-efficient kernel takes it: added to the scores, rows padded to 16 bytes."""
    beyond = -mask.shape[-1] % PADDED_TO
    if beyond:
        mask = pad(mask, (0, beyond))[..., : key.shape[-2]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[-2], key.shape[-2])
