"""Architecture families: what each makes of the keys of its configuration."""

from evenload.model.families.common import Decoder, Family, assemble
from evenload.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from evenload.model.families.dense import GEMMA2, GEMMA3, LLAMA, MISTRAL, PHI3, QWEN2, QWEN3
from evenload.model.families.moe import LLAMA4, MIXTRAL, QWEN2_MOE, QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        GEMMA2,
        GEMMA3,
        PHI3,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        LLAMA4,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
    )
}
"""By the `model_type` that `transformers` gives them."""

__all__ = ["FAMILIES", "Decoder", "Family", "assemble"]
