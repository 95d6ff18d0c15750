from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evenload.errors import EvenloadError
from evenload.model import Experts, LatentAttention, Split, model_from_config, preset
from evenload.setup import Setup, check_setup


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ({"tp": 1}, (1, 1)),
        ({"tp": 8}, (8, 1)),
        ({"tp": 8, "dp": 4}, (8, 4)),
        ({"tp": 8, "dp": 4, "ep": 4}, (8, 1)),
        ({"tp": 8, "dp": 4, "ep": 8}, (4, 1)),
        ({"tp": 8, "dp": 4, "ep": 32}, (1, 1)),
        ({"tp": 2, "cp": 2, "dp": 4, "ep": 8}, (2, 1)),
        ({"tp": 2, "dp": 8, "ep": 4, "etp": 1}, (1, 4)),
    ],
)
def test_experts_take_the_ranks_of_a_stage_that_are_there(degrees, expected):
    setup = Setup(**degrees)
    assert (setup.expert_tp, setup.expert_dp) == expected
    assert setup.ep * setup.expert_tp * setup.expert_dp == setup.tp * setup.cp * setup.dp


@pytest.mark.parametrize(
    ("backend", "tp", "rows"),
    [("torch", 1, 32001), ("torch", 8, 4001), ("megatron", 1, 32128), ("megatron", 8, 4096), ("mindspore", 8, 4001)],
)
def test_the_vocabulary_is_padded_over_the_tensor_ranks(backend, tp, rows):
    assert Setup(tp=tp, backend=backend).vocabulary_rows(32001) == rows


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_a_degree_that_is_no_positive_whole_number_is_an_error(value):
    for name in ("tp", "etp"):
        with pytest.raises(EvenloadError, match=rf"\$\.{name}: {name} is "):
            Setup(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("dtype", "bf17", "did you mean 'bf16'?"),
        ("dtype", 16, "use one of fp32, bf16, fp16, fp8"),
        ("dtype", ["bf16"], "use one of"),
        ("grad_dtype", "double", "use one of fp32"),
        ("optimizer", "adam", "did you mean 'adamw'?"),
        ("zero", 4, "use one of 0, 1, 2, 3"),
        ("zero", True, "use one of 0, 1, 2, 3"),
        ("backend", "pytorch", "did you mean 'torch'?"),
        ("attention", None, "use one of sdpa, eager"),
        ("sequence_parallel", 1, "give true or false"),
        ("sequence_parallel", None, "give true or false"),
        ("master_weights", "yes", "give true or false"),
    ],
)
def test_a_word_that_is_not_known_is_an_error(name, value, fix):
    with pytest.raises(EvenloadError, match=rf"\$\.{name}: {name} is ") as caught:
        Setup(tp=2, **{name: value})
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    "absurd",
    [{"seq": 10**12}, {"tp": 10**5000}, {"micro_batches": 10**9}, {"pp": 4096, "tp": 4096}],
    ids=["seq", "tp", "micro_batches", "devices"],
)
def test_a_number_that_no_run_has_is_an_error(absurd):
    with pytest.raises(EvenloadError, match="which no run has") as caught:
        Setup(**absurd)
    assert "at most" in caught.value.fix


LLAMA = preset("llama-3-8b")


@pytest.mark.parametrize(
    ("model", "degrees", "where", "fact", "fix"),
    [
        ("llama-3-8b", {"tp": 3}, "$.tp", "tp 3 does not divide the 32 attention heads", "use 1, 2 or 4"),
        ("qwen2.5-7b", {"tp": 7}, "$.tp", "neither divides the 4 key/value heads", "use 1, 2 or 4"),
        ("qwen2.5-7b", {"tp": 8}, "$.tp", "does not divide the 28 attention heads", "use 1, 2 or 4"),
        ("llama-3-8b", {"tp": 16, "backend": "mindspore"}, "$.tp", "the 8 key/value heads", "use 2, 4 or 8"),
        ("phi-4", {"tp": 20}, "$.tp", "whose projection is fused", "use 2, 5 or 10"),
        ("mixtral-8x7b", {"ep": 3, "dp": 3}, "$.ep", "does not divide the 8 experts", "use 1"),
        ("mixtral-8x7b", {"ep": 8, "dp": 4}, "$.ep", "does not divide the 4 ranks of a stage", "use 1, 2 or 4"),
        ("llama-3-8b", {"ep": 2, "dp": 2}, "$.ep", "has no experts", "leave ep at 1"),
        ("mixtral-8x7b", {"ep": 8, "dp": 8, "etp": 2}, "$.etp", "the 1 ranks of a stage that ep leaves", "use 1"),
        ("qwen3-30b-a3b", {"ep": 1, "dp": 5, "etp": 5}, "$.etp", "the expert width 768", "use 1"),
        ("llama-3-8b", {"cp": 3}, "$.cp", "into 2 x cp equal pieces", "use 1, 2 or 4"),
        ("llama-3-8b", {"tp": 8, "seq": 100, "sequence_parallel": True}, "$.tp", "the 100 tokens", "use 1, 2 or 4"),
        ("llama-3-8b", {"pp": 16, "interleave": 4}, "$.pp", "needs 64 chunks", "at most 32"),
    ],
)
def test_degrees_that_do_not_divide_are_named_with_values_that_do(model, degrees, where, fact, fix):
    with pytest.raises(EvenloadError) as caught:
        check_setup(preset(model), Setup(**degrees))
    assert caught.value.where == where
    assert fact in caught.value.fact
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        ("llama-3-8b", {"tp": 8, "sequence_parallel": True}),
        ("llama-3-8b", {"tp": 16}),  # 8 key/value heads, each on two ranks
        ("llama-3.1-405b", {"tp": 8, "pp": 16, "cp": 2, "dp": 8, "zero": 1}),
        ("mixtral-8x7b", {"tp": 4, "ep": 8, "dp": 2}),
        ("mixtral-8x7b", {"tp": 4, "dp": 2, "etp": 1}),
        ("deepseek-v3", {"pp": 16, "dp": 64, "ep": 64}),
        ("deepseek-v3", {"tp": 16, "pp": 8, "dp": 8, "ep": 32}),
        ("qwen3-235b-a22b", {"tp": 4, "dp": 2, "ep": 8}),
        ("gemma-3-27b", {"tp": 8}),
        ("llama-2-70b", {"tp": 8, "cp": 4, "backend": "mindspore"}),
    ],
)
def test_degrees_that_people_train_with_are_legal(model, degrees):
    assert check_setup(preset(model), Setup(**degrees)) == ()


def test_what_has_no_effect_or_exceeds_the_model_is_said():
    facts = [notice.fact for notice in check_setup(LLAMA, Setup(seq=16384, zero=1, etp=1))]
    assert len(facts) == 3
    assert "at most 8192 positions" in facts[0]
    assert "zero 1 divides nothing" in facts[1]
    assert "etp changes nothing" in facts[2]


MODELS = st.sampled_from(
    [
        "llama-3-8b",
        "qwen2.5-0.5b",
        "qwen3-30b-a3b",
        "mixtral-8x7b",
        "deepseek-v2-lite",
        "deepseek-v3",
        "phi-4",
        "kimi-k2",
    ]
).map(preset)
DEGREE = st.sampled_from([1, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64])
SETUPS = st.builds(
    Setup,
    tp=DEGREE,
    cp=st.sampled_from([1, 1, 2, 3, 4]),
    dp=DEGREE,
    ep=DEGREE,
    etp=st.sampled_from([None, None, 1, 2, 4]),
    seq=st.sampled_from([4096, 1000, 96]),
    sequence_parallel=st.booleans(),
    backend=st.sampled_from(["torch", "megatron", "mindspore"]),
)


def refusal(model, setup):
    try:
        check_setup(model, setup)
    except EvenloadError as error:
        return error
    return None


@given(MODELS, SETUPS)
def test_legal_degrees_divide_every_tensor_and_the_sequence_into_whole_parts(model, setup):
    assume(refusal(model, setup) is None)
    ranks = setup.tp * setup.cp * setup.dp
    assert ranks == setup.ep * setup.expert_tp * setup.expert_dp or not any(
        isinstance(layer.feed_forward, Experts) for layer in model.layers
    )
    assert setup.seq % setup.cp == 0
    assert setup.tokens * setup.cp == setup.seq
    if setup.sequence_parallel:
        assert setup.tokens % setup.tp == 0
    for layer in model.kinds():
        for tensor in layer.tensors:
            if tensor.split is Split.TENSOR:
                assert any(size % setup.tp == 0 for size in tensor.shape)
            elif tensor.split is Split.KEY_VALUE:
                assert tensor.shape[0] % min(setup.tp, layer.attention.kv_heads) == 0
            elif tensor.split is Split.EXPERT:
                assert tensor.shape[0] % setup.ep == 0
                assert layer.feed_forward.intermediate % setup.expert_tp == 0
        if layer.attention is not None:
            assert layer.attention.heads % setup.tp == 0
            if not isinstance(layer.attention, LatentAttention):
                per_rank = max(1, layer.attention.kv_heads // setup.tp)
                assert layer.attention.heads // setup.tp % per_rank == 0  # each rank has the keys of its queries


@given(MODELS, SETUPS)
def test_a_value_that_the_message_proposes_is_legal_for_that_degree(model, setup):
    wrong = refusal(model, setup)
    assume(wrong is not None)
    degree = wrong.where.removeprefix("$.")
    for value in re.findall(r"\d+", wrong.fix):
        other = refusal(model, replace(setup, **{degree: int(value)}))
        assert other is None or other.where != wrong.where


def test_multi_token_prediction_layers_obey_the_same_rules():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 100}
    heads = {"num_attention_heads": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16}
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 48}
    layers = {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "n_group": 1}
    config = {"model_type": "deepseek_v3"} | sizes | heads | ranks | experts | layers
    model = model_from_config(config)
    check_setup(model, Setup(ep=6, dp=6))
    with pytest.raises(EvenloadError, match="6 experts of a mtp layer"):
        check_setup(model, Setup(ep=4, dp=4))
