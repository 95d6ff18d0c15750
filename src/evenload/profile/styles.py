"""What a model family does in its own way, where the `Model` does not say it with a number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """Choices of a family's modules in transformers 5."""

    one_plus_weight: bool = False
    """RMS norms multiply by `1 + weight` in fp32 (Gemma)."""
    norm_after_all_projections: bool = False
    """q and k are normed after v is projected (Gemma 3), not each after its own projection (Qwen 3)."""
    scaled_embedding: bool = False
    """The embedding is multiplied by the square root of the hidden width (Gemma)."""


_GEMMA = Style(one_plus_weight=True, norm_after_all_projections=True, scaled_embedding=True)


def style_of(family: str) -> Style:
    """Style of a family; a family without its own is built like Llama."""
    return _GEMMA if family.startswith("gemma") else Style()
