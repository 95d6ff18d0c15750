"""Data parallelism: what of a model's parameters, gradients and optimizer states is divided over the replicas.

ZeRO stages are those of S. Rajbhandari et al., arXiv 1910.02054. PyTorch has stage 3 and 2 as FSDP2 and stage 0 as
DistributedDataParallel.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from evenload.errors import EvenloadError
from evenload.runtime.parts import Parts
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
    model: nn.Module,
    parts: Parts,
    mesh: DeviceMesh,
    setup: Setup,
    *,
    gather_again: bool = False,
    equalize: bool = True,
) -> nn.Module:
    """Divide a model, or one chunk of a pipeline, over the replicas of a mesh of one dimension.

    Under FSDP2 each layer is gathered by itself, so is the embedding, and the final norm with the head, which backward
    needs at once and which therefore stay gathered. In a pipeline everything stays gathered from a step's first forward
    to its last backward, because gathering for each micro-batch would cost too much; `gather_again` lets go of layers
    after every forward. Parameters that embedding and head share are gathered with what is left.

    Args:
        model: what is trained, already divided by tensor parallelism.
        parts: its parts.
        mesh: the replicas.
        setup: stage of ZeRO and types.
        gather_again: in a pipeline, gather for every micro-batch.
        equalize: under DistributedDataParallel, start from the first replica's parameters; without, they must be equal.

    Returns:
        What to call in place of the model: the model itself under FSDP2.

    Raises:
        EvenloadError: PyTorch has no such data parallelism.
    """
    check_sharding(setup)
    if mesh.size() == 1:
        return model
    if setup.zero == 0:
        return DistributedDataParallel(model, device_mesh=mesh, init_sync=equalize)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": mixed_precision(setup)}
    let_go = setup.zero == 3 and (setup.pp == 1 or gather_again)
    tied = parts.embedding is not None and parts.head is not None and _shares(parts.embedding, parts.head)
    if parts.embedding is not None and not tied:
        fully_shard(parts.embedding, **options, reshard_after_forward=let_go)
    for layer in parts.layers:
        fully_shard(layer, **options, reshard_after_forward=let_go)
    end = [part for part in (parts.norm, parts.head) if part is not None]
    if end and not tied:
        fully_shard(end, **options, reshard_after_forward=False)
    return cast("nn.Module", fully_shard(model, **options))


def _shares(one: nn.Module, other: nn.Module) -> bool:
    mine = {id(parameter) for parameter in one.parameters()}
    return any(id(parameter) in mine for parameter in other.parameters())


def mixed_precision(setup: Setup) -> MixedPrecisionPolicy:
    """In which types FSDP2 gathers parameters and reduces gradients: those of the shards, unless they are fp32 copies.

    Gradients of fp32 shards are reduced in fp32, as they are kept.
    """
    if not setup.fsdp_mixed:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=DTYPES[setup.dtype], reduce_dtype=DTYPES[setup.gradient_dtype])
