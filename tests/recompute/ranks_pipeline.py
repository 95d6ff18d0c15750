"""What two ranks do together as stages of a pipeline whose backward comes in parts."""

from __future__ import annotations

from typing import Any

import torch
from tests.recompute.measuring import same
from tests.recompute.models import FAMILIES, toy
from torch import distributed, nn

from evenload.plan.policy import LayerPolicy
from evenload.recompute import apply


class Part(nn.Module):
    """One stage of one layer."""

    def __init__(self, model: nn.Module, index: int, family: str) -> None:
        super().__init__()
        layers = model.layers if family == "toy" else model.model.layers
        self.layers = nn.ModuleList([layers[index]])
        self.rotary = None if family == "toy" else model.model.rotary_emb

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = {}
        if self.rotary is not None:
            options = {"position_embeddings": self.rotary(x, torch.arange(x.shape[1])[None])}
        for layer in self.layers:
            x = layer(x, **options)
        return x


def piped(family: str, schedule: str, recomputed: bool) -> dict[str, Any]:
    """Gradients of one rank's stages after a step, and how often their layers ran."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    model, _ = toy(layers=4) if family == "toy" else FAMILIES["llama"](num_hidden_layers=4)
    rank, x = distributed.get_rank(), torch.randn(4, 16, 32 if family == "toy" else 64)
    indices = (rank, 3 - rank) if schedule.startswith(("ZBV", "DualPipeV")) else (rank, rank + 2)
    parts = [Part(model, index, family) for index in indices]
    calls: list[int] = []
    for part in parts:
        part.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    example = (x[:1].clone().requires_grad_(),)
    stages = [
        PipelineStage(
            part, index, 4, torch.device("cpu"), input_args=example if index else (x[:1],), output_args=example
        )
        for part, index in zip(parts, indices, strict=True)
    ]
    made = get_schedule_class(schedule)(
        stages, n_microbatches=4, loss_fn=lambda y, target: (y - target).square().mean()
    )
    handles = [apply(part, LayerPolicy(full=True), layers="layers", whole="engine") for part in parts if recomputed]
    for _ in range(2):
        for part in parts:
            part.zero_grad()
        calls.clear()
        last = any(stage.is_last for stage in stages)
        made.step(*((x,) if rank == 0 else ()), **({"target": x * 2} if last else {}), return_outputs=False)
    served = [dict(state.served) for handle in handles for state in handle._states]
    freed = sum(handle.report().freed for handle in handles)
    for handle in handles:
        handle.remove()
    found = [None if one.grad is None else one.grad.clone() for part in parts for one in part.parameters()]
    return {"gradients": found, "calls": len(calls), "served": served, "freed": freed}


def zero_bubble() -> Any:
    """Backward for inputs and for weights apart: forward must not run again for each group of parameters."""
    results = {}
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "Interleaved1F1B"):
        for family in ("toy", "llama"):
            plain, ours = (piped(family, schedule, recomputed) for recomputed in (False, True))
            results[schedule, family] = {
                "same": same(ours["gradients"], plain["gradients"]),
                "calls": (plain["calls"], ours["calls"]),
                "served": ours["served"],
                "freed": ours["freed"],
            }
    return results


SCENARIOS = (zero_bubble,)
