"""Training on two ranks, and what a step of it costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from tests.recompute.measuring import Alive, Operators, allocated, same
from torch import distributed, nn

from evenload.recompute import apply

RANKS = 2
EVERYTHING = (".*", r".*\..*")
ALL = frozenset(range(3))
"""The layers of the models here."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


class Training:
    """A model, its forward, and what a step of it costs."""

    def __init__(self, model: nn.Module, forward: Callable[[], torch.Tensor], layers: nn.Module | None = None) -> None:
        self.model = model
        self.forward = forward
        self.layers = layers if layers is not None else model
        self.step()
        with Operators() as seen:
            self.expected, self.collectives = self.step()
        self.operators = seen.counts
        self.kept = self.keeps()

    def step(self) -> tuple[list[torch.Tensor | None], dict[str, int]]:
        self.model.zero_grad()
        torch.manual_seed(3)
        with Operators() as seen:
            self.forward().backward()
        gradients = [None if one.grad is None else local(one.grad) for one in self.model.parameters()]
        return gradients, collectives(seen)

    def keeps(self) -> int:
        alive = Alive()
        with alive:
            loss = self.forward()
        kept = []
        for _ in range(10):  # threads of gloo let go of their buffers when they come to it
            time.sleep(0.01)
            kept.append(alive.nbytes)
        loss.backward()
        return min(kept)

    def under(self, *policy: Any, **options: Any) -> dict[str, Any]:
        """Three steps with recomputation, next to those without."""
        from torch._C._distributed_c10d import _get_work_registry_size

        with apply(self.layers, *policy, **options) as handle:
            steps = [self.step() for _ in range(2)]
            with Operators() as seen:
                steps.append(self.step())
            kept = self.keeps()
            held, _, loss = allocated(self.forward)
            loss.backward()
            report = handle.report()
            return {
                "same": [same(gradients, self.expected) for gradients, _ in steps],
                "again": dict(seen.counts - self.operators),
                "freed": self.kept - kept,
                "predicted": report.freed,
                "kept": kept,
                "held": held,
                "before": self.collectives,
                "after": steps[-1][1],
                "served": [dict(state.served) for state in handle._states],
                "declined": [
                    one.reason for state in handle._states if state.last for one in state.last.decision.declined
                ],
                "notices": [notice for kind in report.kinds for notice in kind.notices],
                "unwaited": _get_work_registry_size(),
            }


def collectives(seen: Operators) -> dict[str, int]:
    """Collectives that ran, by kind."""
    words = ("all_gather", "allgather", "reduce_scatter", "all_reduce", "allreduce")
    found = {name: count for name, count in seen.counts.items() if any(word in name for word in words)}
    found.pop("all_gather_copy_in", None)  # FSDP's own copy, no collective
    return found


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(distributed.get_rank())
    return torch.randint(0, 128, (2, 32), generator=generator)
