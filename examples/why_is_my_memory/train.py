"""Trains a small Llama, with three common memory mistakes; docs/why-is-my-memory.md finds them."""

import gc
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM


class SiLU(torch.autograd.Function):
    """A custom operator."""

    @staticmethod
    def forward(ctx, x):
        """Return x * sigmoid(x)."""
        y = x * torch.sigmoid(x)
        ctx.x, ctx.y = x, y
        return y

    @staticmethod
    def backward(ctx, grad):
        """The derivative is sigmoid(x) * (1 + x * (1 - sigmoid(x)))."""
        s = torch.sigmoid(ctx.x)
        return grad * s * (1 + ctx.x * (1 - s))


class CustomSiLU(nn.Module):
    """The operator as a module."""

    def forward(self, x):
        """Apply it."""
        return SiLU.apply(x)


def build():
    """The model of config.json, with the custom operator in its layers."""
    config = AutoConfig.from_pretrained(Path(__file__).parent)
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        layer.mlp.act_fn = CustomSiLU()
    return model


def main():
    """Train for eight steps."""
    gc.disable()  # as many do: its pauses come at another time on every rank
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    history = []
    for _ in range(8):
        tokens = torch.randint(0, 2048, (4, 256))
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(output.logits[0, -1].detach())


if __name__ == "__main__":
    main()
