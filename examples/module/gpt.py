"""A language model of one's own: what a dry run, an estimate and a plan need is a function that builds it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

WIDTH, LAYERS, VOCABULARY = 2048, 24, 50_000


class Block(nn.Module):
    """Attention and a feed-forward part, each beside the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states, [batch, tokens, width]."""
        query, key, value = (
            part.unflatten(-1, (16, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Returns the loss of predicting its tokens."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens, [batch, tokens]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build() -> tuple[nn.Module, torch.Tensor]:
    """The model, and what it is called with."""
    return GPT().bfloat16(), torch.zeros(2, 2048, dtype=torch.int64)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step of one's own: gradients are clipped before the optimizer uses them."""
    model(torch.zeros(2, 2048, dtype=torch.int64)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


class Choosing(nn.Module):
    """Works on the half of the rows that its data chooses, which no dry run can know."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.inner = nn.Linear(64, 1), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows, [rows, 64]."""
        score = self.gate(x)[:, 0]
        chosen = (score > score.median()).nonzero()[:, 0]
        return x.index_add(0, chosen, self.inner(x[chosen]).relu())


class Chooser(nn.Module):
    """Many such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Choosing() for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows, [rows, 64]."""
        for layer in self.layers:
            x = layer(x)
        return x


def chooser() -> tuple[nn.Module, torch.Tensor]:
    """A model whose shapes depend on its data."""
    return Chooser(), torch.rand(256, 64)
