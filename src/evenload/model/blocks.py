"""The parameter tensors of layers, in Hugging Face names: shapes and how each is divided.

Source of the shapes: the modules that `transformers` builds from the same configuration (checked in the tests, name by
name). Source of the division: column- and row-parallel linear layers, Megatron-LM (arXiv 1909.08053, section 3), with
key and value heads repeated where there are fewer of them than ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evenload.model.spec import Attention, Experts, FeedForward, LatentAttention, Layer, Split, Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Where one family differs from the common names of a block."""

    feed_forward: str = "mlp"
    router: str = "gate"
    shared: str = "shared_experts"
    fused: bool = False
    """Query, key and value are one projection, and so are gate and up (Phi-3)."""
    experts_transposed: bool = False
    """Fused expert weights are stored input-first (Llama 4)."""
    fp32_router: bool = False
    """The router's weight stays in fp32 (`_keep_in_fp32_modules_strict` of DeepSeek-V2 and V3)."""
    router_bias: bool = False
    """The router has a buffer `e_score_correction_bias`, in fp32 (DeepSeek-V3)."""
    learned_qk_norm: bool = True
    """The norm of q and k has a weight (it has none in Llama 4)."""


COMMON = Names()


def embedding(hidden: int, vocabulary: int) -> Layer:
    """The token embedding."""
    weight = Tensor(name="embed_tokens.weight", shape=(vocabulary, hidden), split=Split.VOCABULARY)
    return Layer(kind="embedding", role="embedding", tensors=(weight,), norms=0)


def head(hidden: int, vocabulary: int, *, tied: bool) -> Layer:
    """Final norm and output projection; a tied head holds the norm only."""
    norm = Tensor(name="norm.weight", shape=(hidden,))
    projection = Tensor(name="lm_head.weight", shape=(vocabulary, hidden), split=Split.VOCABULARY)
    return Layer(kind="head", role="head", tensors=(norm,) if tied else (norm, projection), norms=1)


def block(
    hidden: int,
    attention: Attention | LatentAttention,
    feed_forward: FeedForward | Experts,
    *,
    norms: Literal[2, 4] = 2,
    names: Names = COMMON,
    shared_bias: bool = False,
) -> Layer:
    """One decoder layer.

    Args:
        hidden: width between layers.
        attention: its attention.
        feed_forward: its feed-forward or experts block.
        norms: 2, or 4 where the outputs of both halves are normed too (Gemma 2 and 3).
        names: how the family names its modules.
        shared_bias: the shared experts have biases.
    """
    kind = "moe" if isinstance(feed_forward, Experts) else "dense"
    if isinstance(attention, Attention):
        attention_part = attention_tensors(hidden, attention, names)
        if attention.window is not None:
            kind += "_sliding"
    else:
        attention_part = latent_tensors(hidden, attention)
    if isinstance(feed_forward, Experts):
        feed_forward_part = experts_tensors(hidden, feed_forward, names, shared_bias=shared_bias)
    else:
        feed_forward_part = feed_forward_tensors(hidden, feed_forward, f"{names.feed_forward}", fused=names.fused)
    norm_names = ["input_layernorm", "post_attention_layernorm"]
    if norms == 4:
        norm_names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    buffers: tuple[Tensor, ...] = ()
    if isinstance(feed_forward, Experts) and names.router_bias:
        bias = f"{names.feed_forward}.{names.router}.e_score_correction_bias"
        buffers = (Tensor(name=bias, shape=(feed_forward.experts,), fp32=True),)
    return Layer(
        kind=kind,
        role="block",
        buffers=buffers,
        tensors=(
            *attention_part,
            *feed_forward_part,
            *(Tensor(name=f"{name}.weight", shape=(hidden,)) for name in norm_names),
        ),
        attention=attention,
        feed_forward=feed_forward,
        norms=norms,
    )


def multi_token_prediction(inner: Layer, hidden: int) -> Layer:
    """One multi-token-prediction layer around a full block (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Norms of the embedding and of the hidden state, their joint projection from twice the width, the block, and the norm
    before the output head. Embedding and head are those of the main model and hold nothing here.
    """
    own = (
        Tensor(name="enorm.weight", shape=(hidden,)),
        Tensor(name="hnorm.weight", shape=(hidden,)),
        Tensor(name="eh_proj.weight", shape=(hidden, 2 * hidden)),
        Tensor(name="shared_head.norm.weight", shape=(hidden,)),
    )
    return Layer(
        kind="mtp",
        role="mtp",
        tensors=(*own, *inner.tensors),
        attention=inner.attention,
        feed_forward=inner.feed_forward,
        buffers=inner.buffers,
        norms=inner.norms + 3,
    )


def attention_tensors(hidden: int, attention: Attention, names: Names = COMMON) -> tuple[Tensor, ...]:
    """Projections of multi-head or grouped-query attention, and the norms of q and k."""
    queries = attention.heads * attention.head_dim
    keys = attention.kv_heads * attention.head_dim
    tensors: list[Tensor] = []
    if names.fused:
        tensors += _linear("self_attn.qkv_proj", hidden, queries + 2 * keys, Split.TENSOR, bias=attention.qkv_bias)
    else:
        tensors += _linear("self_attn.q_proj", hidden, queries, Split.TENSOR, bias=attention.qkv_bias)
        tensors += _linear("self_attn.k_proj", hidden, keys, Split.KEY_VALUE, bias=attention.qkv_bias)
        tensors += _linear("self_attn.v_proj", hidden, keys, Split.KEY_VALUE, bias=attention.qkv_bias)
    tensors += _row("self_attn.o_proj", queries, hidden, bias=attention.out_bias)
    if attention.qk_norm and names.learned_qk_norm:
        tensors += (
            Tensor(name=f"self_attn.{name}.weight", shape=(attention.head_dim,)) for name in ("q_norm", "k_norm")
        )
    return tuple(tensors)


def latent_tensors(hidden: int, attention: LatentAttention) -> tuple[Tensor, ...]:
    """Projections of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    The down-projections feed every head and stay whole; the up-projections are divided by heads.
    """
    queries = attention.heads * (attention.nope_dim + attention.rope_dim)
    values = attention.heads * attention.value_dim
    bias = attention.bias
    tensors: list[Tensor] = []
    if attention.q_rank is None:
        tensors += _linear("self_attn.q_proj", hidden, queries, Split.TENSOR)
    else:
        tensors += _linear("self_attn.q_a_proj", hidden, attention.q_rank, Split.REPLICATED, bias=bias)
        tensors.append(Tensor(name="self_attn.q_a_layernorm.weight", shape=(attention.q_rank,)))
        tensors += _linear("self_attn.q_b_proj", attention.q_rank, queries, Split.TENSOR)
    latent = attention.kv_rank + attention.rope_dim
    tensors += _linear("self_attn.kv_a_proj_with_mqa", hidden, latent, Split.REPLICATED, bias=bias)
    tensors.append(Tensor(name="self_attn.kv_a_layernorm.weight", shape=(attention.kv_rank,)))
    up = attention.heads * attention.nope_dim + values
    tensors += _linear("self_attn.kv_b_proj", attention.kv_rank, up, Split.TENSOR)
    tensors += _row("self_attn.o_proj", values, hidden, bias=bias)
    return tuple(tensors)


def feed_forward_tensors(
    hidden: int, feed_forward: FeedForward, prefix: str, *, fused: bool = False
) -> tuple[Tensor, ...]:
    """Projections of a dense feed-forward block."""
    width, bias = feed_forward.intermediate, feed_forward.bias
    tensors: list[Tensor] = []
    if fused:
        tensors += _linear(f"{prefix}.gate_up_proj", hidden, 2 * width, Split.TENSOR, bias=bias)
    else:
        columns = ("gate_proj", "up_proj") if feed_forward.gated else ("up_proj",)
        for name in columns:
            tensors += _linear(f"{prefix}.{name}", hidden, width, Split.TENSOR, bias=bias)
    tensors += _row(f"{prefix}.down_proj", width, hidden, bias=bias)
    return tuple(tensors)


def experts_tensors(
    hidden: int, experts: Experts, names: Names = COMMON, *, shared_bias: bool = False
) -> tuple[Tensor, ...]:
    """Router, routed experts (stored as two three-dimensional tensors) and shared experts."""
    prefix, width = names.feed_forward, experts.intermediate
    up, down = (2 * width, hidden), (hidden, width)
    if names.experts_transposed:
        up, down = up[::-1], down[::-1]
    tensors = [
        Tensor(name=f"{prefix}.{names.router}.weight", shape=(experts.experts, hidden), fp32=names.fp32_router),
        Tensor(name=f"{prefix}.experts.gate_up_proj", shape=(experts.experts, *up), split=Split.EXPERT),
        Tensor(name=f"{prefix}.experts.down_proj", shape=(experts.experts, *down), split=Split.EXPERT),
    ]
    if experts.shared_intermediate:
        shared = FeedForward(intermediate=experts.shared_intermediate, bias=shared_bias)
        tensors += feed_forward_tensors(hidden, shared, f"{prefix}.{names.shared}")
    if experts.shared_gate:
        tensors.append(Tensor(name=f"{prefix}.{names.shared}_gate.weight", shape=(1, hidden)))
    return tuple(tensors)


def _linear(name: str, inputs: int, outputs: int, split: Split, *, bias: bool = False) -> list[Tensor]:
    """A linear layer divided along its outputs (or not at all); its bias is divided alike."""
    tensors = [Tensor(name=f"{name}.weight", shape=(outputs, inputs), split=split)]
    if bias:
        tensors.append(Tensor(name=f"{name}.bias", shape=(outputs,), split=split))
    return tensors


def _row(name: str, inputs: int, outputs: int, *, bias: bool) -> list[Tensor]:
    """A linear layer divided along its inputs; its bias is added after the sum over ranks and stays whole."""
    tensors = [Tensor(name=f"{name}.weight", shape=(outputs, inputs), split=Split.TENSOR)]
    if bias:
        tensors.append(Tensor(name=f"{name}.bias", shape=(outputs,)))
    return tensors
