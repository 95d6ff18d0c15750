"""The `Model` value: layers in order, each of a kind, with every parameter tensor's shape.

Nothing here knows how a model is trained: degrees, types and recomputation live in `Setup` and `Plan`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from evenload.errors import Notice


class Split(StrEnum):
    """How a parameter is divided over the ranks that hold its layer."""

    REPLICATED = "replicated"
    """Whole on every tensor-parallel rank: norms, routers, latent down-projections."""
    TENSOR = "tensor"
    """Divided by the tensor-parallel degree."""
    KEY_VALUE = "key_value"
    """Divided by min(tensor-parallel degree, key/value heads)."""
    VOCABULARY = "vocabulary"
    """Divided by the tensor-parallel degree along the vocabulary, padded up."""
    EXPERT = "expert"
    """Divided by the expert-parallel degree (whole experts), then by the expert tensor degree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One parameter tensor."""

    name: str
    """Path below the layer in Hugging Face naming, such as `self_attn.q_proj.weight`."""
    shape: tuple[int, ...]
    split: Split = Split.REPLICATED
    fp32: bool = False
    """transformers keeps it in fp32 whatever the type of the model; Megatron-LM does not."""

    @property
    def numel(self) -> int:
        """Number of elements of the whole (undivided) tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Multi-head, grouped-query or multi-query attention."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of q and k (Qwen3, Gemma 3)."""
    window: int | None = None
    """Sliding window in tokens, None for full attention."""
    softcap: float | None = None
    """Gemma 2: scores are squashed by tanh, which eager attention keeps."""
    rotary_dim: int | None = None
    """Width per head of the part with rotary embedding, None for all of it (Phi-3: `partial_rotary_factor`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1)."""

    heads: int
    q_rank: int | None
    """Width of the compressed query, None when the query is projected directly (DeepSeek-V2-Lite)."""
    kv_rank: int
    nope_dim: int
    """Width per head of the part of q and k without rotary embedding."""
    rope_dim: int
    """Width per head of the rotary part; its key is shared by all heads."""
    value_dim: int
    bias: bool = False
    """Bias on the down-projections and the output (`attention_bias`)."""
    rotary: Literal["halves", "pairs", "complex"] = "pairs"
    """How rotary embedding is computed: `pairs` for DeepSeek-V3 (`rope_interleave`), `complex` for DeepSeek-V2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForward:
    """A dense feed-forward block."""

    intermediate: int
    gated: bool = True
    activation: str = "silu"
    bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture-of-experts block: router, routed experts, optional shared experts."""

    experts: int
    top_k: int
    intermediate: int
    """Width of one routed expert."""
    shared_intermediate: int = 0
    """Width of all shared experts together, 0 for none."""
    shared_gate: bool = False
    """A sigmoid gate on the shared expert (Qwen2-MoE)."""
    activation: str = "silu"
    groups: int = 1
    """Groups of experts that the router ranks first (`n_group`); 1 for no grouping."""
    groups_kept: int = 1
    """Groups a token may choose experts from (`topk_group`)."""
    normalized: bool = True
    """The weights of the chosen experts are divided by their sum (`norm_topk_prob`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer of the model. Layers that cost the same share a `kind`."""

    kind: str
    """Name of the kind: `embedding`, `dense`, `moe`, `head`, `mtp`, or a variant such as `dense_sliding`."""
    role: Literal["embedding", "block", "mtp", "head"]
    """What the pipeline does with it: `block`s are dealt to stages, the rest are fixed at the ends."""
    tensors: tuple[Tensor, ...]
    """Every parameter tensor. A tied head holds none of its own."""
    attention: Attention | LatentAttention | None = None
    feed_forward: FeedForward | Experts | None = None
    buffers: tuple[Tensor, ...] = ()
    """Tensors of a module in transformers that are no parameters."""
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norms: int = 2
    """Norms over the hidden width in this layer: 2 in most blocks, 4 in Gemma 2 and 3, 1 in a head."""

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole (undivided) layer."""
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What is trained."""

    name: str
    family: str
    """Architecture family, such as `llama`, `qwen3_moe`, `deepseek_v3`."""
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    """In order: embedding, blocks, MTP layers if any, head (final norm and output projection)."""
    tied: bool = False
    """The head uses the embedding's weight."""
    final_softcap: float | None = None
    """Gemma 2: logits are squashed by tanh, which keeps one more logits-sized tensor."""
    max_positions: int | None = None
    source: str = "preset"
    """Where it was read: a path, or `preset`."""
    ignored: tuple[str, ...] = ()
    """Keys of the source that change nothing here (printed under `--verbose`)."""
    notices: tuple[Notice, ...] = ()
    """What was assumed or left out while reading."""

    @property
    def blocks(self) -> tuple[Layer, ...]:
        """The repeated layers, which offset and recompute settings count."""
        return tuple(layer for layer in self.layers if layer.role == "block")

    @property
    def embedding(self) -> Layer:
        """The embedding, on the first stage."""
        return next(layer for layer in self.layers if layer.role == "embedding")

    @property
    def head(self) -> Layer:
        """Final norm, output projection and loss, on the last stage."""
        return next(layer for layer in self.layers if layer.role == "head")

    @property
    def mtp(self) -> tuple[Layer, ...]:
        """Multi-token-prediction layers, on the last stage before the head."""
        return tuple(layer for layer in self.layers if layer.role == "mtp")

    @property
    def parameters(self) -> int:
        """Number of parameters, a tied head counted once, MTP layers included."""
        return sum(layer.parameters for layer in self.layers)

    def kinds(self) -> Iterator[Layer]:
        """One layer of each kind, in order of first appearance."""
        seen: set[str] = set()
        for layer in self.layers:
            if layer.kind not in seen:
                seen.add(layer.kind)
                yield layer
