"""Autocast as CUDA does it, for fake tensors that say they are on the CPU.

Which operators autocast touches is asked of PyTorch, which has the kernels of CUDA's autocast in every build; what it
does with each of those that the CPU's autocast leaves alone is the table here. Source: aten/src/ATen/autocast_mode.h.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from evenload.record._torch_private import excluded, has_kernel, operator_names

_LOWER: Final = frozenset(
    (
        *("_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "addmv", "addr", "mv"),
        *("chain_matmul", "einsum", "linalg_multi_dot", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "gru_cell"),
        *("lstm_cell", "rnn_relu_cell", "rnn_tanh_cell", "_scaled_dot_product_flash_attention"),
    )
)
"""Run in the 16-bit type."""
_PROMOTED: Final = frozenset(
    (
        *("addcdiv", "addcmul", "atan2", "bilinear", "cross"),
        *("dot", "vdot", "index_put", "tensordot", "scatter_add"),
    )
)
"""Run in the widest type of their arguments."""
_TYPED: Final = frozenset(
    ("softmax", "log_softmax", "cumprod", "cumsum", "sum", "linalg_vector_norm", "linalg_matrix_norm")
)
"""Make fp32 results by their own argument `dtype`; all others that CUDA's autocast touches run in fp32."""


def install(library: Any) -> None:
    """Give a library the kernels of CUDA's autocast for tensors of the CPU."""
    for name in _differing():
        operator = _operator(name)
        if operator is not None:
            library.impl(name.removeprefix("aten::"), _kernel(operator, name), "AutocastCPU")


@cache
def _differing() -> tuple[str, ...]:
    """Operators of `aten` that CUDA's autocast touches and the CPU's does not."""
    return tuple(
        name
        for name in operator_names()
        if name.startswith("aten::") and has_kernel(name, "AutocastCUDA") and not has_kernel(name, "AutocastCPU")
    )


def _operator(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _kernel(operator: Any, name: str) -> Callable[..., Any]:
    word = name.removeprefix("aten::").partition(".")[0]
    typed = word in _TYPED and any(argument.name == "dtype" for argument in operator._schema.arguments)  # noqa: SLF001

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with excluded("AutocastCPU"):
            if typed:
                if args and _eligible(args[0]) and kwargs.get("dtype") is None and not _given(operator, args):
                    kwargs = {**kwargs, "dtype": torch.float32}
                return operator(*args, **kwargs)
            kind = _type(word, args, kwargs)

            def cast(value: Any) -> Any:
                return value.to(kind) if _eligible(value) and value.dtype != kind else value

            return operator(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel


def _given(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether the type of the result is among the positional arguments."""
    pairs = zip(operator._schema.arguments, args, strict=False)  # noqa: SLF001  # the schema
    return any(argument.name == "dtype" and value is not None for argument, value in pairs)


def _type(word: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    if word in _LOWER:
        return torch.get_autocast_dtype("cpu")
    if word in _PROMOTED and not any(
        _eligible(value) and value.dtype == torch.float32 for value in tree_leaves((args, kwargs))
    ):
        return torch.get_autocast_dtype("cpu")
    return torch.float32


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
