"""What blocks are made of, by name: to say whether a pattern names anything when no profile of the model is at hand.

The Hugging Face blocks carry the names of torchtitan, Megatron-LM and MindFormers through the alias table of
`plan.aliases`. MindFormers' own Llama block has operators that the others do not have; its names are listed as they
are in `mindformers/models/llama/llama_transformer.py` (r1.x) and in its newer, Megatron-like blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from evenload.errors import EvenloadError, Notice
from evenload.plan.operators import Graph, Operator, Value
from evenload.plan.patterns import coverage, match

_NORM: Final = "to pow mean add rsqrt mul"
_ATTENTION: Final[Mapping[str, str]] = {
    "input_layernorm": _NORM,
    "self_attn.q_proj": "linear",
    "self_attn.k_proj": "linear",
    "self_attn.v_proj": "linear",
    "self_attn.q_norm": _NORM,
    "self_attn.k_norm": _NORM,
    "self_attn": "view transpose mul neg cat add expand reshape matmul softmax dropout scaled_dot_product_attention",
    "self_attn.o_proj": "linear",
    "": "add",
    "post_attention_layernorm": _NORM,
}
_DENSE: Final[Mapping[str, str]] = {
    "mlp.gate_proj": "linear",
    "mlp.up_proj": "linear",
    "mlp.act_fn": "silu gelu",
    "mlp": "mul",
    "mlp.down_proj": "linear",
}
_EXPERTS: Final[Mapping[str, str]] = {
    "mlp.gate": "linear softmax sigmoid topk",
    "mlp.experts.gate_proj": "linear",
    "mlp.experts.up_proj": "linear",
    "mlp.experts.act_fn": "silu gelu",
    "mlp.experts": "mul index_add",
    "mlp.experts.down_proj": "linear",
    "mlp.shared_experts.gate_proj": "linear",
    "mlp.shared_experts.up_proj": "linear",
    "mlp.shared_experts.act_fn": "silu gelu",
    "mlp.shared_experts": "mul",
    "mlp.shared_experts.down_proj": "linear",
}
_LATENT: Final[Mapping[str, str]] = {
    "self_attn.q_a_proj": "linear",
    "self_attn.q_a_layernorm": _NORM,
    "self_attn.q_b_proj": "linear",
    "self_attn.kv_a_proj_with_mqa": "linear",
    "self_attn.kv_a_layernorm": _NORM,
    "self_attn.kv_b_proj": "linear",
}
_LINEAR: Final = "cast matmul reshape shape"
_CELL_NORM: Final = "cast norm rcast"
_LEGACY_LLAMA: Final[Mapping[str, str]] = {
    "": "add cast reshape shape",
    "attention_norm": _CELL_NORM,
    "ffn_norm": _CELL_NORM,
    "attention": (
        "add batch_matmul batch_matmul_q_k cast cast_attn flash_attention merger_head_transpose mul reshape shape "
        "softmax tile_kv transpose"
    ),
    "attention.wq": _LINEAR,
    "attention.wk": _LINEAR,
    "attention.wv": _LINEAR,
    "attention.wo": _LINEAR,
    "attention.w_qkv": _LINEAR,
    "attention.apply_rotary_emb": "add bmm_swap cast concat mul mul_inc mul_with_batch_freqs neg shape slice",
    "attention.flash_attention": "flash_attention",
    "feed_forward": "cast mul reshape w13_concat",
    "feed_forward.w1": _LINEAR,
    "feed_forward.w1.activation": "silu",
    "feed_forward.w2": _LINEAR,
    "feed_forward.w3": _LINEAR,
    "feed_forward.w_gate_hidden": _LINEAR,
    "feed_forward.activate": "silu",
}


def _graph(*blocks: Mapping[str, str]) -> Graph:
    operators = tuple(
        Operator(path=path, name=name) for block in blocks for path, names in block.items() for name in names.split()
    )
    return Graph(values=(Value(name="x", nbytes=1),), operators=operators, input="x", output="x")


@lru_cache(maxsize=1)
def hugging_face_blocks() -> tuple[Graph, ...]:
    """A dense block, a mixture-of-experts block, and a block with latent attention, without sizes."""
    return (
        _graph(_ATTENTION, _DENSE),
        _graph(_ATTENTION, _EXPERTS),
        _graph({**_ATTENTION, **_LATENT}, _EXPERTS),
    )


@lru_cache(maxsize=1)
def mindformers_llama() -> Graph:
    """MindFormers' own Llama block, without sizes."""
    return _graph(_LEGACY_LLAMA)


def unmatched(
    patterns: Mapping[str, int], graphs: Iterable[Graph], *, places: Mapping[str, str] | None = None
) -> dict[str, Notice]:
    """A warning for every pattern that names nothing in any of the blocks.

    Args:
        patterns: pattern -> layers it is set on; those on no layer are left out.
        graphs: the blocks that the model may be made of.
        places: pattern -> where it is written.

    Raises:
        EvenloadError: a pattern cannot be read; with its place.
    """
    blocks = tuple(graphs)
    notices: dict[str, Notice] = {}
    for pattern, layers in patterns.items():
        place = (places or {}).get(pattern)
        try:
            if not layers or any(match(pattern, block) for block in blocks):
                continue
        except EvenloadError as error:
            raise EvenloadError(error.fact, where=place or error.where, fix=error.fix) from None
        notices[pattern] = Notice(
            fact=f"pattern '{pattern}' names no operator: matched 0 of {layers} layers",
            where=place,
            fix=coverage(pattern, blocks).fix,
        )
    return notices
