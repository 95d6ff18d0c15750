"""Mixture-of-experts decoders: Mixtral, Qwen 2 and 3 MoE, Llama 4.

Defaults for absent keys are those of the configuration classes of `transformers` 5.24.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from evenload.model.blocks import Names
from evenload.model.families.common import (
    Decoder,
    Family,
    Sizes,
    layer_windows,
    make_blocks,
    read_attention,
    read_sizes,
    windowed,
)
from evenload.model.keys import MOST_LAYERS, Keys
from evenload.model.spec import Attention, Experts, FeedForward, Layer

_DEFAULT_WINDOW: Final = 4096


def read_top_k(keys: Keys, experts: int, fallback: int | None) -> int:
    """Experts per token.

    Raises:
        EvenloadError: more than there are experts.
    """
    top_k = keys.size("num_experts_per_tok", fallback=fallback)
    if top_k > experts:
        keys.refuse(
            "num_experts_per_tok",
            f"num_experts_per_tok is {top_k}, but there are {experts} experts",
            f"use 1 to {experts}",
        )
    return top_k


def _mixtral(keys: Keys) -> Decoder:
    sizes = read_sizes(keys)
    count = keys.size(keys.first("num_local_experts", "num_experts"))
    experts = Experts(
        experts=count,
        top_k=read_top_k(keys, count, 2),
        intermediate=keys.size("intermediate_size"),
        activation=keys.activation("hidden_act", absent="silu"),
    )
    attention = read_attention(keys, sizes.hidden, kv_fallback=8)
    windows = [keys.optional("sliding_window")] * sizes.layers
    return _decoder(sizes, make_blocks(sizes.hidden, windowed(attention, windows), [experts] * sizes.layers))


def _qwen3_moe(keys: Keys) -> Decoder:
    sizes = read_sizes(keys)
    bias = keys.flag("attention_bias")
    attention = read_attention(keys, sizes.hidden, kv_fallback=4, qkv_bias=bias, out_bias=bias, qk_norm=True)
    window = keys.assume("sliding_window", _DEFAULT_WINDOW) if keys.flag("use_sliding_window") else None
    feed_forwards = _qwen_feed_forwards(keys, sizes.layers, top_k=8)
    attentions = windowed(attention, [window] * sizes.layers)
    return _decoder(sizes, make_blocks(sizes.hidden, attentions, feed_forwards))


def _qwen2_moe(keys: Keys) -> Decoder:
    sizes = read_sizes(keys)
    attention = read_attention(keys, sizes.hidden, kv_fallback=16, qkv_bias=keys.flag("qkv_bias", absent=True))
    window = keys.assume("sliding_window", _DEFAULT_WINDOW) if keys.flag("use_sliding_window") else None
    last = keys.size("max_window_layers", fallback=28, least=0) if window is not None else 0
    windows = layer_windows(keys, sizes.layers, window, lambda layer: layer % 2 == 0 and layer < last)
    shared = keys.size("shared_expert_intermediate_size", fallback=5632)
    feed_forwards = _qwen_feed_forwards(keys, sizes.layers, top_k=4, shared=shared)
    names = Names(shared="shared_expert")
    return _decoder(sizes, make_blocks(sizes.hidden, windowed(attention, windows), feed_forwards, names=names))


def _qwen_feed_forwards(keys: Keys, layers: int, *, top_k: int, shared: int = 0) -> list[FeedForward | Experts]:
    """Experts in every `decoder_sparse_step`-th layer, unless `mlp_only_layers` names it."""
    activation = keys.activation("hidden_act", absent="silu")
    count = keys.size(keys.first("num_experts", "num_local_experts"))
    experts = Experts(
        experts=count,
        top_k=read_top_k(keys, count, top_k),
        intermediate=keys.size("moe_intermediate_size"),
        shared_intermediate=shared,
        shared_gate=shared > 0,
        activation=activation,
        normalized=keys.flag("norm_topk_prob"),
    )
    step = keys.optional("decoder_sparse_step", absent=1, most=MOST_LAYERS) or 1
    dense = keys.indices("mlp_only_layers", layers) or frozenset()
    sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    if all(sparse):
        keys.has("intermediate_size")  # read, but no layer is dense
        return [experts] * layers
    feed_forward = FeedForward(intermediate=keys.size("intermediate_size"), activation=activation)
    return [experts if is_sparse else feed_forward for is_sparse in sparse]


def _llama4(keys: Keys) -> Decoder:
    sizes = read_sizes(keys)
    bias = keys.flag("attention_bias")
    attention = read_attention(keys, sizes.hidden, kv_fallback=8, head_dim_fallback=128, qkv_bias=bias, out_bias=bias)
    names = Names(
        feed_forward="feed_forward",
        router="router",
        shared="shared_expert",
        experts_transposed=True,
        learned_qk_norm=False,
    )
    attentions = _llama4_attentions(keys, sizes.layers, attention)
    feed_forwards = _llama4_feed_forwards(keys, sizes.layers)
    return _decoder(sizes, make_blocks(sizes.hidden, attentions, feed_forwards, names=names))


def _llama4_attentions(keys: Keys, layers: int, attention: Attention) -> list[Attention]:
    """Chunked attention with rotary embedding and normed q and k, and every few layers full attention without both."""
    interval = keys.optional("no_rope_layer_interval", absent=4, most=MOST_LAYERS) or 4
    rotary = keys.switches("no_rope_layers", layers) or [(i + 1) % interval != 0 for i in range(layers)]
    chunk = keys.assume("attention_chunk_size", 8192)
    types = keys.choices("layer_types", layers, ("full_attention", "chunked_attention"))
    chunked = [word == "chunked_attention" for word in types] if types else rotary
    norm = keys.flag("use_qk_norm", absent=True)
    return [
        replace(attention, window=chunk if is_chunked else None, qk_norm=norm and rotates)
        for is_chunked, rotates in zip(chunked, rotary, strict=True)
    ]


def _llama4_feed_forwards(keys: Keys, layers: int) -> list[FeedForward | Experts]:
    activation = keys.activation("hidden_act", absent="silu")
    count = keys.size(keys.first("num_local_experts", "num_experts"))
    width = keys.size("intermediate_size")
    experts = Experts(
        experts=count,
        top_k=read_top_k(keys, count, 1),
        intermediate=width,
        shared_intermediate=width,
        activation=activation,
        normalized=False,  # each chosen expert is weighted by a sigmoid of its own
    )
    step = keys.optional("interleave_moe_layer_step", absent=1, most=MOST_LAYERS) or 1
    sparse = keys.indices("moe_layers", layers)
    if sparse is None:
        sparse = frozenset(range(step - 1, layers, step))
    if len(sparse) == layers:
        keys.has("intermediate_size_mlp")  # read, but no layer is dense
        return [experts] * layers
    feed_forward = FeedForward(intermediate=keys.size("intermediate_size_mlp"), activation=activation)
    return [experts if layer in sparse else feed_forward for layer in range(layers)]


def _decoder(sizes: Sizes, blocks: tuple[Layer, ...]) -> Decoder:
    return Decoder(hidden=sizes.hidden, vocabulary=sizes.vocabulary, blocks=blocks)


MIXTRAL: Final = Family(name="mixtral", build=_mixtral, omitted={"vocab_size": 32000, "num_attention_heads": 32})
QWEN2_MOE: Final = Family(name="qwen2_moe", build=_qwen2_moe, omitted={"vocab_size": 151936, "num_attention_heads": 16})
QWEN3_MOE: Final = Family(name="qwen3_moe", build=_qwen3_moe, omitted={"vocab_size": 151936, "num_attention_heads": 32})
LLAMA4: Final = Family(name="llama4_text", build=_llama4, omitted={"vocab_size": 202048, "num_attention_heads": 40})
