"""One step of the optimizer: the same code for a run and for its rehearsal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from evenload.runtime.optimizer import clip_gradients
from evenload.runtime.pipeline import Pipeline
from evenload.runtime.settings import RunSettings

Batch = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Number of a step of the schedule -> its tokens and targets."""


class Stepped(NamedTuple):
    """What a step found."""

    loss: torch.Tensor
    """Mean over this pipeline's tokens."""
    norm: torch.Tensor
    """Of all gradients together, before clipping."""


def train_step(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer, settings: RunSettings, batch: Batch, step: int
) -> Stepped:
    """Forward, backward, clipping, and the optimizer.

    Args:
        pipeline: what runs forward and backward.
        optimizer: of this rank's parameters.
        settings: how many steps of the schedule, and the largest norm.
        batch: gives tokens.
        step: of the optimizer, counted from 0.
    """
    optimizer.zero_grad()
    loss = torch.zeros((), device=pipeline.ranks.device)
    for part in range(settings.accumulation):
        tokens, target = batch(step * settings.accumulation + part)
        last = part == settings.accumulation - 1
        loss += pipeline.share(pipeline.step(tokens, target, accumulate=not last))
    norm = clip_gradients(pipeline, settings.clip)
    cast("Any", optimizer).step()
    return Stepped(loss=loss, norm=norm)
