import json
from pathlib import Path

import pytest

from evenload.errors import EvenloadError
from evenload.model import Experts, LatentAttention, model_from_config, read_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 100,
}
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT = LLAMA | {
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}


def without(config, key):
    return {k: v for k, v in config.items() if k != key}


def refused(config) -> EvenloadError:
    with pytest.raises(EvenloadError) as caught:
        model_from_config(config, where="config.json")
    assert caught.value.exit_code == 2
    return caught.value


# What must be there


@pytest.mark.parametrize(
    ("config", "key"),
    [
        *((LLAMA, key) for key in LLAMA if key != "model_type"),
        *((MOE, key) for key in ("num_experts", "moe_intermediate_size")),
        *((LATENT, key) for key in ("n_routed_experts", "moe_intermediate_size", "kv_lora_rank", "v_head_dim")),
    ],
)
def test_a_missing_size_is_named_and_never_guessed(config, key):
    error = refused(without(config, key))
    assert error.where == f"config.json: $.{key}"
    assert f"{key} is missing" in error.fact


def test_a_misspelt_size_is_proposed():
    assert "did you mean 'hiden_size'?" in refused(without(LLAMA, "hidden_size") | {"hiden_size": 64}).fix


WRONG_SIZES = [None, 0, -1, True, 64.0, "64", [64], {}, float("nan"), 2**40, 10**5000, -(10**5000), "x" * 10_000]


@pytest.mark.parametrize("value", WRONG_SIZES, ids=[f"{i}" for i in range(len(WRONG_SIZES))])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_a_size_that_is_no_sensible_whole_number_is_refused_where_it_stands(key, value):
    error = refused(LLAMA | {key: value})
    assert error.where == f"config.json: $.{key}"
    assert error.fix
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 16}, "num_key_value_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": -8}, "head_dim"),
        ({"attention_bias": "no"}, "attention_bias"),
        ({"attention_bias": 0}, "attention_bias"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"hidden_act": "sillu"}, "hidden_act"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config"),
        ({"model_type": 3}, "model_type"),
        ({"model_type": ""}, "model_type"),
    ],
)
def test_wrong_values_are_refused_by_key(change, key):
    assert refused(LLAMA | change).where == f"config.json: $.{key}"


@pytest.mark.parametrize(
    ("config", "change", "key"),
    [
        (MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (MOE, {"num_experts": 0}, "num_experts"),
        (MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (MOE, {"mlp_only_layers": 1}, "mlp_only_layers"),
        (MOE, {"mlp_only_layers": [0, -1]}, "mlp_only_layers[1]"),
        (MOE, {"mlp_only_layers": ["0"]}, "mlp_only_layers[0]"),
        (LATENT, {"q_lora_rank": 0}, "q_lora_rank"),
        (LATENT, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (LATENT, {"n_group": 3}, "n_group"),
        (LATENT, {"n_group": 4, "topk_group": 5}, "topk_group"),
        (LATENT, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        (LATENT, {"num_nextn_predict_layers": True}, "num_nextn_predict_layers"),
        (LLAMA, {"model_type": "qwen3", "num_key_value_heads": 2, "layer_types": ["full_attention"]}, "layer_types"),
        (
            LLAMA,
            {"model_type": "qwen3", "num_key_value_heads": 2, "layer_types": ["full_attention"] * 2 + ["linear"]},
            "layer_types[2]",
        ),
        (
            LLAMA,
            {"model_type": "llama4_text", "num_local_experts": 2, "head_dim": 8, "no_rope_layers": [1, 0]},
            "no_rope_layers",
        ),
    ],
)
def test_wrong_values_of_other_families_are_refused_by_key(config, change, key):
    assert refused(config | change).where == f"config.json: $.{key}"


# Which architecture


def test_an_unknown_architecture_is_named_with_what_is_supported():
    error = refused(LLAMA | {"model_type": "qwen4"})
    assert "'qwen4' is not supported" in error.fact
    assert "did you mean 'qwen" in error.fix
    assert "deepseek_v3" in error.fix


def test_without_a_model_type_the_architecture_class_decides():
    config = without(LLAMA, "model_type")
    assert model_from_config(config | {"architectures": ["LlamaForCausalLM"]}).family == "llama"
    for architectures in (None, [], ["BertModel"], "LlamaForCausalLM", [3]):
        assert "model_type is missing" in refused(config | {"architectures": architectures}).fact


@pytest.mark.parametrize("config", [None, [], "llama", 3, {}, {"dim": 4096, "n_layers": 32, "n_heads": 32}])
def test_what_is_no_configuration_is_refused(config):
    refused(config)


def test_a_classifier_is_read_as_a_language_model_and_that_is_said():
    model = model_from_config(LLAMA | {"architectures": ["LlamaForSequenceClassification"]})
    assert "LlamaForSequenceClassification is read as a causal language model" in model.notices[0].fact


# Absent keys that mean something


def test_absent_key_value_heads_and_head_width_follow_from_the_heads():
    attention = model_from_config(LLAMA).blocks[0].attention
    assert (attention.kv_heads, attention.head_dim) == (8, 8)
    assert model_from_config(LLAMA).notices == ()


def test_an_explicit_head_width_is_taken_even_if_heads_do_not_divide_the_width():
    config = LLAMA | {"hidden_size": 60, "head_dim": 16}
    attention = model_from_config(config).blocks[0].attention
    assert attention.heads * attention.head_dim == 128
    assert refused(without(config, "head_dim")).where == "config.json: $.num_attention_heads"


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"model_type": "qwen3", "num_key_value_heads": 4}, "head_dim is missing; 128 is assumed"),
        ({"model_type": "mistral", "sliding_window": None}, "num_key_value_heads is missing; 8 is assumed"),
        ({"model_type": "mistral", "num_key_value_heads": 4}, "sliding_window is missing; 4096 is assumed"),
        ({"model_type": "mixtral", "num_local_experts": 4}, "num_experts_per_tok is missing; 2 is assumed"),
    ],
)
def test_a_default_of_transformers_is_taken_and_said(change, fact):
    assert fact in " ".join(notice.fact for notice in model_from_config(LLAMA | change).notices)


def test_a_type_that_shares_a_decoder_keeps_its_own_defaults():
    def attention(model_type):
        return model_from_config(LLAMA | {"model_type": model_type}).blocks[0].attention

    assert (attention("ministral3").head_dim, attention("ministral3").window) == (128, None)
    assert (attention("mistral").head_dim, attention("mistral").window) == (8, 4096)
    assert attention("qwen2_5_vl_text").kv_heads == 8


def test_an_assumed_number_that_does_not_fit_says_that_it_was_assumed():
    error = refused(LLAMA | {"model_type": "qwen2"})
    assert error.fact == "num_key_value_heads 32 (assumed, the key is missing) does not divide num_attention_heads 8"


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("qwen3", False), ("gemma2", True), ("gemma3_text", True)]
)
def test_tied_embeddings_default_as_in_the_family(family, tied):
    config = LLAMA | {"model_type": family, "num_key_value_heads": 4, "head_dim": 8}
    model = model_from_config(config)
    assert model.tied is tied
    assert model.head.parameters == 64 + (0 if tied else 6400)
    assert model_from_config(config | {"tie_word_embeddings": not tied}).tied is not tied


# What is said about the rest


def test_unread_keys_are_listed_and_near_misses_said():
    config = LLAMA | {"rope_theta": 1e4, "torch_dtype": "bfloat16", "num_key_value_head": 2}
    model = model_from_config(config)
    assert model.ignored == ("rope_theta", "torch_dtype", "num_key_value_head")
    assert [notice.fact for notice in model.notices] == ["the unknown key 'num_key_value_head' is ignored"]
    assert model.notices[0].fix == "did you mean 'num_key_value_heads'?"


def test_a_quantized_configuration_is_counted_by_element_and_that_is_said():
    model = model_from_config(LLAMA | {"quantization_config": {"quant_method": "fp8"}})
    assert model.parameters == model_from_config(LLAMA).parameters
    assert "quantization_config" in model.notices[0].fact


def test_layers_beyond_the_last_in_a_list_are_said_and_dropped():
    model = model_from_config(MOE | {"mlp_only_layers": [0, 7]})
    assert [layer.kind for layer in model.blocks] == ["dense", "moe", "moe"]
    assert "names layer 7, but the last layer is 2" in model.notices[0].fact


def test_the_callers_mapping_is_never_changed():
    config = LATENT | {"text": {"a": [1]}}
    before = json.dumps(config)
    model_from_config(config)
    assert json.dumps(config) == before


# Nested configurations


TEXT = without(LLAMA, "model_type")


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_sizes_are_read_from_the_nested_language_model(key):
    config = {"model_type": "some_vlm", "hidden_size": None, key: LLAMA, "vision_config": {"hidden_size": 9999}}
    model = model_from_config(config)
    assert model.layers == model_from_config(LLAMA).layers
    assert "only the language model is read; vision_config" in model.notices[0].fact
    assert "hidden_size" in model.ignored


def test_a_nested_key_is_named_with_its_path():
    for broken in (without(LLAMA, "hidden_size"), LLAMA | {"hidden_size": None}, LLAMA | {"hidden_size": 0}):
        config = {"model_type": "llava", "hidden_size": 64, "text_config": broken}
        assert refused(config).where == "config.json: $.text_config.hidden_size"


@pytest.mark.parametrize(
    ("outer", "inner", "family"),
    [
        ("gemma3", None, "gemma3_text"),
        ("mistral3", None, "mistral"),
        ("mistral3", "ministral3", "mistral"),
        ("qwen3_vl", None, "qwen3"),
        ("qwen3_vl", "qwen3_vl_text", "qwen3"),
        ("anything", "llama", "llama"),
        (None, "llama", "llama"),
        ("qwen2_5_vl", None, "qwen2"),
    ],
)
def test_the_inner_type_or_the_wrapper_decides_the_family(outer, inner, family):
    text = TEXT | {"num_key_value_heads": 4, "head_dim": 8} | ({"model_type": inner} if inner else {})
    config = {"text_config": text} | ({"model_type": outer} if outer else {})
    assert model_from_config(config).family == family


def test_an_unknown_inner_architecture_is_named():
    error = refused({"model_type": "gemma3", "text_config": TEXT | {"model_type": "mamba9"}})
    assert error.where == "config.json: $.text_config.model_type"
    assert "'mamba9' is not supported" in error.fact
    assert "'new_vlm' is not supported" in refused({"model_type": "new_vlm", "text_config": TEXT}).fact


@pytest.mark.parametrize("text", [None, [], "llama", 3])
def test_a_wrapper_without_a_language_model_is_refused(text):
    assert refused({"model_type": "gemma3", "text_config": text}).where == "config.json: $.text_config"


def test_sizes_that_transformers_leaves_out_of_a_nested_file_are_filled_and_said():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    model = model_from_config({"model_type": "gemma3", "text_config": text | {"model_type": "gemma3_text"}})
    assert model.parameters == 3_880_263_168
    said = " ".join(notice.fact for notice in model.notices)
    for key in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert f"{key} is missing" in said


def test_a_mistral_wrapper_that_says_nothing_on_tied_embeddings_is_read_as_published():
    model = model_from_config({"model_type": "mistral3", "text_config": TEXT | {"num_key_value_heads": 4}})
    assert not model.tied
    assert any("counted as two weights" in notice.fact for notice in model.notices)


# Kinds of layers


def test_layers_that_cost_the_same_share_a_kind_and_a_value():
    model = model_from_config(LLAMA)
    assert [layer.kind for layer in model.layers] == ["embedding", "dense", "dense", "dense", "head"]
    assert model.blocks[0] is model.blocks[2]


def test_sliding_and_full_layers_are_kinds_of_their_own():
    gemma = LLAMA | {"num_key_value_heads": 4, "head_dim": 8, "sliding_window": 16}
    kinds = [layer.kind for layer in model_from_config(gemma | {"model_type": "gemma2"}).blocks]
    assert kinds == ["dense_sliding", "dense", "dense_sliding"]
    types = ["full_attention", "sliding_attention", "full_attention"]
    model = model_from_config(gemma | {"model_type": "gemma3_text", "layer_types": types})
    assert [layer.attention.window for layer in model.blocks] == [None, 16, None]
    assert [layer.kind for layer in model.blocks] == ["dense", "dense_sliding", "dense"]


def test_no_two_different_layers_share_a_kind(config_of_every_family):
    seen = {}
    for layer in model_from_config(config_of_every_family).layers:
        assert seen.setdefault(layer.kind, layer) == layer


def test_qwen_slides_only_if_told_to():
    config = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 4, "sliding_window": 16, "max_window_layers": 1}
    assert {layer.kind for layer in model_from_config(config).blocks} == {"dense"}
    sliding = model_from_config(config | {"use_sliding_window": True})
    assert [layer.attention.window for layer in sliding.blocks] == [None, 16, 16]


def test_experts_say_how_their_router_works():
    experts = model_from_config(LATENT | {"n_group": 4, "topk_group": 2}).blocks[-1].feed_forward
    assert isinstance(experts, Experts)
    assert (experts.groups, experts.groups_kept, experts.normalized) == (4, 2, True)
    assert not model_from_config(MOE).blocks[0].feed_forward.normalized
    assert model_from_config(MOE | {"norm_topk_prob": True}).blocks[0].feed_forward.normalized


def test_latent_attention_says_how_it_rotates():
    def rotary(**change):
        attention = model_from_config(LATENT | change).blocks[0].attention
        assert isinstance(attention, LatentAttention)
        return attention.rotary

    assert rotary() == "pairs"
    assert rotary(rope_interleave=False) == "halves"
    assert rotary(model_type="deepseek_v2") == "complex"


def test_an_expert_frequency_is_followed_and_said():
    model = model_from_config(LATENT | {"num_hidden_layers": 6, "moe_layer_freq": 2})
    assert [layer.kind for layer in model.blocks] == ["dense", "dense", "moe", "dense", "moe", "dense"]
    assert "moe_layer_freq 2" in model.notices[0].fact


# Multi-token prediction


def test_a_prediction_layer_has_two_norms_a_joint_projection_a_block_and_a_last_norm():
    model = model_from_config(LATENT | {"num_nextn_predict_layers": 2})
    assert [layer.role for layer in model.layers] == ["embedding", *["block"] * 3, *["mtp"] * 2, "head"]
    (mtp, _), inner = model.mtp, model.blocks[-1]
    own = {tensor.name: tensor.shape for tensor in mtp.tensors if tensor not in inner.tensors}
    assert own == {
        "enorm.weight": (64,),
        "hnorm.weight": (64,),
        "eh_proj.weight": (64, 128),
        "shared_head.norm.weight": (64,),
    }
    assert mtp.parameters == inner.parameters + 3 * 64 + 2 * 64 * 64
    assert mtp.norms == inner.norms + 3


def test_the_prediction_layer_of_deepseek_v3_has_the_published_size():
    path = Path(__file__).parents[2] / "examples" / "models" / "deepseek-v3"
    (mtp,) = read_config(path).mtp
    hidden, latent = 7168, 1536 + 512  # widths of the model and of its two compressed projections, rotary part aside
    attention = (
        hidden * (latent + 64) + 1536 + 512 + 1536 * 128 * (128 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * hidden
    )
    experts = (256 + 1) * 3 * hidden * 2048 + 256 * hidden
    assert mtp.parameters == attention + experts + 2 * hidden + 2 * hidden * hidden + 3 * hidden
    assert 11.5e9 < mtp.parameters < 11.65e9  # "11.5B unique parameters" beside the shared embedding and head


# Files


@pytest.mark.parametrize(
    ("content", "fact", "place"),
    [
        (b"", "empty", ""),
        (b"  \n", "empty", ""),
        (b"{\n  'a': 1\n}", "not valid JSON", ":2:3"),
        (b'{"hidden_size": 1,\n}', "not valid JSON", ":"),
        (b'{"hidden_size": NaN}', "NaN", ""),
        (b'{"hidden_size": -Infinity}', "-Infinity", ""),
        (b'{"a": 1, "a": 2}', "twice", ""),
        (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "digits", ""),
        (b"[" * 100_000, "deep|valid", ""),
        (b"\xff\xfe{\x00}\x00", "UTF-8", ""),
        (b"[1, 2]", "no JSON object", ""),
        (b"\x00\x01", "binary", ""),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_with_its_place(tmp_path, content, fact, place):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(EvenloadError, match=fact) as caught:
        read_config(path)
    assert caught.value.where.startswith(f"{path}{place}")
    assert caught.value.fix


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert read_config(path).hidden == 64
    assert read_config(tmp_path) == read_config(path)
    assert read_config(path).name == tmp_path.name


@pytest.mark.parametrize(
    "name", ["missing.json", "directory", "a\0b", "x" * 300], ids=["missing", "dir", "nul", "long"]
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name):
    (tmp_path / "directory").mkdir()
    with pytest.raises(EvenloadError):
        read_config(tmp_path / name)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(EvenloadError, match="larger than"):
        read_config(path)
