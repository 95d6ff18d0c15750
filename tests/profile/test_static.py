"""Every expected number is worked out by hand from the shapes."""

from __future__ import annotations

import pytest
from tests.profile.llama import DENSE, EMBEDDING, HEAD, HIDDEN, LLAMA, MOE, TIED_HEAD, VOCABULARY, model

from evenload.model import Attention, Layer, Split, Tensor
from evenload.profile.static import held_tensors, rank_elements, static_of
from evenload.setup import Setup

DENSE_PARAMETERS = 16_777_216 * 2 + 4_194_304 * 2 + 58_720_256 * 3 + 8192  # 218,112,000
NORM_PARAMETERS = 8192


def static(layer=DENSE, whole=LLAMA, **degrees):
    return static_of(layer, whole, Setup(**degrees))


def test_the_model_of_these_tests_is_llama_3_8b():
    assert LLAMA.parameters == 8_030_261_248
    assert DENSE.parameters == DENSE_PARAMETERS == 218_112_000


def test_adam_in_fp32_takes_16_bytes_a_parameter():
    layer = static(dtype="fp32")
    assert layer.count == DENSE_PARAMETERS
    assert (layer.parameters, layer.gradients, layer.optimizer) == (
        4 * DENSE_PARAMETERS,
        4 * DENSE_PARAMETERS,
        8 * DENSE_PARAMETERS,
    )
    assert layer.total == 16 * DENSE_PARAMETERS


@pytest.mark.parametrize(
    ("settings", "bytes_a_parameter"),
    [
        ({"dtype": "bf16"}, (2, 2, 4)),  # torch.optim makes moments of the parameters' type
        ({"dtype": "bf16", "optimizer_dtype": "fp32"}, (2, 2, 8)),
        ({"dtype": "bf16", "master_weights": True}, (2, 2, 12)),
        ({"dtype": "bf16", "master_weights": True, "grad_dtype": "fp32"}, (2, 4, 12)),
        ({"dtype": "bf16", "backend": "megatron"}, (2, 4, 12)),  # 18 bytes, as Megatron-LM's own report counts
        ({"dtype": "bf16", "backend": "megatron", "master_weights": False}, (2, 4, 4)),
        ({"dtype": "fp32", "backend": "megatron"}, (4, 4, 8)),
        ({"dtype": "fp32", "master_weights": True}, (4, 4, 8)),  # the parameters are the main copy
        ({"dtype": "bf16", "optimizer": "sgd"}, (2, 2, 0)),
        ({"dtype": "bf16", "optimizer": "sgd", "master_weights": True}, (2, 2, 4)),
        ({"dtype": "bf16", "optimizer": "none", "master_weights": True}, (2, 2, 0)),
        ({"dtype": "fp8", "master_weights": True}, (1, 1, 12)),
    ],
)
def test_types_decide_the_bytes_of_a_parameter(settings, bytes_a_parameter):
    layer = static(**settings)
    assert (layer.parameters, layer.gradients, layer.optimizer) == tuple(
        size * DENSE_PARAMETERS for size in bytes_a_parameter
    )


def test_tensor_parallelism_divides_all_but_the_norms():
    assert static(tp=8).count == (DENSE_PARAMETERS - NORM_PARAMETERS) // 8 + NORM_PARAMETERS


def test_above_the_number_of_key_value_heads_their_weights_are_replicated():
    # one key/value head of 128 x 4096 on each of 16 ranks, though there are only 8 of them
    expected = 2 * 16_777_216 // 16 + 2 * (128 * 4096) + 3 * 58_720_256 // 16 + NORM_PARAMETERS
    assert static(tp=16).count == expected
    assert static(tp=8).count > static(tp=16).count > static(tp=8).count // 2


def test_one_key_value_head_is_held_by_every_rank():
    query = Tensor(name="k", shape=(128, HIDDEN), split=Split.KEY_VALUE)
    layer = Layer(kind="mqa", role="block", tensors=(query,), attention=Attention(heads=32, kv_heads=1, head_dim=128))
    assert [rank_elements(query, layer, Setup(tp=tp)) for tp in (1, 2, 32)] == [128 * HIDDEN] * 3


@pytest.mark.parametrize(
    ("backend", "tp", "rows"),
    [("torch", 1, 128256), ("torch", 5, 25652), ("megatron", 1, 128256), ("megatron", 8, 16128)],
)
def test_the_vocabulary_is_padded(backend, tp, rows):
    assert static(EMBEDDING, backend=backend, tp=tp).count == rows * HIDDEN
    assert static(HEAD, backend=backend, tp=tp).count == rows * HIDDEN + HIDDEN


@pytest.mark.parametrize(
    ("zero", "divided"),
    [(0, (1, 1, 1)), (1, (1, 1, 8)), (2, (1, 8, 8)), (3, (8, 8, 8))],
)
def test_zero_divides_over_data_and_context_ranks(zero, divided):
    layer = static(dp=4, cp=2, zero=zero, dtype="fp32", backend="megatron")
    assert layer.count == DENSE_PARAMETERS
    assert (layer.parameters, layer.gradients, layer.optimizer) == tuple(
        size * DENSE_PARAMETERS // ranks for size, ranks in zip((4, 4, 8), divided, strict=True)
    )


def test_the_first_rank_holds_the_larger_part_of_an_uneven_division():
    # norms of 4096 over 3 ranks: 1366 elements; every tensor rounds up by itself
    elements = 2 * -(-16_777_216 // 3) + 2 * -(-4_194_304 // 3) + 3 * -(-58_720_256 // 3) + 2 * 1366
    assert static(dp=3, zero=3, dtype="fp32").parameters == 4 * elements


def test_fsdp_holds_fp32_parameters_and_no_copy_of_them():
    layer = static(dp=8, zero=3, dtype="bf16", master_weights=True)
    shard = DENSE_PARAMETERS // 8
    assert (layer.parameters, layer.gradients, layer.optimizer) == (4 * shard, 4 * shard, 8 * shard)


EXPERT_WEIGHTS = 8 * 3 * 58_720_256
MIXTRAL = model(*[MOE] * 32)
REST = 2 * 16_777_216 + 2 * 4_194_304 + NORM_PARAMETERS + 8 * 4096


def test_experts_are_divided_whole_and_then_inside():
    rest_tp2 = (REST - NORM_PARAMETERS - 8 * 4096) // 2 + NORM_PARAMETERS + 8 * 4096  # norms and router are replicated
    assert static(MOE, MIXTRAL, dp=8, ep=8).count == REST + EXPERT_WEIGHTS // 8
    assert static(MOE, MIXTRAL, tp=2).count == rest_tp2 + EXPERT_WEIGHTS // 2
    assert static(MOE, MIXTRAL, tp=2, dp=4, ep=4).count == rest_tp2 + EXPERT_WEIGHTS // 8
    assert static(MOE, MIXTRAL, tp=2, dp=4, ep=8).count == rest_tp2 + EXPERT_WEIGHTS // 8
    assert static(MOE, MIXTRAL, tp=2, dp=4, ep=4, etp=1).count == rest_tp2 + EXPERT_WEIGHTS // 4


def test_zero_divides_experts_over_their_own_replicas():
    layer = static(MOE, MIXTRAL, dp=16, ep=8, zero=1, dtype="fp32")
    assert layer.parameters == 4 * (REST + EXPERT_WEIGHTS // 8)
    assert layer.optimizer == 8 * (REST // 16 + EXPERT_WEIGHTS // 8 // 2)


def test_a_tied_head_has_its_own_copy_only_on_another_stage():
    tied = model(*[DENSE] * 4, tied=True)
    assert static_of(TIED_HEAD, tied, Setup(pp=1)).count == HIDDEN
    assert static_of(TIED_HEAD, tied, Setup(pp=4)).count == HIDDEN + VOCABULARY * HIDDEN
    assert held_tensors(TIED_HEAD, tied, Setup(pp=4))[-1] is EMBEDDING.tensors[0]


def test_statics_add_line_by_line():
    one = static(dtype="fp32")
    both = one + static(EMBEDDING, dtype="fp32")
    assert both.total == one.total + 16 * VOCABULARY * HIDDEN
    assert both.count == DENSE_PARAMETERS + VOCABULARY * HIDDEN


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (4, 4, 8)),
        ({"master_weights": True}, (4, 4, 8)),  # it is its own main copy
        ({"optimizer_dtype": "bf16", "grad_dtype": "bf16"}, (4, 2, 4)),
        ({"backend": "megatron"}, (2, 4, 12)),
    ],
)
def test_a_router_that_stays_in_fp32_counts_so_in_pytorch(settings, sizes):
    router = Tensor(name="mlp.gate.weight", shape=(8, 16), fp32=True)
    bias = Tensor(name="mlp.gate.e_score_correction_bias", shape=(8,), fp32=True)
    layer = static(Layer(kind="moe", role="block", tensors=(router,), buffers=(bias,)), **settings)
    buffer = 0 if "backend" in settings else 4 * 8
    assert layer.count == 8 * 16
    assert (layer.parameters - buffer, layer.gradients, layer.optimizer) == tuple(128 * size for size in sizes)
