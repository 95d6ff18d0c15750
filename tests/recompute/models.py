"""Small models that the tests of recomputation train: a toy and real Hugging Face ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

DEFAULT = (r"mlp\.mul", r"mlp\.act_fn\.silu")
"""The pair that MindFormers recomputes by default, in Hugging Face names."""


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """A feed-forward block with its norm and residual."""

    def __init__(self, hidden: int = 32, width: int = 88) -> None:
        super().__init__()
        self.norm = Norm(hidden)
        self.mlp = Mlp(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    """Blocks between two linear layers, so that no block's input is held from outside."""

    def __init__(self, make: Callable[[], nn.Module] = Block, layers: int = 3, hidden: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(8, hidden)
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.last = nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, **options)
        return self.last(x).square().mean()


def toy(make: Callable[[], nn.Module] = Block, *, layers: int = 3, dtype: torch.dtype = torch.float32):
    """(model, a function that runs its forward and returns the loss)."""
    torch.manual_seed(0)
    model = Stack(make, layers)
    if dtype is not torch.float32:  # under fake tensors a module cannot be converted
        model = model.to(dtype)
    x = torch.randn(2, 16, 8, dtype=dtype)
    return model, lambda: model(x)


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 128,
    "use_cache": False,
}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}


def hugging_face(family: str, *, dtype: torch.dtype = torch.float32, **config: Any):
    """(model, a function that runs its forward and returns the loss) of a small Hugging Face model."""
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, f"{family}Config")(**{**SMALL, **config})
    model = getattr(transformers, f"{family}ForCausalLM")(made)
    if dtype is not torch.float32:
        model = model.to(dtype)
    ids = torch.randint(0, 128, (2, 32))
    return model, lambda: model(input_ids=ids, labels=ids).loss


llama = partial(hugging_face, "Llama")
FAMILIES = {
    "llama": llama,
    "qwen3": partial(hugging_face, "Qwen3", head_dim=16),
    "mixtral": partial(hugging_face, "Mixtral", **MIXTURE),
    "mixtral with a loop over experts": partial(hugging_face, "Mixtral", experts_implementation="eager", **MIXTURE),
    "deepseek v2": partial(hugging_face, "DeepseekV2", n_group=1, **LATENT),
    "deepseek v3": partial(hugging_face, "DeepseekV3", n_group=2, **LATENT),
    "gemma 2": partial(hugging_face, "Gemma2", head_dim=16),
}
