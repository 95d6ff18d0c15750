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

    def full_config(self) -> dict[str, Any]:
        """Everything that is not the family's default."""
        return {**BASE, **self.config, "model_type": self.family}

    def as_json(self) -> dict[str, Any]:
        """The case as it stands in a golden file."""
        return asdict(self)


def _variants(case: Case, *, eager: bool = True) -> list[Case]:
    """A case in both types and with both attention kernels."""
    kinds = ("sdpa", "eager") if eager else ("sdpa",)
    return [
        replace(case, name=f"{case.name}-{dtype}-{kind}", dtype=dtype, attention=kind)
        for kind in kinds
        for dtype in ("bf16", "fp32")
    ]


def llama() -> list[Case]:
    multi_head = Case(
        name="multi_head",
        family="llama",
        config={"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 96, "intermediate_size": 200},
        batch=3,
        seq=40,
    )
    single = Case(name="single", family="llama", config={"num_key_value_heads": 2, "head_dim": 24}, batch=1, seq=72)
    multi_query = Case(name="multi_query", family="llama", config={"num_key_value_heads": 1}, batch=2)
    biased = Case(name="biased", family="llama", config={"attention_bias": True, "mlp_bias": True}, dtype="fp16")
    return [
        *_variants(Case(name="grouped", family="llama")),
        *_variants(multi_head),
        *_variants(single),
        *_variants(multi_query),
        replace(multi_query, name="multi_query_single-bf16-eager", batch=1, attention="eager"),
        biased,
    ]
