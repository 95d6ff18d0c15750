"""What a layer holds on one rank whatever runs: parameters, gradients, optimizer states, to the byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from evenload.model import Attention, Layer, Model, Split, Tensor
from evenload.setup import WIDTH, Setup

MOMENTS: Final = {"adamw": 2, "sgd": 0, "none": 0}
"""States per parameter: AdamW has two moments, SGD without momentum none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Static:
    """Static memory of one layer on one rank, in bytes."""

    count: int = 0
    """Parameters (elements) that the rank computes with, before ZeRO divides them."""
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    """Optimizer states and main copies."""

    @property
    def total(self) -> int:
        """All three."""
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: Static) -> Static:
        return Static(
            count=self.count + other.count,
            parameters=self.parameters + other.parameters,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
        )


def static_of(layer: Layer, model: Model, setup: Setup) -> Static:
    """Static memory of a layer on the first rank of its groups, which holds the largest part where parts differ.

    ZeRO divides optimizer states (1), gradients too (2), parameters too (3) over the ranks that hold the same
    parameters: dp * cp ranks, for routed experts the replicas of the expert. Source: S. Rajbhandari et al., "ZeRO",
    arXiv 1910.02054, section 5. PyTorch has stage 2 as FSDP2 that gathers before forward and lets go in backward: its
    parameters are divided too, and what is gathered is a buffer. In a pipeline it adds whole gradients up, and divides
    them only after the last micro-batch.
    """
    total = Static()
    for tensor in held_tensors(layer, model, setup):
        total += _static(tensor, layer, setup)
    if setup.backend == "torch":
        total += Static(parameters=sum(buffer.numel * WIDTH["fp32"] for buffer in layer.buffers))
    return total


def held_tensors(layer: Layer, model: Model, setup: Setup) -> tuple[Tensor, ...]:
    """Tensors that the layer holds: a tied head has its own copy of the embedding when they are on different stages."""
    if layer.role == "head" and model.tied and setup.pp > 1:
        weight = next(tensor for tensor in model.embedding.tensors if tensor.split is Split.VOCABULARY)
        return (*layer.tensors, weight)
    return layer.tensors


def rank_elements(tensor: Tensor, layer: Layer, setup: Setup) -> int:
    """Elements of a tensor that one rank computes with, after tensor and expert parallelism."""
    match tensor.split:
        case Split.REPLICATED:
            return tensor.numel
        case Split.TENSOR:
            return _part(tensor.numel, setup.tp)
        case Split.KEY_VALUE:
            heads = layer.attention.kv_heads if isinstance(layer.attention, Attention) else setup.tp
            return tensor.numel // heads * _part(heads, setup.tp)  # above kv_heads ranks, heads are replicated
        case Split.VOCABULARY:
            return setup.vocabulary_rows(tensor.shape[0]) * (tensor.numel // tensor.shape[0])
        case Split.EXPERT:
            return _part(_part(tensor.numel, setup.ep), setup.expert_tp)


def replicas(tensor: Tensor, setup: Setup) -> int:
    """Ranks over which ZeRO divides a tensor."""
    return setup.expert_dp if tensor.split is Split.EXPERT else setup.dp * setup.cp


def is_fsdp(setup: Setup) -> bool:
    """PyTorch's FSDP2 divides parameters, gradients and optimizer states."""
    return setup.backend == "torch" and setup.zero >= 2


def computed_width(tensor: Tensor, setup: Setup) -> int:
    """Bytes of an element of a tensor as layers compute with it: FSDP's own mixed precision converts all of them."""
    return WIDTH["fp32" if _wide(tensor, setup) and not setup.fsdp_mixed else setup.dtype]


def gradient_width(tensor: Tensor, setup: Setup) -> int:
    """Bytes of an element of a tensor's accumulated gradient."""
    return WIDTH[(setup.grad_dtype or "fp32") if _wide(tensor, setup) else setup.gradient_dtype]


def _wide(tensor: Tensor, setup: Setup) -> bool:
    """Whether the parameter is in fp32 whatever the model's type: it is its own main copy."""
    return tensor.fp32 and setup.backend == "torch"


def _static(tensor: Tensor, layer: Layer, setup: Setup) -> Static:
    count = rank_elements(tensor, layer, setup)
    shard = _part(count, replicas(tensor, setup))
    wide = _wide(tensor, setup)
    state = MOMENTS[setup.optimizer] * WIDTH[(setup.optimizer_dtype or "fp32") if wide else setup.moment_dtype]
    if setup.main_copies and not wide and not setup.fsdp_mixed:
        state += WIDTH["fp32"]
    return Static(
        count=count,
        parameters=(shard if setup.zero >= 3 or is_fsdp(setup) else count)
        * WIDTH["fp32" if wide else setup.parameter_dtype],
        gradients=(shard if setup.zero >= 2 and not (is_fsdp(setup) and setup.pp > 1) else count)
        * gradient_width(tensor, setup),
        optimizer=(shard if setup.zero >= 1 else count) * state,
    )


def _part(whole: int, ranks: int) -> int:
    return -(-whole // ranks)
