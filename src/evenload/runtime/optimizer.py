"""The optimizer of one rank, its learning rate, and the norm of all gradients of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from evenload.runtime.pipeline import Pipeline
from evenload.runtime.settings import RunSettings


def make_optimizer(parameters: Iterable[nn.Parameter], settings: RunSettings) -> torch.optim.AdamW:
    """AdamW; parameters of one dimension, such as norms, do not decay."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    wide, narrow = [one for one in trained if one.dim() > 1], [one for one in trained if one.dim() < 2]
    groups = [
        {"params": wide, "weight_decay": settings.weight_decay},
        {"params": narrow, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]] or groups[:1],  # a rank without layers has nothing to train
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=settings.adamw == "fused",
        foreach=settings.adamw == "foreach",
    )


def learning_rate(step: int, settings: RunSettings) -> float:
    """Of a step, which is counted from 0.

    Examples:
        >>> run = RunSettings(steps=10, warmup=4, learning_rate=1.0, decay="linear")
        >>> [learning_rate(step, run) for step in (0, 3, 4, 9)]
        [0.25, 1.0, 1.0, 0.16666666666666663]
    """
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[settings.decay]
    return settings.learning_rate * max(0.0, factor)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Let every group of parameters learn at a rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(pipeline: Pipeline, most: float | None) -> torch.Tensor:
    """The norm of all gradients of the model; those of all ranks are scaled if it is above `most`.

    A tied parameter counts once.
    """
    copies = pipeline.copies()
    parameters = pipeline.parameters()
    own = [one.grad for one in parameters if one.grad is not None and id(one) not in copies]
    square = torch.zeros((), device=pipeline.ranks.device)
    for kind in _by_mesh(own):
        norm = get_total_norm(kind)
        square += (norm.full_tensor() if isinstance(norm, DTensor) else norm).float() ** 2
    if pipeline.ranks.pp > 1:
        cast("Any", distributed).all_reduce(square, group=pipeline.ranks.pp_group)
    total = square.sqrt()
    if most is not None:
        for kind in _by_mesh([one for one in parameters if one.grad is not None]):
            clip_grads_with_norm_(kind, most, total)
    return total


def _by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors in groups that one operator can take."""
    groups: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())
