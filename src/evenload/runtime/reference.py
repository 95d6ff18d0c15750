"""A small decoder of the Llama family, for runs without transformers.

Names and shapes are those of Hugging Face's `LlamaForCausalLM`, so that weights, recompute patterns and tensor-parallel
plans are the same for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, cast

import torch
from torch import nn
from torch.nn import functional

from evenload.errors import EvenloadError, shown

FAMILIES: Final = ("llama", "mistral", "reference")
"""`model_type` of configurations that this model can be built from."""
_NOT_DONE: Final = ("rope_scaling", "sliding_window", "attention_bias", "mlp_bias")
"""Keys that would change what such a model computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of the model, by the names of a Hugging Face configuration."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False


def read_sizes(config: Mapping[str, Any], where: str = "config.json") -> Sizes:
    """The sizes in a configuration.

    Raises:
        EvenloadError: one is missing or wrong, or the model needs what this one does not have.
    """
    kind = config.get("model_type", "reference")
    if kind not in FAMILIES:
        raise EvenloadError(
            f"the built-in model is none of the type {shown(kind)}",
            where=f"{where}: $.model_type",
            fix="pip install transformers",
        )
    for name in _NOT_DONE:
        if config.get(name):
            raise EvenloadError(
                f"the built-in model knows no {name}", where=f"{where}: $.{name}", fix="pip install transformers"
            )
    known = {field.name for field in fields(Sizes)}
    given = {name: value for name, value in config.items() if name in known and value is not None}
    given.setdefault("num_key_value_heads", given.get("num_attention_heads"))
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        given["rope_theta"] = cast("Mapping[str, Any]", rope)["rope_theta"]
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        value = given.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise EvenloadError(f"{name} is {shown(value)}", where=f"{where}: $.{name}", fix="give a positive number")
    given.setdefault("head_dim", given["hidden_size"] // given["num_attention_heads"])
    sizes = Sizes(**given)
    if sizes.num_attention_heads % sizes.num_key_value_heads or sizes.head_dim % 2:
        raise EvenloadError(
            f"{sizes.num_attention_heads} heads of width {sizes.head_dim} with {sizes.num_key_value_heads} keys",
            where=where,
            fix="the key heads must divide the heads, and the width must be even",
        )
    return sizes


class RMSNorm(nn.Module):
    """Root mean square norm, computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def reset_parameters(self) -> None:
        """Ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary(nn.Module):
    """Cosines and sines of positions."""

    inverse: torch.Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        steps = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32) / sizes.head_dim
        self.register_buffer("inverse", sizes.rope_theta**-steps, persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, width of a head] each, in the type of `x`."""
        positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inverse.to(x.device))
        both = torch.cat((angles, angles), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs of a head's numbers by their positions' angles."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Causal attention with grouped keys and values."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        heads, keys = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden_size, heads, bias=False)
        self.k_proj = nn.Linear(sizes.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(sizes.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(heads, sizes.hidden_size, bias=False)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Attend to this and earlier tokens."""
        batch, tokens = hidden_states.shape[:2]
        q, k, v = (
            projection(hidden_states).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = position_embeddings
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    """Gated feed-forward."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Widen, gate, narrow."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.self_attn = Attention(sizes)
        self.mlp = MLP(sizes)
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Attention and feed-forward, each with its norm and residual."""
        normed = self.input_layernorm(hidden_states)
        attended = self.self_attn(hidden_states=normed, position_embeddings=position_embeddings)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Decoder(nn.Module):
    """Embedding, layers, last norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.num_hidden_layers))
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.rotary_emb = Rotary(sizes)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states of every token."""
        hidden = self.embed_tokens(input_ids)
        positions = self.rotary_emb(hidden)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=positions)
        return self.norm(hidden)


class ReferenceModel(nn.Module):
    """A causal language model: tokens to logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.model = Decoder(sizes)
        self.lm_head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
        if sizes.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[sequences, tokens] to [sequences, tokens, vocabulary]."""
        return self.lm_head(self.model(input_ids))

    def init_module(self, module: nn.Module) -> None:
        """Give the parameters that a module itself holds their first values."""
        if isinstance(module, RMSNorm):
            module.reset_parameters()
        else:
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter, std=self.sizes.initializer_range)
