"""The names under which one operator is known.

A graph names modules as Hugging Face does. Users write the names of the framework that their settings come from:
MindFormers' first style (`feed_forward.w1.activation.silu`), its newer style, which is Megatron's
(`mlp.activation_func.silu`), torchtitan's (`feed_forward.w1`) or Hugging Face's own (`mlp.act_fn.silu`). All of them
reach the same operator.

Where two frameworks mean different things by one name, MindFormers' meaning wins, because the patterns are its own:
`feed_forward.w1` is the gate projection *with* its activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from evenload.plan.operators import Graph, Operator

Name = tuple[str, ...]
"""A dotted name, split into its levels."""

_MATMUL: Final = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "grouped_mm", "einsum"})
_CAST: Final = frozenset({"to", "to_copy", "float", "half", "bfloat16", "type_as"})
_CONCAT: Final = frozenset({"cat", "concat", "concatenate"})
_FUSED_GATE: Final = frozenset({"swiglu", "geglu", "bias_swiglu"})
_CORE_ATTENTION: Final = frozenset({"softmax", "matmul", "bmm", "baddbmm", "dropout"})
_SYNONYMS: Final[Mapping[str, str]] = {"true_divide": "div", "truediv": "div", "rdiv": "div", "rtruediv": "div"}
_REFLECTED: Final = frozenset({"radd", "rsub", "rmul", "rdiv", "rpow", "rmatmul"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Every name of one operator."""

    operator: frozenset[Name]
    """Full names of the operator itself."""
    modules: frozenset[Name]
    """Modules that hold it."""


@lru_cache(maxsize=64)
def names(graph: Graph) -> tuple[Names, ...]:
    """The names of every operator of a graph, in the graph's order.

    The operator's own level is what the user sees in code (`linear`), the aten name (`mm`), or both
    (`linear.mm`), and the words that MindFormers uses for it: `matmul` for every matrix product, `norm` for every
    operator of a norm, `cast` for a change of type.
    """
    table = _modules({_canonical(operator) for operator in graph.operators})
    return tuple(_names(operator, table) for operator in graph.operators)


def _names(operator: Operator, table: Mapping[str, tuple[str, ...]]) -> Names:
    paths = {_split(path) for path in _paths(operator, table)}
    return Names(
        operator=frozenset(path + last for path in paths for last in _own_names(operator)),
        modules=frozenset(path[:depth] for path in paths for depth in range(1, len(path) + 1)),
    )


def _split(path: str) -> Name:
    return tuple(path.split(".")) if path else ()


def _paths(operator: Operator, table: Mapping[str, tuple[str, ...]]) -> Iterable[str]:
    """The module path of an operator in every style: the longest known beginning is renamed, the rest stays."""
    yield operator.path
    path = _canonical(operator)
    if path != operator.path:
        yield path
    head, rest = _known_beginning(path, table)
    for other in table.get(head, ()):
        yield other + rest
    if path == "self_attn":
        words = _words(operator)
        if _fused_attention(operator):
            yield from ("self_attention.core_attention", "attention.flash_attention", "attention.inner_attention")
        elif words & _CORE_ATTENTION:
            yield from ("self_attention.core_attention", "attention.inner_attention")


def _known_beginning(path: str, table: Mapping[str, object]) -> tuple[str, str]:
    """The longest beginning of a path that a table knows, and the rest with its dot."""
    head, rest = path, ""
    while head and head not in table:
        head, _, last = head.rpartition(".")
        rest = f".{last}{rest}"
    return head, rest


def _canonical(operator: Operator) -> str:
    """The Hugging Face path of an operator whose layer is written as in torchtitan; others stay as they are."""
    head, rest = _known_beginning(operator.path, _TORCHTITAN)
    if not head:
        return operator.path
    path = _TORCHTITAN[head] + rest
    if path in _GATED and _words(operator) & _ACTIVATIONS:  # called as a function there, a module of its own here
        return f"{path}.act_fn"
    return path


def _own_names(operator: Operator) -> set[Name]:
    """What the last levels of an operator's name can be."""
    plain = {operator.name, operator.aten} - {""}
    last = plain | _words(operator)
    if last & _MATMUL:
        last.add("matmul")
    if last & _CAST:
        last.update(("cast", "to"))
    if last & _CONCAT:
        last.update(("cat", "concat"))
    if last & _FUSED_GATE:
        last.update(("mul", "silu", "gelu"))
    if _fused_attention(operator):
        last.update(("scaled_dot_product_attention", "flash_attention"))
    if operator.path.endswith("norm"):
        last.add("norm")
    own: set[Name] = {(word,) for word in last}
    if operator.aten and operator.aten != operator.name:
        own.add((operator.name, operator.aten))
    return own


def _words(operator: Operator) -> set[str]:
    """The operator's names without Python's and aten's underscores: `__rsub__` is `rsub` and `sub`, `mul_` is `mul`."""
    words: set[str] = set()
    for name in (operator.name, operator.aten):
        word = name.strip("_")
        words.update((word, _SYNONYMS.get(word, word)))
        if word in _REFLECTED:
            words.add(_SYNONYMS.get(word, word[1:]))
        elif name.startswith("__i") and name.endswith("__"):
            words.add(word[1:])
    return words - {""}


def _fused_attention(operator: Operator) -> bool:
    return "scaled_dot_product" in operator.name + operator.aten or "flash_attention" in operator.name + operator.aten


def _modules(paths: set[str]) -> Mapping[str, tuple[str, ...]]:
    """Hugging Face module path -> its paths elsewhere, for a layer that holds these modules."""
    table = dict(_ATTENTION)
    sandwich = any(path.startswith("pre_feedforward_layernorm") for path in paths)
    table.update(_SANDWICH_NORMS if sandwich else _TWO_NORMS)
    if any(path.startswith(("mlp.experts", "mlp.gate.")) or path == "mlp.gate" for path in paths):
        table.update(_EXPERTS)
    else:
        table.update(_feed_forward("mlp", "feed_forward", megatron="mlp"))
    return table


def _feed_forward(here: str, *styles: str, megatron: str) -> dict[str, tuple[str, ...]]:
    """Names inside a gated feed-forward block that is called `styles` in MindFormers and torchtitan."""
    return {
        here: styles if megatron == here else (*styles, megatron),
        f"{here}.gate_proj": (*(f"{style}.w1" for style in styles), f"{megatron}.linear_fc1"),
        f"{here}.up_proj": (*(f"{style}.w3" for style in styles), f"{megatron}.linear_fc1"),
        f"{here}.gate_up_proj": (*(f"{style}.w_gate_hidden" for style in styles), f"{megatron}.linear_fc1"),
        f"{here}.down_proj": (*(f"{style}.w2" for style in styles), f"{megatron}.linear_fc2"),
        # MindFormers nests the activation in w1; torchtitan calls it as a function, so it has no module of its own
        f"{here}.act_fn": (
            *(f"{style}.w1.activation" for style in styles),
            *styles,
            f"{megatron}.activation_func",
        ),
    }


_TWO_NORMS: Final[Mapping[str, tuple[str, ...]]] = {
    "input_layernorm": ("attention_norm",),
    "post_attention_layernorm": ("ffn_norm", "pre_mlp_layernorm"),
}
_SANDWICH_NORMS: Final[Mapping[str, tuple[str, ...]]] = {
    # Gemma 2 and 3: a norm before and after each half, so "post attention" is not the feed-forward's own norm
    "input_layernorm": ("attention_norm",),
    "post_attention_layernorm": ("post_self_attn_layernorm",),
    "pre_feedforward_layernorm": ("ffn_norm", "pre_mlp_layernorm"),
    "post_feedforward_layernorm": ("post_mlp_layernorm",),
}
_ATTENTION: Final[Mapping[str, tuple[str, ...]]] = {
    # MindFormers and torchtitan first, then Megatron and the newer MindFormers
    "self_attn": ("attention", "self_attention"),
    "self_attn.q_proj": ("attention.wq", "self_attention.linear_qkv", "self_attention.linear_q_proj"),
    "self_attn.k_proj": ("attention.wk", "self_attention.linear_qkv"),
    "self_attn.v_proj": ("attention.wv", "self_attention.linear_qkv"),
    "self_attn.qkv_proj": ("attention.w_qkv", "self_attention.linear_qkv"),
    "self_attn.o_proj": ("attention.wo", "self_attention.linear_proj"),
    "self_attn.q_norm": ("attention.q_norm", "self_attention.q_layernorm"),
    "self_attn.k_norm": ("attention.k_norm", "self_attention.k_layernorm"),
    # latent attention (DeepSeek): MindFormers, torchtitan, Megatron, newer MindFormers
    "self_attn.q_a_proj": ("attention.q2l_proj", "attention.wq_a", "self_attention.linear_q_down_proj"),
    "self_attn.q_a_layernorm": ("attention.lq_norm", "attention.q_norm", "self_attention.q_layernorm"),
    "self_attn.q_b_proj": (
        "attention.l2q_proj",
        "attention.l2q_nope_proj",
        "attention.l2q_pe_proj",
        "attention.wq_b",
        "self_attention.linear_q_up_proj",
        "self_attention.linear_qb",
    ),
    "self_attn.kv_a_proj_with_mqa": (
        "attention.kv2l",
        "attention.kv2l_k_pe",
        "attention.kv2l_latent_kv",
        "attention.wkv_a",
        "self_attention.linear_kv_down_proj",
    ),
    "self_attn.kv_a_layernorm": (
        "attention.lkv_norm",
        "attention.kv_norm",
        "self_attention.kv_layernorm",
        "self_attention.k_layernorm",
    ),
    "self_attn.kv_b_proj": (
        "attention.lkv2kv",
        "attention.lkv2kv_k_nope",
        "attention.lkv2kv_v",
        "attention.wkv_b",
        "self_attention.linear_kv_up_proj",
        "self_attention.linear_kvb",
    ),
}
_EXPERTS: Final[Mapping[str, tuple[str, ...]]] = {
    "mlp": ("feed_forward", "moe", "block_sparse_moe"),
    "mlp.gate": ("feed_forward.routed_experts.router", "moe.router", "mlp.router", "block_sparse_moe.gate"),
    **_feed_forward(
        "mlp.experts",
        "feed_forward.routed_experts.ffn",
        "moe.experts",
        "block_sparse_moe.experts",
        megatron="mlp.experts",
    ),
    **_feed_forward(
        "mlp.shared_experts", "feed_forward.shared_experts", "moe.shared_experts", megatron="mlp.shared_experts"
    ),
    # Qwen2-MoE writes one shared expert in the singular
    **_feed_forward(
        "mlp.shared_expert", "feed_forward.shared_experts", "moe.shared_experts", megatron="mlp.shared_experts"
    ),
    "mlp.shared_expert_gate": ("feed_forward.shared_experts_gate", "moe.shared_experts_gate"),
}
_TORCHTITAN: Final[Mapping[str, str]] = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "attention.inner_attention": "self_attn",
    "attention.qkv_linear": "self_attn",
    **{
        f"attention.{inside}w{letter}": f"self_attn.{letter}_proj" for inside in ("", "qkv_linear.") for letter in "qkv"
    },
    "attention.qkv_linear.wqkv": "self_attn.qkv_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    **{
        f"{there}{module}": f"{here}{name}"
        for there, here in (("feed_forward", "mlp"), ("moe.shared_experts", "mlp.shared_experts"))
        for module, name in (("", ""), (".w1", ".gate_proj"), (".w2", ".down_proj"), (".w3", ".up_proj"))
    },
    "moe": "mlp",
    "moe.router": "mlp.gate",
    "moe.experts": "mlp.experts",
}
"""Module path in torchtitan -> in Hugging Face."""
_GATED: Final = frozenset({"mlp", "mlp.experts", "mlp.shared_experts"})
_ACTIVATIONS: Final = frozenset({"silu", "gelu", "relu", "sigmoid", "tanh"})
