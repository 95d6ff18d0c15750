"""Names, shapes and counts of parameters against what `transformers` builds on the meta device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.model.reference import build, decoder_of, language_parameters, layer_parameters, shapes
from tests.model.small import COMMON, EXPERTS, LATENT

from evenload.model import model_from_config, preset, preset_names
from evenload.model.presets import _configs

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "models" / "counts.json").read_text())


def assert_same(config) -> None:
    """Every layer has the tensors that transformers gives it, by name and shape, and the totals agree."""
    ours, theirs = model_from_config(config), build(config)
    decoder = decoder_of(theirs)
    assert len(ours.blocks) == len(decoder.layers)
    for layer, module in zip(ours.blocks, decoder.layers, strict=True):
        assert {tensor.name: tensor.shape for tensor in layer.tensors} == shapes(module)
    assert {tensor.name: tensor.shape for tensor in ours.embedding.tensors} == {
        "embed_tokens.weight": tuple(decoder.embed_tokens.weight.shape)
    }
    assert ours.parameters - sum(layer.parameters for layer in ours.mtp) == language_parameters(theirs)


def test_every_tensor_has_the_name_and_shape_that_transformers_gives_it(config_of_every_family):
    assert_same(config_of_every_family)


WRAPPERS = {
    "gemma3": ("gemma3_text", {"head_dim": 8}),
    "mistral3": ("mistral", {"head_dim": 8}),
    "llama4": (
        "llama4_text",
        {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 44, "interleave_moe_layer_step": 2},
    ),
    "qwen3_vl": ("qwen3_vl_text", {"head_dim": 8}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", EXPERTS | {"head_dim": 8, "num_experts": 4}),
    "qwen2_5_vl": ("qwen2_5_vl_text", {}),
}


TIES = ({}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True})
IGNORES_ITS_TEXT = {"gemma3", "mistral3", "qwen3_vl", "qwen3_vl_moe"}
"""Wrappers that tie or not whatever their language model says; read here, its word counts if theirs is absent."""


@pytest.mark.parametrize(
    ("wrapper", "outer", "inner"),
    [
        (wrapper, outer, inner)
        for wrapper in WRAPPERS
        for outer in TIES
        for inner in TIES
        if outer or wrapper not in IGNORES_ITS_TEXT or (not inner and wrapper != "mistral3")
    ],
)
def test_the_language_model_inside_a_wrapper_counts_as_transformers_does(wrapper, outer, inner):
    family, own = WRAPPERS[wrapper]
    text = COMMON | {"model_type": family} | own | inner
    assert_same({"model_type": wrapper, "text_config": text} | outer)


# Real sizes


@pytest.mark.parametrize("name", preset_names())
def test_published_models_count_as_recorded_from_transformers(name):
    model = preset(name)
    total = model.parameters - sum(layer.parameters for layer in model.mtp)
    assert {"total": total, "layers": layer_parameters(layer.parameters for layer in model.blocks)} == GOLDEN[name]


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-4b", "mixtral-8x22b", "deepseek-v2-lite", "deepseek-v3"])
def test_published_models_count_as_transformers_does_now(name):
    assert_same(_configs()[name])


# Random sizes

HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3), (8, 8), (6, 2)])
FLAG = st.booleans()
SMALL_SIZE = st.integers(1, 40)


@st.composite
def configs(draw):
    """A configuration of any family with random sizes and switches."""
    heads, kv_heads = draw(HEADS)
    layers = draw(st.integers(1, 6))
    config = COMMON | {
        "hidden_size": heads * draw(st.integers(1, 6)) * 2,
        "intermediate_size": draw(SMALL_SIZE),
        "vocab_size": draw(st.integers(3, 90)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": draw(FLAG),
    }
    family = draw(st.sampled_from(sorted(EXTRA)))
    return config | {"model_type": family} | EXTRA[family](draw, layers)


def head_dim(draw):
    return {"head_dim": draw(st.integers(1, 12)) * 2} if draw(FLAG) else {}


def windows(draw, layers):
    types = draw(st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=layers, max_size=layers))
    return {"layer_types": types, "sliding_window": 8, "use_sliding_window": draw(FLAG)} if draw(FLAG) else {}


def experts(draw):
    count = draw(st.integers(1, 9))
    return {
        "num_experts_per_tok": draw(st.integers(1, count)),
        "moe_intermediate_size": draw(SMALL_SIZE),
        "num_experts": count,
    }


def sparse(draw, layers):
    chosen = draw(st.lists(st.integers(0, layers - 1), unique=True))
    return experts(draw) | {"decoder_sparse_step": draw(st.integers(1, 3)), "mlp_only_layers": chosen}


def latent(draw):
    count = draw(st.integers(1, 9))
    return {
        **{key: 2 * draw(st.integers(1, 8)) for key in LATENT if key.endswith(("_rank", "_dim"))},
        **({"q_lora_rank": None} if draw(FLAG) else {}),
        "n_routed_experts": count,
        "num_experts_per_tok": draw(st.integers(1, count)),
        "moe_intermediate_size": draw(SMALL_SIZE),
        "n_shared_experts": draw(st.integers(1, 3)),
        "first_k_dense_replace": draw(st.integers(0, 7)),
        "attention_bias": draw(FLAG),
    }


EXTRA = {
    "llama": lambda d, _: head_dim(d) | {"attention_bias": d(FLAG), "mlp_bias": d(FLAG)},
    "mistral": lambda d, _: head_dim(d),
    "qwen2": windows,
    "qwen3": lambda d, n: {"head_dim": 2 * d(SMALL_SIZE), "attention_bias": d(FLAG)} | windows(d, n),
    "gemma2": lambda d, n: {"head_dim": 2 * d(SMALL_SIZE), "attention_bias": d(FLAG)} | windows(d, n),
    "gemma3_text": lambda d, n: {"head_dim": 2 * d(SMALL_SIZE), "attention_bias": d(FLAG)} | windows(d, n),
    "phi3": lambda d, _: {},
    "mixtral": lambda d, _: head_dim(d) | {"num_local_experts": d(st.integers(2, 9)), "num_experts_per_tok": 2},
    "qwen3_moe": lambda d, n: head_dim(d) | sparse(d, n) | {"attention_bias": d(FLAG)},
    "qwen2_moe": lambda d, n: sparse(d, n) | {"shared_expert_intermediate_size": d(SMALL_SIZE), "qkv_bias": d(FLAG)},
    "llama4_text": lambda d, n: {
        "head_dim": 2 * d(SMALL_SIZE),
        "num_local_experts": d(st.integers(1, 9)),
        "intermediate_size_mlp": d(SMALL_SIZE),
        "attention_bias": d(FLAG),
        **(
            {"moe_layers": d(st.lists(st.integers(0, n - 1), unique=True))}
            if d(FLAG)
            else {"interleave_moe_layer_step": d(st.integers(1, 3))}
        ),
    },
    "deepseek_v2": lambda d, _: latent(d) | {"mlp_bias": d(FLAG)},
    "deepseek_v3": lambda d, _: latent(d),
}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configs())
def test_random_sizes_of_every_family_count_as_transformers_does(config):
    assert_same(config)


def test_the_random_and_the_small_configurations_cover_every_family():
    from tests.model.small import SMALL

    from evenload.model.families import FAMILIES

    assert set(EXTRA) == set(FAMILIES) == {config["model_type"] for config in SMALL.values()}
    assert EXPERTS.keys() <= {"num_experts_per_tok", "moe_intermediate_size"}
