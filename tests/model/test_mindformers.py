import pytest

from evenload.errors import EvenloadError
from evenload.model import model_from_mindformers, preset
from evenload.model.mindformers import feed_forward_width

LLAMA2_7B = {"type": "LlamaConfig", "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "vocab_size": 32000}
DEEPSEEK_V3 = {
    "type": "DeepseekV3Config",
    "hidden_size": 7168,
    "num_layers": 61,
    "num_heads": 128,
    "n_kv_heads": 128,
    "intermediate_size": 18432,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "mtp_depth": 1,
    "seq_length": 4096,
}
DEEPSEEK_MOE = {
    "expert_num": 256,
    "num_experts_chosen": 8,
    "shared_expert_num": 1,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
}


def test_llama_with_its_width_by_rule():
    model = model_from_mindformers(LLAMA2_7B | {"multiple_of": 256, "seq_length": 4096})
    assert model.layers == preset("llama-2-7b").layers
    assert model.ignored == ("seq_length",)
    assert model.notices == ()
    large = {"hidden_size": 8192, "num_layers": 80, "num_heads": 64, "n_kv_heads": 8}
    by_rule = LLAMA2_7B | large | {"multiple_of": 4096, "ffn_dim_multiplier": 1.3}
    assert model_from_mindformers(by_rule).layers == preset("llama-2-70b").layers


@pytest.mark.parametrize(
    ("hidden", "multiple_of", "multiplier", "width"),
    [
        (4096, 256, None, 11008),
        (5120, 256, None, 13824),
        (8192, 4096, 1.3, 28672),
        (4096, 1024, 1.3, 14336),
        (6656, 256, None, 17920),
    ],
)
def test_the_width_rule_gives_the_published_widths(hidden, multiple_of, multiplier, width):
    assert feed_forward_width(hidden, multiple_of=multiple_of, multiplier=multiplier) == width


def test_an_explicit_width_beats_the_rule():
    model = model_from_mindformers(LLAMA2_7B | {"intermediate_size": 5000, "multiple_of": 256})
    assert model.blocks[0].feed_forward.intermediate == 5000


def test_biases_and_tied_embeddings_are_read():
    config = LLAMA2_7B | {"hidden_size": 896, "num_layers": 24, "num_heads": 14, "n_kv_heads": 2, "vocab_size": 151936}
    config |= {"intermediate_size": 4864, "qkv_has_bias": True, "tie_word_embeddings": True}
    model = model_from_mindformers(config)
    assert model.layers == preset("qwen2.5-0.5b").layers
    assert model.tied


def test_experts_come_from_the_moe_section():
    config = LLAMA2_7B | {"n_kv_heads": 8, "intermediate_size": 14336}
    model = model_from_mindformers(config, moe_config={"expert_num": 8, "num_experts_chosen": 2})
    assert model.layers == preset("mixtral-8x7b").layers
    assert model_from_mindformers(config, moe_config={"expert_num": 1}).family == "llama"


def test_deepseek_v3_with_its_prediction_layer():
    model = model_from_mindformers(DEEPSEEK_V3, moe_config=DEEPSEEK_MOE)
    ours, published = model, preset("deepseek-v3")
    assert [layer.tensors for layer in ours.layers] == [layer.tensors for layer in published.layers]


def test_the_mappings_are_not_changed():
    config, moe = dict(DEEPSEEK_V3), dict(DEEPSEEK_MOE)
    model_from_mindformers(config, moe_config=moe)
    assert (config, moe) == (DEEPSEEK_V3, DEEPSEEK_MOE)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_layers": None}, "num_layers"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_heads": "32"}, "num_heads"),
        ({"num_heads": 33}, "num_heads"),
        ({"n_kv_heads": 5}, "n_kv_heads"),
        ({"multiple_of": 0}, "multiple_of"),
        ({"ffn_dim_multiplier": "1.3"}, "ffn_dim_multiplier"),
        ({"ffn_dim_multiplier": float("inf")}, "ffn_dim_multiplier"),
        ({"vocab_size": 10**4400}, "vocab_size"),
        ({"type": "ChatGLM2Config"}, "type"),
        ({"type": ["LlamaConfig"]}, "type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_value_is_named_as_the_file_spells_it(change, key):
    with pytest.raises(EvenloadError) as caught:
        model_from_mindformers(LLAMA2_7B | change, where="run.yaml")
    assert caught.value.where == f"run.yaml: $.model.model_config.{key}"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("key", ["hidden_size", "num_layers", "num_heads", "vocab_size"])
def test_a_missing_size_is_named_and_never_guessed(key):
    with pytest.raises(EvenloadError, match=rf"{key} is missing"):
        model_from_mindformers({name: value for name, value in LLAMA2_7B.items() if name != key})


def test_a_caller_may_say_where_a_path_stands():
    lines = {"$.model.model_config.num_layers": "run.yaml:7:5", "$.moe_config.num_experts_chosen": "run.yaml:99:3"}
    with pytest.raises(EvenloadError) as caught:
        model_from_mindformers(LLAMA2_7B | {"num_layers": -1}, where=lines.__getitem__)
    assert caught.value.where == "run.yaml:7:5"
    with pytest.raises(EvenloadError) as caught:
        model_from_mindformers(
            LLAMA2_7B, moe_config={"expert_num": 8, "num_experts_chosen": 9}, where=lines.__getitem__
        )
    assert caught.value.where == "run.yaml:99:3"


def test_without_a_type_llama_is_assumed_and_said():
    model = model_from_mindformers({key: value for key, value in LLAMA2_7B.items() if key != "type"})
    assert "type is missing" in model.notices[0].fact
