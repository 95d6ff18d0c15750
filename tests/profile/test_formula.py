from __future__ import annotations

import pytest

from evenload.errors import EvenloadError
from evenload.model.presets import preset
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import LayerPolicy, Policy, Recompute
from evenload.profile.formula import formula_profile
from evenload.setup import Setup
from evenload.simulate.timeline import simulate

LLAMA = preset("llama-3-8b")


def plain(profile, kind="dense"):
    return profile.kind(kind).cost(LayerPolicy())


def test_kinds_come_in_the_order_of_the_pipeline():
    profile = formula_profile(LLAMA, Setup())
    assert profile.first == ("embedding",)
    assert profile.last == ("head",)
    assert profile.blocks == ("dense",) * 32
    assert (profile.memory_unit, profile.time_unit, profile.origin) == ("bytes", "seconds", "modelled")
    assert sum(profile.kind(kind).count for kind in (*profile.first, *profile.blocks, *profile.last)) == 8_030_261_248


def test_what_a_layer_keeps_is_what_its_operators_save():
    layer = formula_profile(LLAMA, Setup(seq=2048)).kind("dense")
    assert layer.graph is not None
    assert plain(formula_profile(LLAMA, Setup(seq=2048))).kept == layer.graph.kept_bytes


def test_kept_memory_is_proportional_to_the_tokens():
    one, four = (formula_profile(LLAMA, Setup(seq=2048, micro_batch=size)) for size in (1, 4))
    assert plain(four).kept == 4 * plain(one).kept


def test_full_recompute_keeps_the_input_and_takes_a_forward_more():
    profile = formula_profile(LLAMA, Setup(seq=2048))
    none, full = plain(profile), profile.kind("dense").cost(LayerPolicy(full=True))
    assert full.kept == 2048 * 4096 * 2
    assert 0.7 * none.forward_time < full.recompute_time <= none.forward_time
    assert full.backward_time == pytest.approx(none.backward_time + full.recompute_time)


def test_costs_are_worked_out_once():
    layer = formula_profile(LLAMA, Setup()).kind("dense")
    assert layer.cost(LayerPolicy(full=True)) is layer.cost(LayerPolicy(full=True))


def test_a_layer_of_llama_takes_about_its_matrix_products():
    # 6 x parameters x tokens for forward and backward, at the matrix rate that the preset states, and more for the rest
    profile = formula_profile(LLAMA, Setup(seq=8192))
    products = 2 * 218_103_808 * 8192 / (989.4e12 * 0.803)
    cost = plain(profile)
    assert products < cost.forward_time < 2 * products
    assert 2 * products < cost.backward_time < 4 * products


def test_communication_takes_time_with_tensor_parallelism():
    alone, eight = (formula_profile(LLAMA, Setup(tp=tp)) for tp in (1, 8))
    assert plain(eight).forward_time > plain(alone).forward_time / 8


def test_choices_are_those_that_free_something():
    assert formula_profile(LLAMA, Setup()).kind("dense").choices == (Recompute.NONE, Recompute.SELECT, Recompute.FULL)
    assert formula_profile(LLAMA, Setup()).kind("head").choices == (Recompute.NONE,)
    for choice in formula_profile(LLAMA, Setup()).kind("dense").choices[1:]:
        profile = formula_profile(LLAMA, Setup())
        assert profile.kind("dense").cost(LayerPolicy.of(choice)).kept < plain(profile).kept


def test_switches_of_the_policy_reach_the_layers():
    setup = Setup(tp=8)
    full = LayerPolicy(full=True)
    whole = formula_profile(LLAMA, setup).kind("dense").cost(full)
    sliced = formula_profile(LLAMA, setup, Policy(slice_activation=True)).kind("dense").cost(full)
    assert sliced.kept == whole.kept / 8
    assert sliced.recompute_time > whole.recompute_time


def test_gathering_again_empties_the_buffers_of_fsdp_in_a_pipeline():
    setup = Setup(pp=4, dp=8, zero=3, micro_batches=8)
    gathered, again = (
        formula_profile(LLAMA, setup, Policy(optimizer_comm=comm)).kind("dense").buffers for comm in (False, True)
    )
    assert gathered - again == 2 * 218_112_000


def test_buffers_sum_to_their_named_parts():
    profile = formula_profile(LLAMA, Setup(pp=4, micro_batches=8))
    assert profile.buffers is not None
    assert profile.buffer_parts is not None
    for stage in range(4):
        assert profile.buffers(stage, 8) == sum(profile.buffer_parts(stage).values())
    assert profile.outside == sum(profile.outside_parts.values())


def test_a_plan_runs_on_it():
    setup = Setup(pp=4, micro_batches=8)
    timeline = simulate(formula_profile(LLAMA, setup), Plan(setup=setup, layout=Layout.even(32, pp=4), policy=Policy()))
    assert [rank.in_flight for rank in timeline.memory] == [(4,), (3,), (2,), (1,)]
    assert timeline.step_time > 0


def test_mistakes_in_the_setup_are_errors():
    with pytest.raises(EvenloadError, match="tp 3"):
        formula_profile(LLAMA, Setup(tp=3))
    with pytest.raises(EvenloadError, match="hardware 'x100'"):
        formula_profile(LLAMA, Setup(hardware="x100"))
    with pytest.raises(EvenloadError, match="no fp8"):
        plain(formula_profile(LLAMA, Setup(hardware="a100", dtype="fp8")))


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        (Setup(), "bf16 parameters, bf16 gradients, bf16 moments"),
        (Setup(backend="megatron"), "bf16 parameters, fp32 gradients, fp32 moments and fp32 main copies"),
        (Setup(zero=3, master_weights=True), "fp32 parameters, fp32 gradients, fp32 moments."),
        (Setup(dp=2), "DistributedDataParallel"),
        (Setup(pp=2), "torch.distributed.pipelining"),
    ],
)
def test_the_profile_says_what_it_assumes(setup, said):
    assert said in " ".join(formula_profile(LLAMA, setup).notes)


SETUPS = (
    Setup(seq=256),
    Setup(seq=256, attention="eager", micro_batch=2),
    Setup(seq=256, cp=2),
    Setup(seq=256, tp=2, sequence_parallel=True, dp=2, micro_batches=2),
    Setup(seq=256, dtype="fp32", pp=2, micro_batches=4),
)


@pytest.mark.parametrize(
    "name", ["llama-3.2-1b", "phi-4", "qwen3-30b-a3b", "deepseek-v2-lite", "gemma-2-2b", "gemma-3-1b"]
)
def test_costs_of_any_layer_add_up(name):
    model = preset(name)
    for setup in SETUPS:
        if any(layer.attention and layer.attention.heads % setup.tp for layer in model.kinds()):
            continue
        profile = formula_profile(model, setup)
        for layer in profile.layers.values():
            for choice in layer.choices:
                cost = layer.cost(LayerPolicy.of(choice))
                assert cost.forward.net >= 0
                assert cost.forward.net + cost.backward.net == pytest.approx(0, abs=1)
                assert cost.forward.peak >= cost.kept
                assert cost.kept <= layer.cost(LayerPolicy()).kept
                assert cost.backward_time >= cost.recompute_time >= 0
                assert cost.forward_time > 0
