"""MindFormers `model_config` -> `Model`.

Llama-like models and DeepSeek-V2/V3 are read by the families of the Hugging Face reader: only keys are spelt in another
way, and the feed-forward width may be given by Meta's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from evenload.errors import did_you_mean
from evenload.model.families import FAMILIES, assemble
from evenload.model.keys import Keys, as_mapping
from evenload.model.spec import Model

_PATH: Final = "$.model.model_config"
_MOE_PATH: Final = "$.moe_config"
_SPELLING: Final = {
    "num_hidden_layers": ("num_layers", "num_hidden_layers"),
    "num_attention_heads": ("num_heads", "num_attention_heads"),
    "num_key_value_heads": ("n_kv_heads", "num_key_value_heads"),
    "num_nextn_predict_layers": ("mtp_depth", "num_nextn_predict_layers"),
    "num_experts_per_tok": ("num_experts_chosen", "num_experts_per_tok"),
    "n_routed_experts": ("expert_num", "n_routed_experts", "num_experts"),
    "n_shared_experts": ("shared_expert_num", "n_shared_experts"),
    "max_position_embeddings": ("max_position_embedding", "max_position_embeddings"),
}
"""Name in the families -> names in MindFormers, the usual one first."""
_TYPES: Final = {
    "LlamaConfig": "llama",
    "DeepseekV2Config": "deepseek_v2",
    "DeepseekV3Config": "deepseek_v3",
}


def model_from_mindformers(
    model_config: Mapping[str, object],
    *,
    moe_config: Mapping[str, object] | None = None,
    where: str | Callable[[str], str] = "settings",
    name: str | None = None,
) -> Model:
    """The model that a MindFormers settings file describes.

    Args:
        model_config: the mapping under `model.model_config`. Never changed.
        moe_config: the mapping under the top-level `moe_config`, if there is one.
        where: what to call the file in errors, or what gives the place of a path such as `$.model.model_config.type`.
        name: what to call the model; None: its family.

    Raises:
        EvenloadError: another kind of model, or a key that is missing or wrong.
    """
    moe = moe_config or {}
    mapping, spelling = _translate({**moe, **model_config})
    origins = {key: _MOE_PATH for key in mapping if spelling.get(key, key) in moe.keys() - model_config.keys()}
    keys = Keys(mapping, where=where, path=_PATH, spelling=spelling, origins=origins)
    family_name, derived = _complete(keys, _family(keys))
    keys = keys.completed(derived)
    family = FAMILIES[family_name]
    decoder = family.build(keys)
    return assemble(
        decoder,
        name=name or family.name,
        family=family.name,
        tied=keys.flag("tie_word_embeddings"),
        max_positions=keys.optional("max_position_embeddings", most=2**40),
        source=where if isinstance(where, str) else where(_PATH),
        ignored=keys.unread(),
        notices=tuple(keys.notices),
    )


def feed_forward_width(hidden: int, *, multiple_of: int = 256, multiplier: float | None = None) -> int:
    """Feed-forward width where only its rule is given: two thirds of four times the width, scaled, rounded up.

    Source: `LlamaFeedForward` of MindFormers r1.x, which scales before it takes two thirds and adds 0.01 to the
    multiplier; Meta's Llama scales afterwards. Both give the published widths.

    Examples:
        >>> feed_forward_width(4096), feed_forward_width(8192, multiple_of=4096, multiplier=1.3)
        (11008, 28672)
    """
    width = 4 * hidden
    if multiplier is not None:
        width = int((multiplier + 0.01) * width)
    width = int(2 * width / 3)
    return multiple_of * -(-width // multiple_of)


def _translate(raw: Mapping[str, object]) -> tuple[dict[str, object], dict[str, str]]:
    """The configuration under the families' names, and how the file spells each of them."""
    source = as_mapping(raw) or {}
    spelling = {ours: next((s for s in theirs if s in source), theirs[0]) for ours, theirs in _SPELLING.items()}
    renamed = {spelt: ours for ours, spelt in spelling.items()}
    return {renamed.get(key, key): value for key, value in source.items()}, spelling


def _family(keys: Keys) -> str:
    """Name of the family that reads the configuration."""
    stated = keys.word("type")
    if stated is None:
        keys.note("type is missing; the model is read as a LlamaConfig", "type", "add 'type'")
        return "llama"
    family = _TYPES.get(stated)
    if family is None:
        hint = did_you_mean(stated, sorted(_TYPES))
        supported = f"supported: {', '.join(sorted(_TYPES))}"
        keys.refuse(
            "type", f"the model type {stated!r} is not supported", f"{hint}; {supported}" if hint else supported
        )
    return family


def _complete(keys: Keys, family: str) -> tuple[str, dict[str, object]]:
    """The family after looking closer, and the values that MindFormers derives or assumes."""
    derived: dict[str, object] = {}
    if not keys.has("num_key_value_heads"):
        derived["num_key_value_heads"] = None  # as many as heads
    if not keys.has("intermediate_size"):
        derived["intermediate_size"] = feed_forward_width(
            keys.size("hidden_size"),
            multiple_of=keys.optional("multiple_of", absent=256) or 256,
            multiplier=keys.number("ffn_dim_multiplier"),
        )
    if not keys.has("num_experts_per_tok"):
        derived["num_experts_per_tok"] = 1
    if not keys.has("n_shared_experts"):
        derived["n_shared_experts"] = 0
    if family != "llama":
        keys.size("first_k_dense_replace", least=0)
        derived |= {key: None for key in ("n_group", "topk_group") if not keys.has(key)}
        return family, derived
    experts = keys.optional("n_routed_experts", absent=1) or 1
    if experts == 1:
        return "qwen2" if keys.flag("qkv_has_bias") else "llama", derived
    if keys.optional("n_shared_experts", absent=0, least=0):
        keys.refuse("n_shared_experts", "n_shared_experts is not supported in a LlamaConfig", "use a DeepseekV3Config")
    return "mixtral", derived | {"num_local_experts": experts}
