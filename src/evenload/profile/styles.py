"""What a model family does in its own way, where the `Model` does not say it with a number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """Choices of a family's modules in transformers 5."""

    one_plus_weight: bool = False
    """RMS norms multiply by `1 + weight` in fp32 (Gemma)."""
    norm_after_all_projections: bool = False
    """q and k are normed after v is projected (Gemma 3), not each after its own projection (Qwen 3)."""
    scaled_embedding: bool = False
    """The embedding is multiplied by the square root of the hidden width (Gemma)."""
    local_positions: bool = False
    """Layers with a window have position tables of their own (Gemma 3: another base frequency)."""
    fused_projections: bool = False
    """q, k and v come from one product, and so do gate and up (Phi-3)."""
    partial_rotary: bool = False
    """Heads are put together again after a part of them was rotated (Phi-3)."""
    shared_expert: str = "shared_experts"
    """Module of the experts that every token goes to."""
    router: Literal["qwen", "mixtral", "deepseek_v2", "deepseek_v3"] = "qwen"
    """Whose router chooses the experts."""


_GEMMA2 = Style(one_plus_weight=True, norm_after_all_projections=True, scaled_embedding=True)
_STYLES: dict[str, Style] = {
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, local_positions=True),
    "phi3": Style(fused_projections=True, partial_rotary=True),
    "mixtral": Style(router="mixtral"),
    "qwen2_moe": Style(shared_expert="shared_expert"),
    "deepseek_v2": Style(router="deepseek_v2"),
    "deepseek_v3": Style(router="deepseek_v3"),
}


def style_of(family: str) -> Style:
    """Style of a family; a family without its own is built like Llama, or Qwen 3 where it has experts."""
    return _STYLES.get(family, Style())
