"""A small training script with three common memory mistakes; docs/why-is-my-memory.md finds them."""

import torch
from torch import nn
from torch.nn.functional import mse_loss, silu


class Double(torch.autograd.Function):
    """Keeps its output where PyTorch does not look."""

    @staticmethod
    def forward(ctx, x):
        """Twice the input."""
        y = x * 2
        ctx.kept = y
        return y

    @staticmethod
    def backward(_ctx, grad):
        """Twice the gradient."""
        return grad * 2


class Block(nn.Module):
    """A layer with a custom operator in it."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """A residual branch."""
        return x + self.down(silu(self.up(Double.apply(x))))


class Model(nn.Module):
    """Four such layers."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(4))

    def forward(self, x):
        """All layers, one after the other."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def step(model, optimizer, outputs):
    """One training step."""
    batch = torch.randn(512, 64)
    prediction = model(batch)
    distances = (prediction.detach().unsqueeze(1) - prediction.detach()[:64]).abs()  # dead from here on
    loss = mse_loss(prediction, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    outputs.append(prediction.detach()[0])  # a row of it keeps all of it
    return distances.mean()


def main():
    """Train for eight steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    outputs = []
    for _ in range(8):
        step(model, optimizer, outputs)


main()
