"""A measured profile: measured times, the trace's memory, and only for what was measured."""

from dataclasses import replace

import pytest
from tests.profile.measuring import CONFIG, SETUP, measured

from evenload.errors import EvenloadError
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import LayerPolicy, Policy
from evenload.profile.measured import digest_of
from evenload.profile.traced import FIRST
from evenload.simulate.timeline import simulate

PIPELINE = replace(SETUP, pp=2, micro_batches=4)


def test_times_are_those_that_were_measured():
    block = measured().profile(SETUP).kind("Block")
    plain, full = block.cost(LayerPolicy()), block.cost(LayerPolicy(full=True))
    assert (plain.forward_time, plain.backward_time, plain.recompute_time) == (0.010, 0.020, 0.0)
    assert full.backward_time == 0.031
    assert full.recompute_time == pytest.approx(0.011)
    assert block.update_time == 0.003


def test_operators_that_were_not_measured_cost_their_share_of_the_forward():
    block = measured().profile(SETUP).kind("Block")
    some = block.cost(LayerPolicy(select=(r"act\.silu", r"up\.linear")))
    assert 0.020 < some.backward_time <= 0.020 + 0.010
    assert block.cost(LayerPolicy(select=("nothing",))).backward_time == 0.020


def test_memory_is_that_of_the_trace():
    found = measured()
    block = found.profile(SETUP).kind("Block")
    plain = block.cost(LayerPolicy())
    assert (plain.forward, plain.backward) == (
        found.traced.memory["Block"].forward,
        found.traced.memory["Block"].backward,
    )
    assert block.parameters == 40


def test_gradients_come_to_be_in_the_first_backward_whatever_is_recomputed():
    block = measured().profile(SETUP).kind("Block")
    for policy in (LayerPolicy(), LayerPolicy(full=True), LayerPolicy(select=(r"act\.silu",))):
        assert block.cost(policy).born == block.gradients == 40


def test_a_step_is_the_schedule_and_the_slowest_update_after_it():
    plan = Plan(setup=PIPELINE, layout=Layout(((2, 1),)), policy=Policy())
    profile = measured().profile(PIPELINE)
    first, last = 0.002 + 0.004 + 2 * 0.030 + 0.0006, 0.002 + 0.004 + 0.030 + 0.0006
    # rank 0 is the slower one; it waits while rank 1 runs the first micro-batch, but for its own second forward
    waits = last + 2 * 0.0002 - (0.002 + 2 * 0.010 + 0.0005)
    timeline = simulate(profile, plan)
    assert timeline.step_time == pytest.approx(4 * first + waits)
    assert timeline.update == pytest.approx(0.001 + 2 * 0.003)


def test_what_sends_is_stated_measured_or_assumed():
    assert measured().profile(PIPELINE).transfer_time == 0.0002
    assert measured(bandwidth=1e3).profile(PIPELINE).transfer_time == 0.1
    alone = measured(transfer=None).profile(PIPELINE)
    assert alone.transfer_time > 0
    assert any("hardware preset" in note for note in alone.notes)
    assert measured().profile(SETUP).transfer_time == 0.0


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"seq": 128}, "seq is 128, but the profile was measured at 64"),
        ({"micro_batch": 1}, "micro_batch is 1, but"),
        ({"dtype": "bf16"}, "dtype is 'bf16', but the profile was measured at 'fp32'"),
        ({"tp": 2}, "tp is 2, but"),
    ],
)
def test_another_setup_is_refused(changed, says):
    with pytest.raises(EvenloadError, match=says):
        measured().profile(replace(SETUP, **changed))


def test_another_model_is_refused():
    measured().check_model("tiny", digest_of({**CONFIG, "torch_dtype": "float32"}))
    with pytest.raises(EvenloadError, match="another model than big"):
        measured().check_model("big", digest_of({**CONFIG, "hidden_size": 32}))


def test_a_kind_without_times_is_refused():
    times = dict(measured().times)
    del times[FIRST]
    with pytest.raises(EvenloadError, match="it says nothing of 'before the layers'"):
        measured(times=times)
