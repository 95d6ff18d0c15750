"""A training loop of one's own under a plan.

Run it so: torchrun --nproc-per-node 2 examples/train/loop.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch import distributed, nn

import evenload
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy
from evenload.setup import Setup


class Layer(nn.Module):
    """A residual feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the layer has to say."""
        return x + self.narrow(self.act(self.wide(self.norm(x))))


class Decoder(nn.Module):
    """Embedding, layers, head."""

    def __init__(self, layers: int, width: int = 64, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens to logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    """Train for a few steps."""
    distributed.init_process_group("gloo")
    plan = Plan(
        setup=Setup(pp=2, micro_batch=4, micro_batches=4, seq=32, dtype="fp32", schedule="1f1b"),
        layout=Layout.from_counts([4, 3]),
        policy=Policy(select={"act": range(4)}),
    )
    pipeline, _ = evenload.parallelize(partial(Decoder, layers=7), plan)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3, fused=True)
    row = torch.arange(33).repeat(16, 1) + torch.arange(16)[:, None]
    for step in range(20):
        optimizer.zero_grad()
        loss = pipeline.step(row[:, :-1], target=row[:, 1:])
        optimizer.step()
        if loss is not None and step % 5 == 4:
            print(f"step {step + 1}: loss {loss:.3f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
