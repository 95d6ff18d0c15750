"""The training of train.py without its mistakes."""

import gc
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from evenload import CustomOperator, PeriodicGC


class SiLU(CustomOperator):
    """The custom operator, which says what its backward uses: argument 0 of `bprop`."""

    used_bprop_inputs = (0,)

    def forward(self, x):
        """Return x * sigmoid(x)."""
        return x * torch.sigmoid(x)

    def bprop(self, x, _out, dout):
        """The derivative is sigmoid(x) * (1 + x * (1 - sigmoid(x)))."""
        s = torch.sigmoid(x)
        return dout * s * (1 + x * (1 - s))


def build():
    """The model of config.json, with the custom operator in its layers."""
    config = AutoConfig.from_pretrained(Path(__file__).parent)
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        layer.mlp.act_fn = SiLU()
    return model


def step(model, optimizer, tokens):
    """One training step; returns the token that the model thinks comes next."""
    output = model(input_ids=tokens, labels=tokens)
    loss, following = output.loss, output.logits[0, -1].argmax()
    del output  # it holds the logits, and backward needs only what autograd has saved
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return following


def main():
    """Train for eight steps."""
    gc.disable()
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    collector = PeriodicGC(every=4, report=print)
    history = []
    for _ in range(8):
        tokens = torch.randint(0, 2048, (4, 256))
        history.append(step(model, optimizer, tokens).item())
        collector.step()


if __name__ == "__main__":
    main()
