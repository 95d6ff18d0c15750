"""Small models and training loops for the tests of the room."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)


def llama(*, layers=2, checkpointing=False, **changes):
    """A Llama small enough to train in a second, with the peak of a step in its backward."""
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**{**sizes, "num_hidden_layers": layers, "vocab_size": 1024, "use_cache": False, **changes})
    model = LlamaForCausalLM(config).train()
    if checkpointing:
        model.activation_checkpointing_enable(
            activation_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"}
        )
    return model


def train_llama(*, steps=2, optimizer="foreach", accumulate=1, autocast=False, tokens=(4, 64), dtype=None, **options):
    """Training steps of a Llama made here."""
    torch.manual_seed(0)
    model = llama(**options)
    if dtype is not None:
        model.to(dtype)
    choice = {"foreach": optimizer == "foreach", "fused": optimizer == "fused"}
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, **choice)
    for _ in range(steps):
        for _ in range(accumulate):
            batch = torch.randint(0, 1024, tokens)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
        adamw.step()
        adamw.zero_grad()


class Clamp(torch.autograd.Function):
    """Keeps a tensor where hooks on saved tensors do not look."""

    @staticmethod
    def forward(ctx, x):
        ctx.hidden = x <= 0
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.masked_fill(ctx.hidden, 0.0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + self.down(Clamp.apply(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks; `nested` checkpoints every block inside a checkpoint of all of them."""

    def __init__(self, width=32, layers=3, *, nested=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 8)
        self.nested = nested

    def forward(self, x):
        if self.nested:
            x = checkpoint(self._all, x, use_reentrant=False)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(x)

    def _all(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def train_stack(*, steps=2, nested=False, optimizer=None):
    torch.manual_seed(0)
    model = Stack(nested=nested)
    sgd = (optimizer or torch.optim.SGD)(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(torch.randn(64, 32)), torch.zeros(64, 8))
        loss.backward()
        sgd.step()
        sgd.zero_grad()
