"""MindFormers' `model_config` in the keys of a Hugging Face `config.json`, so that one reader builds every model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from evenload.errors import EvenloadError

_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "hidden_size": ("hidden_size",),
    "num_hidden_layers": ("num_layers", "num_hidden_layers"),
    "num_attention_heads": ("num_heads", "num_attention_heads"),
    "num_key_value_heads": ("n_kv_heads", "num_key_value_heads"),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "max_position_embeddings": ("max_position_embedding", "max_position_embeddings", "seq_length"),
    "tie_word_embeddings": ("tie_word_embeddings",),
}
_LLAMA: Final = frozenset({"LlamaConfig", "LlamaForCausalLM"})
_NEEDED: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def as_hugging_face(config: Mapping[str, Any], architecture: str | None = None) -> dict[str, Any] | None:
    """The model in Hugging Face keys; None when the settings do not describe it, or describe another architecture.

    A Llama block's feed-forward width follows MindFormers: `intermediate_size`, or two thirds of 4 * hidden_size,
    times `ffn_dim_multiplier` (+0.01, as the loader adds), rounded up to `multiple_of`. Source: MindFormers r1.x,
    `LLamaFeedForward`.

    Raises:
        EvenloadError: a size of the feed-forward block is no number.
    """
    if isinstance(config.get("model_type"), str):
        return dict(config)  # the newer settings use Hugging Face's keys as they are
    kind = config.get("type", architecture)
    if not {str(kind), str(architecture)} & _LLAMA:
        return None
    found = {name: config[key] for name, keys in _NAMES.items() if (key := _first(config, keys)) is not None}
    if any(name not in found for name in _NEEDED):
        return None
    found["intermediate_size"] = _intermediate(config, found["hidden_size"])
    qkv_bias = bool(config.get("qkv_has_bias"))
    return {"model_type": "qwen2" if qkv_bias else "llama", "hidden_act": "silu"} | found


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if config.get(key) is not None), None)


def _intermediate(config: Mapping[str, Any], hidden: Any) -> int:
    stated = config.get("intermediate_size")
    if stated is not None:
        return stated
    width = 4 * _number(hidden, "hidden_size")
    multiplier = config.get("ffn_dim_multiplier")
    if multiplier is not None:
        width = int((_number(multiplier, "ffn_dim_multiplier") + 0.01) * width)
    multiple = int(_number(config.get("multiple_of", 256), "multiple_of"))
    return -(-int(2 * width / 3) // multiple) * multiple


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**40:
        raise EvenloadError(f"{name} is {value!r}", where=f"$.{name}", fix="give a number above zero")
    return value
