"""What users of other tools met when the sizes of a model were read."""

import pytest

from evenload.errors import EvenloadError
from evenload.model import model_from_config

QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


def test_the_head_width_is_read_and_not_derived() -> None:
    """SafeAILab/EAGLE#223: dividing width by heads gives a model 8.8 % too small."""
    assert model_from_config(QWEN3_4B).parameters == 4_022_468_096
    assert model_from_config(QWEN3_4B | {"head_dim": 80}).parameters < 3.7e9


def test_attention_may_be_wider_than_the_model() -> None:
    """MiniMax-AI/MiniMax-01#29: 64 heads of 128 in a model of width 6144."""
    config = QWEN3_4B | {"hidden_size": 6144, "num_attention_heads": 64, "head_dim": 128}
    attention = model_from_config(config).blocks[0].attention
    assert attention.heads * attention.head_dim == 8192


def test_sizes_come_from_the_text_configuration_and_null_is_never_counted() -> None:
    """intel/auto-round#1689: the outer `hidden_size` is null, the sizes stand in `text_config`."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 40}
    with pytest.raises(EvenloadError, match="'qwen3_5_moe' is not supported") as caught:
        model_from_config({"model_type": "qwen3_5_moe", "hidden_size": None, "text_config": sizes})
    assert caught.value.exit_code == 2

    text = QWEN3_4B | sizes
    model = model_from_config({"model_type": "qwen3_5_moe", "hidden_size": None, "text_config": text})
    assert (model.hidden, len(model.blocks)) == (2048, 40)

    for broken in (text | {"hidden_size": None}, text | {"hidden_size": 0}):
        with pytest.raises(EvenloadError, match=r"\$\.text_config\.hidden_size"):
            model_from_config({"model_type": "qwen3_5_moe", "hidden_size": 2048, "text_config": broken})


def test_every_expert_and_the_untied_head_are_counted() -> None:
    """jranaraki/vllm-fit#27: Mixtral 8x7B is no 13B model."""
    model = model_from_config(MIXTRAL_8X7B)
    assert model.parameters == 46_702_792_704
    assert model.head.parameters == 4096 + 32000 * 4096
