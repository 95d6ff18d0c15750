from __future__ import annotations

import pytest
from tests.profile.llama import DENSE, HEAD, HIDDEN, LLAMA, MOE, VOCABULARY, model

from evenload.model.presets import preset
from evenload.profile.buffers import (
    boundary_bytes,
    buffer_parts,
    gather_bytes,
    layer_buffers,
    optimizer_transient,
    outside_parts,
    pipeline_buffers,
)
from evenload.profile.static import static_of
from evenload.setup import Setup

GIB = 2**30
DENSE_ELEMENTS = 218_112_000


def test_a_boundary_carries_the_hidden_states_of_one_micro_batch():
    assert boundary_bytes(LLAMA, Setup(seq=8192, micro_batch=2)) == 2 * 8192 * HIDDEN * 2
    assert boundary_bytes(LLAMA, Setup(seq=8192, cp=2, dtype="fp32")) == 4096 * HIDDEN * 4
    assert boundary_bytes(LLAMA, Setup(seq=8192, tp=8)) == 8192 * HIDDEN * 2
    assert boundary_bytes(LLAMA, Setup(seq=8192, tp=8, sequence_parallel=True)) == 1024 * HIDDEN * 2


def tensors(setup):
    """Pipeline buffers of every stage, in boundary tensors."""
    return [pipeline_buffers(setup, 1, stage) for stage in range(setup.pp)]


def test_without_a_pipeline_there_are_no_pipeline_buffers():
    assert tensors(Setup()) == [0]


def test_torch_1f1b_holds_a_receive_buffer_for_every_micro_batch():
    # pp 4, m 8. In flight at the fullest moment: 4, 3, 2, 1.
    # stage 0: outputs 4 + gradients 8 + one neighbour 1
    # stage 1: inputs 8 - 3 (counted as kept) + outputs 3 + gradients 8 + two neighbours 2; stage 2 likewise
    # stage 3: inputs 8 - 1 + one neighbour 1
    assert tensors(Setup(pp=4, micro_batches=8)) == [13, 18, 18, 8]


def test_torch_gpipe_holds_no_tensor_to_be_sent():
    # all 4 micro-batches are in flight on every stage
    assert tensors(Setup(pp=2, micro_batches=4, schedule="gpipe")) == [4 + 4, 0]


def test_torch_schedules_with_chunks_keep_everything_sent_until_the_step_ends():
    few, many = (tensors(Setup(pp=2, interleave=2, micro_batches=m, schedule="interleaved_1f1b")) for m in (4, 16))
    # three boundary sides a rank: 3 receive buffers and, in the long run, 3 sent tensors for each micro-batch
    assert many[0] - few[0] == 12 * (3 + 3)
    assert many[1] - few[1] == 12 * (3 + 3)


def test_megatron_frees_what_it_has_sent():
    assert tensors(Setup(pp=4, micro_batches=64, backend="megatron")) == [1, 2, 2, 1]


def test_ddp_keeps_gradients_twice():
    assert layer_buffers(DENSE, LLAMA, Setup(dp=8)) == 2 * DENSE_ELEMENTS
    assert layer_buffers(DENSE, LLAMA, Setup(dp=8, dtype="fp32")) == 4 * DENSE_ELEMENTS
    assert layer_buffers(DENSE, LLAMA, Setup(dp=1)) == 0
    assert layer_buffers(DENSE, LLAMA, Setup(dp=8, backend="megatron")) == 0


def test_experts_without_replicas_have_no_bucket():
    moe = model(*[MOE] * 4)
    experts = 8 * 3 * 58_720_256
    shared = sum(tensor.numel for tensor in MOE.tensors) - experts
    assert layer_buffers(MOE, moe, Setup(dp=8, ep=8)) == 2 * shared
    assert layer_buffers(MOE, moe, Setup(dp=16, ep=8)) == 2 * (shared + experts // 8)


@pytest.mark.parametrize("zero", [2, 3])
def test_fsdp_in_a_pipeline_keeps_parameters_gathered_and_gradients_whole(zero):
    setup = Setup(dp=8, pp=4, zero=zero, master_weights=True if zero == 3 else None)
    assert layer_buffers(DENSE, LLAMA, setup) == 2 * DENSE_ELEMENTS
    assert gather_bytes(LLAMA, setup) == 0
    held = static_of(DENSE, LLAMA, setup)
    width = 4 if zero == 3 else 2
    assert (held.parameters, held.gradients) == (width * DENSE_ELEMENTS // 8, width * DENSE_ELEMENTS)
    again = layer_buffers(DENSE, LLAMA, setup, gather_again=True)
    assert again == (2 * DENSE_ELEMENTS if zero == 2 else 0)


def test_zero_2_keeps_parameters_gathered_beside_their_parts():
    assert layer_buffers(DENSE, LLAMA, Setup(dp=8, zero=2)) == 2 * DENSE_ELEMENTS
    assert layer_buffers(DENSE, LLAMA, Setup(dp=8, zero=2, backend="megatron")) == 0


def test_a_router_in_fp32_is_gathered_in_fp32_unless_fsdp_converts_all():
    deepseek = preset("deepseek-v3")
    moe = deepseek.blocks[-1]
    router = sum(tensor.numel for tensor in moe.tensors if tensor.fp32)
    others = sum(tensor.numel for tensor in moe.tensors) - router
    assert router > 0
    assert layer_buffers(moe, deepseek, Setup(dp=8, pp=2, zero=3)) == 4 * router + 2 * others
    mixed = Setup(dp=8, pp=2, zero=3, master_weights=True)
    assert layer_buffers(moe, deepseek, mixed) == 2 * (router + others)


def test_fsdp_alone_holds_two_layers_and_the_gradients_of_two():
    # the fullest moment is the head's backward (its parameters and gradients in bf16, the last block's parameters) or
    # that of the last block, while the head's gradients are reduced in fp32
    head = VOCABULARY * HIDDEN + HIDDEN
    of_head = 2 * (head + DENSE_ELEMENTS) + 2 * head
    of_last = 2 * (DENSE_ELEMENTS + DENSE_ELEMENTS) + 2 * DENSE_ELEMENTS + 4 * head
    assert gather_bytes(LLAMA, Setup(dp=8, zero=3, master_weights=True)) == max(of_head, of_last)
    assert gather_bytes(LLAMA, Setup(dp=1, zero=3)) == 0
    assert gather_bytes(LLAMA, Setup(dp=8, zero=1)) == 0
    assert layer_buffers(HEAD, LLAMA, Setup(dp=8, zero=3)) == 0


def test_only_the_foreach_optimizer_of_pytorch_needs_room():
    transient = optimizer_transient(Setup())
    assert transient is not None
    assert transient(123.0) == 123.0
    assert optimizer_transient(Setup(backend="megatron")) is None
    assert optimizer_transient(Setup(optimizer="sgd")) is None


def test_memory_outside_grows_with_the_kinds_of_groups():
    assert outside_parts(Setup()) == {"device context": round(0.52 * GIB)}
    assert outside_parts(Setup(tp=8, pp=4))["2 communicators"] == 2 * round(0.39 * GIB)


def test_buffers_are_named():
    assert buffer_parts(LLAMA, Setup(), "h100", 0) == {"workspace of matrix products": 32 * 2**20}
    assert buffer_parts(LLAMA, Setup(), "a100-80", 0) == {"workspace of matrix products": 8_519_680}
    setup = Setup(pp=4, micro_batches=8, seq=2048)
    assert buffer_parts(LLAMA, setup, "h100", 3)["pipeline send and receive buffers"] == 8 * 2048 * HIDDEN * 2


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "mindspore_interleaved", "interleaved_1f1b_less_memory"])
@pytest.mark.parametrize("micro_batches", [1, 3, 7])
def test_buffers_are_never_negative(schedule, micro_batches):
    assert min(tensors(Setup(pp=4, interleave=3, micro_batches=micro_batches, schedule=schedule))) >= 0
