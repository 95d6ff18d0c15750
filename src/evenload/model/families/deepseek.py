"""DeepSeek-V2 and V3: latent attention, first layers dense, routed and shared experts, multi-token prediction.

Sources: arXiv 2405.04434 and 2412.19437; defaults for absent keys from `transformers` 5.24.
"""

from __future__ import annotations

from typing import Final, Literal

from evenload.model.blocks import Names, block, multi_token_prediction
from evenload.model.families.common import Decoder, Family, Sizes, make_blocks, read_sizes
from evenload.model.families.moe import read_top_k
from evenload.model.keys import MOST_LAYERS, Keys
from evenload.model.spec import Experts, FeedForward, LatentAttention

_V2: Final = Names(fp32_router=True)
_V3: Final = Names(fp32_router=True, router_bias=True)


def _deepseek_v2(keys: Keys) -> Decoder:
    sizes = read_sizes(keys)
    keys.flag("norm_topk_prob")  # read, but its router never divides by the sum
    grouped = keys.word("topk_method") == "group_limited_greedy"
    experts = _experts(keys, top_k=None, shared=2, normalized=False, grouped=grouped, groups=(1, 1))
    attention = _latent_attention(keys, "complex")
    return _decoder(keys, sizes, attention, experts, first=0, bias=keys.flag("mlp_bias"), names=_V2)


def _deepseek_v3(keys: Keys) -> Decoder:
    sizes = read_sizes(keys)
    normalized = keys.flag("norm_topk_prob", absent=True)
    experts = _experts(keys, top_k=8, shared=1, normalized=normalized, grouped=True, groups=(8, 4))
    attention = _latent_attention(keys, "pairs" if keys.flag("rope_interleave", absent=True) else "halves")
    return _decoder(keys, sizes, attention, experts, first=3, bias=False, names=_V3)


def _decoder(
    keys: Keys, sizes: Sizes, attention: LatentAttention, experts: Experts, *, first: int, bias: bool, names: Names
) -> Decoder:
    sparse = _sparse_layers(keys, sizes.layers, first)
    feed_forwards: list[FeedForward | Experts] = [experts] * sizes.layers
    if all(sparse):
        keys.has("intermediate_size")  # read, but no layer is dense
    else:
        width = keys.size("intermediate_size")
        dense = FeedForward(intermediate=width, bias=bias, activation=experts.activation)
        feed_forwards = [experts if is_sparse else dense for is_sparse in sparse]
    count_key = keys.first("num_nextn_predict_layers", "num_mtp_layers")
    predicted = keys.optional(count_key, absent=0, least=0, most=MOST_LAYERS) or 0
    inner = block(sizes.hidden, attention, experts, names=names, shared_bias=bias)
    return Decoder(
        hidden=sizes.hidden,
        vocabulary=sizes.vocabulary,
        blocks=make_blocks(sizes.hidden, [attention] * sizes.layers, feed_forwards, names=names, shared_bias=bias),
        mtp=(multi_token_prediction(inner, sizes.hidden),) * predicted,
    )


def _latent_attention(keys: Keys, rotary: Literal["halves", "pairs", "complex"]) -> LatentAttention:
    keys.has("num_key_value_heads")  # every head has a key of its own: the number says nothing about sizes
    keys.has("head_dim")  # likewise
    return LatentAttention(
        heads=keys.size("num_attention_heads"),
        q_rank=keys.assume("q_lora_rank", 1536),
        kv_rank=keys.size("kv_lora_rank"),
        nope_dim=keys.size("qk_nope_head_dim"),
        rope_dim=keys.size("qk_rope_head_dim"),
        value_dim=keys.size("v_head_dim"),
        bias=keys.flag("attention_bias"),
        rotary=rotary,
    )


def _experts(
    keys: Keys, *, top_k: int | None, shared: int, normalized: bool, grouped: bool, groups: tuple[int, int]
) -> Experts:
    count = keys.size(keys.first("n_routed_experts", "num_local_experts", "num_experts"))
    width = keys.size("moe_intermediate_size")
    ranked, chosen = _groups(keys, count, groups)
    return Experts(
        experts=count,
        top_k=read_top_k(keys, count, top_k),
        intermediate=width,
        shared_intermediate=width * _shared_experts(keys, shared),
        activation=keys.activation("hidden_act", absent="silu"),
        groups=ranked if grouped else 1,
        groups_kept=chosen if grouped else 1,
        normalized=normalized,
    )


def _groups(keys: Keys, experts: int, absent: tuple[int, int]) -> tuple[int, int]:
    """Groups that the router ranks and groups that it keeps."""
    groups = keys.optional("n_group", absent=absent[0]) or 1
    if experts % groups:
        if keys.has("n_group"):
            keys.refuse("n_group", f"n_group {groups} does not divide {experts} experts", "use a divisor")
        groups = 1
    kept = keys.optional("topk_group", absent=min(absent[1], groups)) or groups
    if kept > groups:
        keys.refuse("topk_group", f"topk_group is {kept}, but there are {groups} groups", f"use 1 to {groups}")
    return groups, kept


def _shared_experts(keys: Keys, fallback: int) -> int:
    if "n_shared_experts" not in keys.mapping:
        return keys.size("n_shared_experts", fallback=fallback)
    return keys.optional("n_shared_experts", least=0) or 0


def _sparse_layers(keys: Keys, layers: int, first: int) -> list[bool]:
    """Which layers have experts: from `first_k_dense_replace` on, every `moe_layer_freq`-th."""
    first = keys.size("first_k_dense_replace", fallback=first, least=0)
    step = keys.optional("moe_layer_freq", absent=1, most=MOST_LAYERS) or 1
    if step > 1:
        keys.note(
            f"moe_layer_freq {step} is followed as in DeepSeek's own code; transformers ignores it", "moe_layer_freq"
        )
    return [layer >= first and layer % step == 0 for layer in range(layers)]


DEEPSEEK_V2: Final = Family(
    name="deepseek_v2", build=_deepseek_v2, omitted={"vocab_size": 102400, "num_attention_heads": 32}
)
DEEPSEEK_V3: Final = Family(
    name="deepseek_v3", build=_deepseek_v3, omitted={"vocab_size": 129280, "num_attention_heads": 128}
)
