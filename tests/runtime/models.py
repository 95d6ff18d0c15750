"""Small decoders, and a run of them in one process to compare with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from evenload.runtime.anatomy import take_result
from evenload.runtime.pipeline import next_token_loss
from evenload.runtime.reference import ReferenceModel, read_sizes

VOCABULARY = 96
SEQ = 16
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"head_dim": 8},
    "Falcon": {},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Bloom": {},
    "Mixtral": MIXTURE,
}
"""Models that differ in what they do before and after the layers, and in what layers take and return."""


def reference(layers: int = 11, **config: Any) -> ReferenceModel:
    torch.manual_seed(0)
    return ReferenceModel(read_sizes({**SIZES, "num_hidden_layers": layers, **config}))


def hugging_face(family: str = "Llama", layers: int = 11, **config: Any) -> nn.Module:
    import transformers

    sizes = {**SIZES, "num_hidden_layers": layers, "tie_word_embeddings": False, "pad_token_id": None}
    made = getattr(transformers, f"{family}Config")(**{**sizes, **FAMILIES.get(family, {}), **config})
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(made)


def batch(micro_batches: int, micro_batch: int = 2, seq: int = SEQ) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(micro_batches)
    tokens = torch.randint(0, VOCABULARY, (micro_batches * micro_batch, seq + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def alone(model: nn.Module, tokens: torch.Tensor, target: torch.Tensor, micro_batches: int) -> tuple[Any, Any]:
    """Loss and gradients of one process that runs one micro-batch after the other."""
    model = copy.deepcopy(model)
    losses = []
    for one, wanted in zip(tokens.chunk(micro_batches), target.chunk(micro_batches), strict=True):
        loss = next_token_loss(take_result(model(one)), wanted) / micro_batches
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum(), {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
