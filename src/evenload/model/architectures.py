"""Which family reads a configuration, and where in it the language model stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn

from evenload.errors import did_you_mean, shown
from evenload.model.families import FAMILIES, Family
from evenload.model.keys import Keys, as_list

INNER: Final = ("text_config", "llm_config", "language_config")
"""Where multimodal configurations keep their language model."""
_NOTHING: Final[Mapping[str, int | None]] = {}
_QWEN2_VL: Final[Mapping[str, int | None]] = {"num_key_value_heads": 8, "max_window_layers": 80}
_SAME_AS: Final[Mapping[str, tuple[str, Mapping[str, int | None]]]] = {
    "kimi_k2": ("deepseek_v3", {}),
    "ministral3": ("mistral", {"head_dim": 128, "sliding_window": None}),
    "qwen2_vl": ("qwen2", _QWEN2_VL),
    "qwen2_vl_text": ("qwen2", _QWEN2_VL),
    "qwen2_5_vl": ("qwen2", _QWEN2_VL),
    "qwen2_5_vl_text": ("qwen2", _QWEN2_VL),
    "qwen3_vl_text": ("qwen3", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"num_key_value_heads": 16, "num_experts_per_tok": 4}),
}
"""Model types whose decoder is that of another family, with the defaults that differ."""
_INNER_OF: Final = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
"""Language model of a wrapper whose inner configuration does not name its type."""
_ARCHITECTURES: Final = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Phi3ForCausalLM": "phi3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Llama4ForCausalLM": "llama4_text",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}


def supported() -> list[str]:
    """The `model_type`s that can be read, wrappers included."""
    return sorted({*FAMILIES, *_SAME_AS, *_INNER_OF})


def decoder_keys(outer: Keys) -> tuple[Keys, Family]:
    """The keys that hold the language model's sizes, and its family.

    Raises:
        EvenloadError: no model type, an unknown one, or a wrapper without its language model.
    """
    stated = outer.word("model_type")
    inner_key = next((key for key in INNER if isinstance(outer.mapping.get(key), Mapping)), None)
    if inner_key is None:
        model_type = stated or _from_architectures(outer)
        if model_type is None:
            _unnamed(outer)
        if model_type in _INNER_OF:
            outer.refuse(
                "text_config",
                f"text_config is missing: a {model_type!r} configuration keeps its sizes there",
                "add 'text_config' with the sizes of the language model",
            )
        family, defaults = _family(outer, model_type)
        outer.defaults = defaults
        return outer, family
    keys = outer.inner(inner_key)
    model_type = keys.word("model_type") or _from_architectures(keys) or _INNER_OF.get(stated or "")
    if model_type is None:
        if stated is None:
            _unnamed(keys)
        _family(outer, stated)  # the wrapper may be a family itself
        model_type = stated
    family, defaults = _family(keys, model_type)
    keys.defaults = defaults or family.omitted
    return keys, family


def _family(keys: Keys, model_type: str) -> tuple[Family, Mapping[str, int | None]]:
    """The family of a model type, and the defaults in which the type differs from it."""
    name, defaults = _SAME_AS.get(model_type, (model_type, _NOTHING))
    family = FAMILIES.get(name)
    if family is None:
        hint = did_you_mean(model_type, supported())
        listed = f"supported: {', '.join(supported())}"
        keys.refuse(
            "model_type",
            f"the architecture {shown(model_type)} is not supported",
            f"{hint}; {listed}" if hint else listed,
        )
    return family, defaults


def _unnamed(keys: Keys) -> NoReturn:
    keys.refuse(
        "model_type",
        "model_type is missing, and architectures does not name a known one",
        f"add 'model_type', one of {', '.join(supported())}",
    )


def _from_architectures(keys: Keys) -> str | None:
    named = as_list(keys.mapping.get("architectures")) or []
    return next((_ARCHITECTURES[a] for a in named if isinstance(a, str) and a in _ARCHITECTURES), None)
