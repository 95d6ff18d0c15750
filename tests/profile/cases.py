"""The real models whose traces pin the operator graphs: small, and different in every size that a rule may use."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

BASE = {
    "hidden_size": 48,
    "intermediate_size": 136,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 211,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
"""No two sizes of a model are equal, and none divides another where it can be helped."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One traced forward pass."""

    name: str
    family: str
    """`model_type` in transformers."""
    config: dict[str, Any] = field(default_factory=dict)
    """Changes to `BASE`."""
    batch: int = 2
    seq: int = 32
    dtype: str = "bf16"
    attention: str = "sdpa"
    """`sdpa`: undivided models are traced on the meta device with the kernels of CUDA, all others on the CPU."""
    tp: int = 1
    sequence_parallel: bool = False

    def full_config(self) -> dict[str, Any]:
        """Everything that is not the family's default."""
        return {**BASE, **self.config, "model_type": self.family}

    def as_json(self) -> dict[str, Any]:
        """The case as it stands in a golden file."""
        return asdict(self)


EXPERTS = {"num_experts_per_tok": 3}
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 256,
}
NARROW_VALUES = {"v_head_dim": 12}
"""Values narrower than queries, as in the real models: the CPU has no fused kernel for it, CUDA has."""


def _variants(case: Case, *, kinds: tuple[str, ...] = ("sdpa", "eager")) -> list[Case]:
    """A case in both types and with both attention kernels."""
    return [
        replace(case, name=f"{case.name}-{dtype}-{kind}", dtype=dtype, attention=kind)
        for kind in kinds
        for dtype in ("bf16", "fp32")
    ]


def llama() -> list[Case]:
    """Also the variants that all families share: heads, one sequence, biases, fp16."""
    multi_head = Case(
        name="multi_head",
        family="llama",
        config={"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 96, "intermediate_size": 200},
        batch=3,
        seq=40,
    )
    single = Case(name="single", family="llama", config={"num_key_value_heads": 2, "head_dim": 24}, batch=1, seq=72)
    multi_query = Case(name="multi_query", family="llama", config={"num_key_value_heads": 1}, batch=2)
    one_head = Case(
        name="one_head", family="llama", config={"num_attention_heads": 1, "num_key_value_heads": 1}, attention="eager"
    )
    biased = Case(name="biased", family="llama", config={"attention_bias": True, "mlp_bias": True}, dtype="fp16")
    return [
        *_variants(Case(name="grouped", family="llama")),
        *_variants(multi_head),
        *_variants(single),
        *_variants(multi_query),
        replace(multi_query, name="multi_query_single-bf16-eager", batch=1, attention="eager"),
        one_head,
        biased,
    ]


def divided() -> list[Case]:
    """Tensor-parallel ranks, with and without sequence parallelism, one sequence and several."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 212}
    llama_tp = Case(name="llama", family="llama", config=sizes, tp=2)
    qwen2_tp = Case(name="qwen2", family="qwen2", config=sizes, tp=2)
    qwen3_tp = Case(name="qwen3", family="qwen3", config={**sizes, "head_dim": 24}, tp=4)
    eager = replace(llama_tp, name="llama-eager", attention="eager", config={**sizes, "num_key_value_heads": 8})
    biased = {**sizes, "attention_bias": True, "mlp_bias": True}
    latent = {**LATENT, "first_k_dense_replace": 2, "num_hidden_layers": 1, "vocab_size": 212}
    latent_tp = Case(name="latent", family="deepseek_v3", config=latent, tp=2)
    found: list[Case] = []
    for case in (
        llama_tp,
        replace(llama_tp, name="llama-single", batch=1),
        replace(eager, name="llama-fp32", dtype="fp32"),
        eager,
        replace(llama_tp, name="llama-biased", config=biased),
        qwen2_tp,
        qwen3_tp,
        latent_tp,
    ):
        found += [case, replace(case, name=f"{case.name}-sp", sequence_parallel=True)]
    return found


def mistral() -> list[Case]:
    """A window shorter and longer than the sequence."""
    short = Case(name="short_window", family="mistral", config={"sliding_window": 24, "head_dim": 16}, seq=64)
    return [
        *_variants(short),
        replace(short, name="short_window_multi_query", config={**short.config, "num_key_value_heads": 1}),
        replace(short, name="short_window_single", batch=1),
        Case(name="window_of_all", family="mistral", config={"sliding_window": 64}, seq=64),
        Case(name="no_window", family="mistral", config={"sliding_window": None}),
    ]


def qwen2() -> list[Case]:
    """Biases on q, k and v only; a tied head."""
    return _variants(Case(name="biased", family="qwen2", config={"tie_word_embeddings": True}))


def qwen3() -> list[Case]:
    """Norms on every head."""
    case = Case(name="normed", family="qwen3", config={"head_dim": 20}, seq=44)
    return [*_variants(case), replace(case, name="biased", config={**case.config, "attention_bias": True}, batch=1)]


def gemma2() -> list[Case]:
    """Four norms, capped scores and logits, a window in every other layer; transformers has it without SDPA only."""
    config = {"num_hidden_layers": 2, "head_dim": 20, "sliding_window": 24, "query_pre_attn_scalar": 20}
    return [
        *_variants(Case(name="capped", family="gemma2", config=config, seq=64), kinds=("eager",)),
        Case(name="single", family="gemma2", config=config, seq=64, batch=1, attention="eager"),
    ]


def gemma3_text() -> list[Case]:
    """Four norms and norms on every head, after all projections."""
    config = {
        "num_hidden_layers": 2,
        "head_dim": 20,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return _variants(Case(name="sandwich", family="gemma3_text", config=config, seq=64))


def phi3() -> list[Case]:
    """Fused projections; a part of every head rotated."""
    config = {
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }
    partial = Case(name="partial", family="phi3", config={**config, "num_attention_heads": 4, "num_key_value_heads": 2})
    whole = Case(name="whole", family="phi3", config={"sliding_window": None}, batch=1)
    return [*_variants(partial), whole]


def qwen2_moe() -> list[Case]:
    """A gated shared expert."""
    config = {**EXPERTS, "num_experts": 7, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 88}
    return _variants(Case(name="shared", family="qwen2_moe", config=config, seq=44))


def mixtral() -> list[Case]:
    """Experts behind a softmax router."""
    config = {**EXPERTS, "num_local_experts": 5, "sliding_window": None}
    case = Case(name="experts", family="mixtral", config=config)
    return [
        *_variants(case),
        replace(case, name="one_choice", config={**config, "num_local_experts": 6, "num_experts_per_tok": 1}),
    ]


def qwen3_moe() -> list[Case]:
    """Experts with and without normalised weights."""
    config = {**EXPERTS, "num_experts": 7, "moe_intermediate_size": 40, "head_dim": 20, "norm_topk_prob": True}
    case = Case(name="experts", family="qwen3_moe", config=config, seq=44)
    plain = {**config, "norm_topk_prob": False, "num_experts_per_tok": 2}
    dense = {**config, "num_hidden_layers": 2, "mlp_only_layers": [0]}
    return [
        *_variants(case),
        *_variants(replace(case, name="plain", config=plain, batch=1), kinds=("sdpa",)),
        replace(case, name="dense_first", config=dense),
    ]


def deepseek_v2() -> list[Case]:
    """Latent attention with complex rotary embedding, with and without a compressed query, both routers."""
    grouped = {**LATENT, "topk_method": "group_limited_greedy"}
    lite = {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 1}
    case = Case(name="grouped", family="deepseek_v2", config=grouped)
    return [
        *_variants(case),
        *_variants(Case(name="lite", family="deepseek_v2", config=lite, batch=1, seq=44)),
        replace(case, name="narrow", config={**grouped, **NARROW_VALUES}),
        replace(case, name="narrow-eager", config={**grouped, **NARROW_VALUES}, attention="eager"),
    ]


def deepseek_v3() -> list[Case]:
    """Latent attention with rotary embedding in pairs or halves, a sigmoid router in groups."""
    case = Case(name="pairs", family="deepseek_v3", config=LATENT)
    narrow = replace(case, name="narrow", config={**LATENT, **NARROW_VALUES}, seq=44)
    plain = {**LATENT, "norm_topk_prob": False, "n_group": 1, "topk_group": 1, "q_lora_rank": None}
    return [
        *_variants(case),
        replace(case, name="halves", config={**LATENT, "rope_interleave": False}),
        replace(case, name="plain", config=plain, batch=1),
        replace(case, name="biased", config={**LATENT, "attention_bias": True}),
        replace(narrow, name="narrow"),
        replace(
            narrow,
            name="narrow-fp32",
            config={**narrow.config, "first_k_dense_replace": 2},
            dtype="fp32",
        ),
        replace(narrow, name="narrow-eager", attention="eager"),
    ]


FAMILIES = {
    make.__name__: make
    for make in (
        llama,
        mistral,
        qwen2,
        qwen3,
        gemma2,
        gemma3_text,
        phi3,
        mixtral,
        qwen2_moe,
        qwen3_moe,
        deepseek_v2,
        deepseek_v3,
        divided,
    )
}
"""Name of a golden file -> its cases."""
