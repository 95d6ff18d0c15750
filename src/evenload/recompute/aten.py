"""What is known about aten operators and those of other libraries: which are costly, random, collective, or final."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch.utils.flop_counter import flop_registry

from evenload.recompute._torch_private import is_empty, schema
from evenload.recompute.wrappers import tensors

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]

_INERT: Final = frozenset({"detach", "wait_tensor", "_wrap_tensor_autograd"})
"""Operators that hand on what they get: autograd's own book-keeping, and waiting for a collective. Those of the
namespace `prim` only ask what a tensor is."""
_HEAVY: Final = frozenset(
    {
        *("mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "matmul", "linear", "_scaled_mm"),
        *("_grouped_mm", "_scaled_grouped_mm", "_int_mm", "mkldnn_linear", "mkldnn_rnn_layer", "_thnn_fused_lstm_cell"),
        *("convolution", "_convolution", "conv1d", "conv2d", "conv3d", "cudnn_convolution", "mkldnn_convolution"),
        *("_sparse_semi_structured_mm", "_cudnn_rnn", "miopen_rnn", "lstm", "gru"),
    }
)
_PRODUCTS: Final = frozenset({"rmatmul", "imatmul", "einsum", "bilinear", "scaled_dot_product_attention", "matmul"})
"""Calls in Python that never convert what they get by themselves, beside those in `_HEAVY`."""
_COLLECTIVES: Final[dict[str, Collective]] = {
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "broadcast": "all_reduce",
    "all_to_all": "all_to_all",
    "alltoall": "all_to_all",
}
_COLLECTIVE_SPACES: Final = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d"})
_CORE_SPACES: Final = frozenset({"aten", "prim", "prims", *_COLLECTIVE_SPACES})
_FINAL: Final = frozenset(
    {
        # they also update running statistics, which their schema does not say
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"),
        *("_native_batch_norm_legit", "_batch_norm_with_update", "batch_norm_gather_stats_with_counts"),
        # they give the storage another size, or a tensor another storage
        *("set_", "resize_", "resize_as_", "resize"),
    }
)
_SHAPE_ONLY: Final = frozenset(
    {
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    }
)
_INDEXED: Final = frozenset({"index", "index_put", "index_put_"})
_READS: Final = frozenset({"_local_scalar_dense", "equal", "is_nonzero", "item"})


def is_inert(func: Any) -> bool:
    """Whether an operator only hands on what it gets."""
    return func.overloadpacket.__name__ in _INERT or func.namespace == "prim"


def is_heavy(func: Any) -> bool:
    """Whether an operator is a matrix product, attention, or a kernel of another library, whose cost nobody knows."""
    name = func.overloadpacket.__name__
    return name in _HEAVY or "attention" in name or func.namespace not in _CORE_SPACES


def collective(func: Any) -> Collective | None:
    """Which collective an operator is."""
    if func.namespace not in _COLLECTIVE_SPACES:
        return None
    name = func.overloadpacket.__name__.strip("_")
    return next((kind for start, kind in _COLLECTIVES.items() if name.startswith(start)), None)


def is_unequal(func: Any) -> bool:
    """Whether an operator belongs to FSDP gathering weights inside a layer, which goes otherwise in every layer."""
    return func.namespace in {"c10d", "fsdp"}


def is_autocast(aten: str, call: str) -> bool:
    """Whether an operator is autocast's own: a copy in another type, of what a matrix product or attention gets."""
    return aten == "_to_copy" and (call.strip("_") in _PRODUCTS or call in _HEAVY)


def reads_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether what follows a call may depend on data: it gives Python a number, or a result of unknown size."""
    if func.overloadpacket.__name__ in _READS or torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func.overloadpacket.__name__ in _INDEXED:  # by whole numbers the size is that of the numbers
        return any(tensor.dtype in {torch.bool, torch.uint8} for tensor in tensors(args[1:]))
    return True


def reads_only_shape(func: Any) -> bool:
    """Whether an operator takes only size and type from the tensors it is given."""
    return func.overloadpacket.__name__ in _SHAPE_ONLY


def flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Floating-point operations of a call, for matrix products and attention; 0 for everything else."""
    count = flop_registry.get(func.overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def unrepeatable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether calling an operator a second time could do something else, or do something twice."""
    return (
        func.overloadpacket.__name__ in _FINAL
        or func.namespace == "c10d"
        or isinstance(kwargs.get("generator"), torch.Generator)
        or any(isinstance(one, torch.Generator) for one in args)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """The default generator before a call that may draw from it."""

    device: torch.device
    state: torch.Tensor
    expected: bool
    """What the operator's tag and the call's arguments say, for fake tensors, on which nothing can be observed."""

    def used(self, result: Any) -> bool:
        """Whether the call drew something."""
        if any(is_empty(tensor) for tensor in tensors(result)):
            return self.expected
        return not torch.equal(self.state, generator_state(self.device))


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
    """The generator that a call may draw from; None if it surely draws nothing."""
    tagged = torch.Tag.nondeterministic_seeded in func.tags
    if func.namespace in _CORE_SPACES and not tagged:
        return None
    first = next(tensors((args, kwargs)), None)
    device = first.device if first is not None else torch.device(kwargs.get("device") or "cpu")
    if device.type == "meta":
        device = torch.device("cpu")
    expected = tagged and _probability(func, args, kwargs) != 0.0
    return Draw(device=device, state=generator_state(device), expected=expected)


def _probability(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The dropout probability of a call that has one."""
    for position, argument in enumerate(schema(func).arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return float(given or 0.0)
    return None


def generator_state(device: torch.device) -> torch.Tensor:
    """State of the default generator of a device."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the default generator of a device."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
