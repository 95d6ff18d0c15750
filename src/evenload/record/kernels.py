"""Results of operators as their kernels make them, where PyTorch's fake ones take another shape for their memory.

A fake operator says which shape a result has. A few kernels make more memory than that (a result that was larger once
keeps its storage), less (a gradient that nobody asked for), or something whose size no fake operator knows. They were
found by running all operators of PyTorch's own samples both ways on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import torch

from evenload.record._torch_private import (
    DispatchMode,
    bag,
    bag_backward,
    bag_forward_only,
    fused_rnn,
    fused_rnn_backward,
    log_softmax_backward,
    sparse_parts,
)

_aten: Final[Any] = torch.ops.aten
_torch: Final[Any] = torch
"""The same, where PyTorch does not say what its functions take."""
_PAGE: Final = 4096
_FP32: Final = 4


class Kernels(DispatchMode):
    """Runs the operators below as the kernels of a device do; all others pass.

    It needs a `FakeTensorMode` around it.
    """

    def __init__(self, *, cpu: bool) -> None:
        """Make the mode; `cpu`: the kernels are those of the CPU, otherwise what holds for any device."""
        DispatchMode.__init__(self)
        self._rules = ANYWHERE | ON_CPU if cpu else ANYWHERE | ON_ACCELERATORS

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        rule = self._rules.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        return rule(func, *args, **(kwargs or {}))


def onednn_lstm_workspace(*, steps: int, batch: int, width: int, hidden: int, size: int) -> int:
    """Bytes that oneDNN's LSTM of one layer and direction keeps between forward and backward.

    Args:
        steps: steps of the sequence.
        batch: sequences.
        width: numbers that enter at a step.
        hidden: numbers of the hidden state.
        size: bytes of a number.

    Source: `set_workspace_sizes`, `set_offsets` and `get_good_ld` in src/cpu/rnn/rnn_utils.hpp and .cpp of oneDNN.
    """
    widest = max(width, hidden)
    cells = 2 * (steps + 1) * batch
    spaces = (
        steps * batch * _row(4 * hidden, size) * size,  # gates
        steps * batch * _row(hidden, size) * size,  # hidden states before they are projected
        cells * _row(widest, size) * size,  # states
        cells * hidden * size,  # states of the cells
        cells * _row(widest, _FP32) * _FP32,  # gradients of the states, for the layer below
        cells * _row(widest, _FP32) * _FP32,  # for the step before
        cells * hidden * _FP32,  # and of the states of the cells
    )
    return sum(-(-space // _PAGE) * _PAGE for space in spaces)


def _row(length: int, size: int) -> int:
    """Numbers from one row of a matrix to the next: rows begin at 64 bytes, and not all of them at 4 KiB."""
    line = 64 // size
    row = -(-length // line) * line
    return row + line if row % 256 == 0 else row


def _sized(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The same tensor in a storage of at least so many bytes."""
    if nbytes <= tensor.untyped_storage().nbytes():
        return tensor
    memory = tensor.new_empty(-(-nbytes // tensor.element_size()))
    return memory.as_strided(tensor.shape, tensor.stride())


def _bytes(shape: Sequence[int], like: torch.Tensor) -> int:
    return prod(shape) * like.element_size()


def _reduced_loss(func: Any, input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
    """A loss that is computed for every element into the result, which then shrinks to their mean or sum."""
    result = func(input, target, *args, **kwargs)
    if result.dim() or not isinstance(result, torch.Tensor):
        return result
    return _sized(result, _bytes(_torch.broadcast_shapes(input.shape, target.shape), result))


def _like_input(func: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
    """A result that begins as large as the input."""
    return _sized(func(input, *args, **kwargs), _bytes(input.shape, input))


def _masked_gradients(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Gradients of a normalization, of which the fake operator makes one too many where the input needs none."""
    mask = _named(func, args, kwargs)["output_mask"]
    return tuple(one if wanted else None for one, wanted in zip(func(*args, **kwargs), mask, strict=True))


def _contiguous(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A result, the first of several, that lies in order, which a fake operator lays out as the input."""
    result = func(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        return _in_order(result)
    return (_in_order(result[0]), *result[1:])


def _in_order(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.is_contiguous() else tensor.new_empty(tensor.shape)


def _elementwise(func: Any, one: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A result laid out as a product of the arguments, which a fake operator lays out in order."""
    result = func(one, other, *args, **kwargs)
    strides = _aten.mul.Tensor(one, other).stride()
    return result if result.stride() == strides else result.new_empty_strided(result.shape, strides)


def _statistics(func: Any, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A normalization of 16-bit numbers with fp32 weights, whose means and deviations are fp32."""
    result, *statistics = func(inputs, *args, **kwargs)
    named = _named(func, (inputs, *args), kwargs)
    weights = [one for one in (named["weight"], named["bias"]) if one is not None]
    return (result, *(_of_type(one, weights[0].dtype if weights else inputs.dtype) for one in statistics))


def _batch_norm(func: Any, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Such a one whose result lies in order."""
    result, *statistics = _statistics(func, inputs, *args, **kwargs)
    return (_in_order(result), *statistics)


def _of_input(func: Any, grad: torch.Tensor, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Gradients of a normalization, the first of which is of the type of the input."""
    gradient, *others = func(grad, inputs, *args, **kwargs)
    return (None if gradient is None else _of_type(gradient, inputs.dtype), *others)


def _fp32_statistics(func: Any, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A normalization whose means and deviations are as exact as the sums that they come from."""
    result, *statistics = func(inputs, *args, **kwargs)
    return (result, *(_of_type(one, torch.promote_types(inputs.dtype, torch.float32)) for one in statistics))


def _of_type(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else tensor.new_empty(tensor.shape, dtype=dtype)


def _lstm(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer of oneDNN's LSTM in one direction: it keeps what forward has found out in a tensor of bytes."""
    output, hy, cy, workspace = func(*args, **kwargs)
    if not torch.is_grad_enabled():
        return output, hy, cy, workspace
    inputs, hidden = args[0], args[5]
    steps, batch, width = inputs.shape
    nbytes = onednn_lstm_workspace(
        steps=steps, batch=batch, width=width, hidden=hidden.shape[-1], size=inputs.element_size()
    )
    return output, hy, cy, workspace.new_empty(nbytes)


def _lstm_backward(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Its gradients: those of the two biases are equal, and not one tensor."""
    gradients = list(func(*args, **kwargs))
    gradients[4] = torch.empty_like(gradients[3])
    return tuple(gradients)


def _bag(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Bags of embeddings: what tells bags apart is larger by one entry while it is made, as are counts and maxima."""
    output, bags, sizes, maxima = func(*args, **kwargs)
    offsets = _named(func, args, kwargs)["offsets"]
    if bags.numel():
        bags = _sized(bags, _bytes((bags.numel() + 1,), bags))
    sizes = _sized(sizes, _bytes(offsets.shape, sizes))
    maxima = _sized(maxima, _bytes(sizes.shape, maxima))
    return output, bags, sizes, maxima


def _bag_forward_only(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The same without gradients."""
    output, bags, sizes, maxima = _bag(func, *args, **kwargs)
    offsets = _named(func, args, kwargs)["offsets"]
    return output, bags, sizes, _sized(maxima, _bytes(offsets.shape, maxima))


def _bag_backward(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Gradients of the embeddings: sparse ones have an entry for every index, which a fake operator does not count."""
    named = _named(func, args, kwargs)
    if not named["sparse"]:
        return func(*args, **kwargs)
    grad, indices = named["grad"], named["indices"]
    shape = (int(named["num_weights"]), grad.shape[-1])
    values = grad.new_empty(indices.numel(), grad.shape[-1])
    return _torch.sparse_coo_tensor(indices.view(1, -1), values, shape, check_invariants=False)


def _clone(func: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
    """A copy; that of a sparse tensor has as many entries as the tensor, which a fake operator forgets."""
    if tensor.layout is not torch.sparse_coo:
        return func(tensor, **kwargs)
    indices, values = (torch.empty_like(part(tensor)) for part in sparse_parts)
    return _torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False)


def _fused_rnn(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Layers of an accelerator's RNN; the weights lie in one buffer already, so that is none of its results."""
    output, hy, cy, reserve, _ = func(*args, **kwargs)
    return output, hy, cy, reserve, output.new_empty(0)


def _fused_rnn_backward(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Their gradients, of which PyTorch has no fake operator."""
    named = _named(func, args, kwargs)
    mask = named["output_mask"]
    of_input, of_hidden, of_cell = (
        torch.empty_like(named[name]) if wanted and named[name] is not None else None
        for name, wanted in zip(("input", "hx", "cx"), mask[:3], strict=True)
    )
    weights = [torch.empty_like(weight) for weight in named["weight"]] if mask[3] else []
    return of_input, of_hidden, of_cell, weights


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument of an operator by its name."""
    listed = func._schema.arguments  # noqa: SLF001  # the way to an operator's schema that PyTorch documents
    given = dict(zip((one.name for one in listed), args, strict=False))
    return {one.name: one.default_value for one in listed} | given | kwargs


Rule = Callable[..., Any]
ANYWHERE: Final[dict[Any, Rule]] = {
    _aten.mse_loss.default: _reduced_loss,
    _aten.smooth_l1_loss.default: _reduced_loss,
    _aten.soft_margin_loss.default: _reduced_loss,
    _aten.binary_cross_entropy.default: _reduced_loss,
    _aten.col2im.default: _like_input,
    _aten.im2col.default: _like_input,
    _aten.native_batch_norm_backward.default: _masked_gradients,
    _aten.batch_norm_backward.default: _masked_gradients,
    bag_backward: _bag_backward,
    _aten.clone.default: _clone,
    _aten.native_layer_norm_backward.default: _contiguous,
    _aten.mse_loss_backward.default: _contiguous,
    _aten.smooth_l1_loss_backward.default: _contiguous,
    _aten.huber_loss_backward.default: _contiguous,
    _aten.softplus_backward.default: _elementwise,
    _aten.native_dropout_backward.default: _elementwise,
    _aten.copysign.Tensor: _elementwise,
    _aten.div.Tensor_mode: _elementwise,
    _aten.floor_divide.default: _elementwise,
    _aten.logaddexp.default: _elementwise,
    _aten.logical_and.default: _elementwise,
    _aten.logical_or.default: _elementwise,
    _aten.logical_xor.default: _elementwise,
    _aten.heaviside.default: _elementwise,
    _aten.native_group_norm.default: _statistics,
    _aten.native_group_norm_backward.default: _of_input,
}
"""Operators whose kernels for all devices do the same."""
ON_CPU: Final[dict[Any, Rule]] = {
    _aten.mkldnn_rnn_layer.default: _lstm,
    _aten.mkldnn_rnn_layer_backward.default: _lstm_backward,
    bag: _bag,
    bag_forward_only: _bag_forward_only,
    _aten.native_layer_norm.default: _statistics,
    log_softmax_backward: _contiguous,
    _aten.log_sigmoid_forward.default: _contiguous,
    _aten.native_batch_norm.default: _batch_norm,
    _aten.pow.Scalar: _contiguous,
}
ON_ACCELERATORS: Final[dict[Any, Rule]] = {
    fused_rnn: _fused_rnn,
    fused_rnn_backward: _fused_rnn_backward,
    _aten.native_layer_norm.default: _fp32_statistics,
    _aten.native_batch_norm.default: _fp32_statistics,
}
