"""Data parallelism: what of a model's parameters, gradients and optimizer states is divided over the replicas.

ZeRO stages are those of S. Rajbhandari et al., arXiv 1910.02054. PyTorch has stage 3 and 2 as FSDP2 and stage 0 as
DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from evenload.errors import EvenloadError
from evenload.setup import Setup

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types in which PyTorch's modules compute."""


def check_sharding(setup: Setup) -> None:
    """Make sure that PyTorch divides what a setup says.

    Raises:
        EvenloadError: it does not; with what to say instead.
    """
    if setup.dp == 1:
        return
    if setup.zero == 1:
        raise EvenloadError(
            "zero is 1, and PyTorch's data parallelism divides gradients with the states, or nothing",
            where="$.zero",
            fix="use zero 2 or 3 (FSDP2), or 0 (DistributedDataParallel)",
        )
    if setup.zero == 0 and (setup.tp > 1 or setup.pp > 1):
        raise EvenloadError(
            "zero is 0, and DistributedDataParallel takes no parameters that tensor parallelism or a pipeline divides",
            where="$.zero",
            fix="use zero 2 or 3 (FSDP2)",
        )


def apply_data_parallel(
    model: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh, setup: Setup, *, gather_again: bool = False
) -> nn.Module:
    """Divide a model, or one chunk of a pipeline, over the replicas of a mesh of one dimension.

    Under FSDP2 each layer is gathered by itself, and what is outside the layers together. In a pipeline parameters stay
    gathered from a step's first forward to its last backward, because gathering them for each micro-batch would cost
    too much; `gather_again` lets go of them after every forward.

    Args:
        model: what is trained, already divided by tensor parallelism.
        layers: its layers.
        mesh: the replicas.
        setup: stage of ZeRO and types.
        gather_again: in a pipeline, gather for every micro-batch.

    Returns:
        What to call in place of the model: the model itself under FSDP2.

    Raises:
        EvenloadError: PyTorch has no such data parallelism.
    """
    check_sharding(setup)
    if mesh.size() == 1:
        return model
    if setup.zero == 0:
        return DistributedDataParallel(model, device_mesh=mesh)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": setup.zero == 3 and (setup.pp == 1 or gather_again),
        "mp_policy": mixed_precision(setup),
    }
    for layer in layers:
        fully_shard(layer, **options)
    return cast("nn.Module", fully_shard(model, **options))


def mixed_precision(setup: Setup) -> MixedPrecisionPolicy:
    """In which types FSDP2 gathers parameters and reduces gradients: those of the shards, unless they are fp32 copies.

    Gradients of fp32 shards are reduced in fp32, as they are kept.
    """
    if not setup.fsdp_mixed:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=DTYPES[setup.dtype], reduce_dtype=DTYPES[setup.gradient_dtype])
