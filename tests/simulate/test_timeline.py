import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulate.naive import naive_peak, naive_times
from tests.simulate.profiles import DATA, GIVEN, even_plan, given_plan, layer, profile_of

from evenload.errors import EvenloadError
from evenload.plan.policy import Policy, Recompute
from evenload.plan.schedule import SCHEDULES, Op
from evenload.simulate.costs import ChunkCosts
from evenload.simulate.timeline import simulate, simulate_costs

RECORDED = json.loads((DATA / "recorded_cases.json").read_text())
PLANS = [(instance, plan) for instance in GIVEN for plan in instance["plans"]]


def recorded_timeline(case):
    tables = {key: case[key] for key in ("recompute", "kept", "static", "constant") if key in case}
    costs = ChunkCosts.of_tables(case["forward"], **tables)
    return simulate_costs(costs, schedule=case["schedule"], micro_batches=case["micro_batches"])


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["schedule"])
def test_recorded_cases_are_reproduced(case):
    timeline, expected = recorded_timeline(case), case["expected"]
    assert timeline.step_time == pytest.approx(expected["step_time"], rel=1e-9)
    for part, value in expected["bubble"].items():
        assert getattr(timeline.bubble, part) == pytest.approx(value, abs=1e-6), part
    assert timeline.bubble.communication == 0
    if "kept" in case:
        assert timeline.peak == pytest.approx(expected["peak"], rel=1e-9)


@pytest.mark.parametrize(("instance", "recorded"), PLANS, ids=lambda one: one.get("id") or one["plan"])
def test_recorded_plans_of_layer_tables_are_reproduced(instance, recorded):
    timeline = simulate(*given_plan(instance, recorded))
    assert timeline.step_time == pytest.approx(recorded["step_time"], rel=1e-9)
    if "peak" in recorded:
        assert timeline.peak == pytest.approx(recorded["peak"], rel=1e-9)
    if "highest_peak" in recorded:
        assert max(timeline.peak) == pytest.approx(recorded["highest_peak"], rel=1e-9)
    for part, value in recorded.get("bubble", {}).items():
        assert getattr(timeline.bubble, part) == pytest.approx(value, abs=1e-4), part


def test_the_recorded_plans_hold_the_published_step_times():
    assert {107460, 111510, 108270, 80035.2, 218520, 1238, 16919, 154184.4} <= {
        round(recorded["step_time"], 1) for _, recorded in PLANS
    }


@st.composite
def timelines(draw):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    interleave = 1 if SCHEDULES[name].one_chunk else draw(st.integers(1, 3))
    pp, micro_batches = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    tables = rng.random((4, interleave, pp))
    costs = ChunkCosts.of_tables(tables[0], recompute=tables[1], kept=tables[2], static=rng.random(pp), constant=0.5)
    return simulate_costs(costs, schedule=name, micro_batches=micro_batches, transfer=draw(st.sampled_from([0.0, 0.3])))


@given(timeline=timelines())
def test_a_timeline_equals_the_naive_simulation(timeline):
    costs, orders = timeline.costs, timeline.graph.actions
    for rank, order in enumerate(orders):
        column = (costs.kept[:, rank], costs.forward_peak[:, rank], costs.backward_peak[:, rank])
        expected = costs.base[rank] + naive_peak(order, *column)
        assert timeline.peak[rank] == pytest.approx(expected, rel=1e-12)
        times, levels = timeline.curve(rank)
        assert levels.max() == pytest.approx(timeline.peak[rank], rel=1e-12)
        assert levels[-1] == pytest.approx(costs.base[rank], rel=1e-12)
        assert (np.diff(times) >= 0).all()
    assert timeline.bubble.real == pytest.approx(
        timeline.step_time
        / (np.mean(timeline.busy) - costs.recompute.sum() * timeline.graph.micro_batches / len(orders))
        - 1
    )


@given(timeline=timelines())
def test_actions_are_listed_in_the_order_that_ranks_run_them(timeline):
    naive = naive_times(timeline.graph.actions, timeline.costs.forward, timeline.costs.backward)
    assert [(a.rank, a.op, a.chunk, a.micro_batch) for a in timeline.actions] == [
        (rank, *action) for rank, order in enumerate(timeline.graph.actions) for action in order
    ]
    if timeline.bubble.communication == 0:
        assert max(action.end for action in timeline.actions) == pytest.approx(max(end for _, end in naive.values()))


def test_transfers_show_as_communication():
    costs = ChunkCosts.of_tables([[1.0, 1.0, 1.0]])
    quick = simulate_costs(costs, schedule="1f1b", micro_batches=4)
    slow = simulate_costs(costs, schedule="1f1b", micro_batches=4, transfer=0.25)
    assert slow.step_time > quick.step_time
    assert slow.bubble.communication == pytest.approx((slow.step_time - quick.step_time) / 12)
    assert (slow.bubble.ideal, slow.bubble.imbalance) == (quick.bubble.ideal, quick.bubble.imbalance)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_have_the_ideal_bubble_and_nothing_else(schedule):
    bubble = simulate_costs(ChunkCosts.of_tables([[1.0] * 4]), schedule=schedule, micro_batches=8).bubble
    assert bubble.ideal == 3 / 8
    assert bubble.real == pytest.approx(3 / 8)
    assert bubble.real / (1 + bubble.real) == pytest.approx(3 / (8 + 3))  # the share of the step


def test_a_step_without_work_has_no_bubble():
    timeline = simulate_costs(ChunkCosts.of_tables([[0.0, 0.0]]), schedule="1f1b", micro_batches=2)
    assert (timeline.step_time, timeline.bubble.real) == (0.0, 0.0)


def block_profile(**more):
    return profile_of(
        layer("block", parameters=10.0, kept=2.0, extra=1.0, backward_extra=4.0), blocks=("block",) * 8, **more
    )


def test_the_peak_is_told_line_by_line():
    profile = block_profile(constant=3.0, outside=7.0, buffers=lambda stage, layers: 1.0 + stage)
    timeline = simulate(profile, even_plan(profile, pp=4, micro_batches=8))
    first, last = timeline.memory[0], timeline.memory[-1]
    assert first.lines == {
        "parameters": 20.0,
        "gradients": 10.0,
        "optimizer": 40.0,
        "kept": 4 * 4.0,
        "transient": 4.0,
        "buffers": 1.0,
        "outside": 7.0,
        "constant": 3.0,
    }
    assert first.peak_allocated == 70 + 3 + 1 + 16 + 4
    assert first.needed == first.peak_allocated + 7
    assert (first.in_flight, first.running) == ((4,), "backward of chunk 0")
    assert [rank.in_flight for rank in timeline.memory] == [(4,), (3,), (2,), (1,)]
    assert last.buffers == 4.0
    assert timeline.peak[0] == first.peak_allocated


def test_the_optimizer_step_can_set_the_peak():
    profile = block_profile(optimizer_transient=lambda parameters: 50 * parameters)
    timeline = simulate(profile, even_plan(profile, pp=4, micro_batches=8))
    rank = timeline.memory[0]
    assert (rank.running, rank.kept, rank.transient, rank.in_flight) == ("optimizer step", 0.0, 1000.0, (0,))
    assert timeline.curve(0)[1].max() == rank.peak_allocated
    small = block_profile(optimizer_transient=lambda parameters: 0.01 * parameters)
    assert simulate(small, even_plan(small, pp=4, micro_batches=8)).memory[0].running == "backward of chunk 0"


def test_gradients_come_to_be_in_the_first_backward_of_a_step():
    """Three layers of one gradient each; every layer keeps 10 and needs 2 more in backward."""
    one = layer("block", parameters=2.0, kept=10.0, backward_extra=2.0, born=True)
    held, born = (
        simulate(profile := profile_of(kind, blocks=("block",) * 3), even_plan(profile, pp=1, micro_batches=count))
        for kind, count in ((replace(one, cost=layer("block", kept=10.0, backward_extra=2.0).cost), 1), (one, 1))
    )
    static = 3 * (2 + 4)
    assert held.peak == (static + 3 + 30 + 2,)
    (memory,) = born.memory
    # the first layer that runs backward makes its gradient beside what it needs; there are no others yet
    assert (memory.peak_allocated, memory.gradients, memory.transient) == (static + 30 + 2 + 1, 0, 3)
    assert born.curve(0)[1].max() == memory.peak_allocated
    assert born.curve(0)[1][-2:].tolist() == [static + 3, static]
    twice = profile_of(one, blocks=("block",) * 3)
    later = simulate(twice, even_plan(twice, pp=1, micro_batches=2))
    assert later.peak == (static + 3 + 30 + 2,)
    assert later.memory[0].gradients == 3
    assert later.curve(0)[1].max() == later.peak[0]


def test_the_optimizer_step_finds_every_gradient():
    one = layer("block", parameters=100.0, kept=1.0, born=True)
    profile = profile_of(one, blocks=("block",) * 2, optimizer_transient=lambda parameters: parameters / 10)
    (memory,) = simulate(profile, even_plan(profile, pp=1, micro_batches=1)).memory
    assert (memory.running, memory.gradients, memory.transient) == ("optimizer step", 100.0, 20.0)
    assert memory.peak_allocated == 2 * 100 + 2 * 200 + 100 + 20


def test_fewer_micro_batches_than_stages_hold_less():
    profile = block_profile()
    few = simulate(profile, even_plan(profile, pp=4, micro_batches=2))
    assert [rank.in_flight for rank in few.memory] == [(2,), (2,), (2,), (1,)]
    many = simulate(profile, even_plan(profile, pp=4, micro_batches=8))
    assert few.peak[0] < many.peak[0]
    assert few.peak[3] == many.peak[3]


def test_a_plan_fits_up_to_its_limit_with_what_is_outside():
    profile = block_profile(outside=7.0)
    timeline = simulate(profile, even_plan(profile, pp=4, micro_batches=8))
    needed = max(rank.needed for rank in timeline.memory)
    assert timeline.fits(needed)
    assert not timeline.fits(needed - 0.5)
    assert needed == max(timeline.peak) + 7


def test_full_recompute_costs_time_and_saves_memory():
    profile = block_profile()
    none = simulate(profile, even_plan(profile, pp=4, micro_batches=8))
    full = simulate(profile, even_plan(profile, pp=4, micro_batches=8, policy=Policy.everywhere(Recompute.FULL, 8)))
    assert full.bubble.recompute == pytest.approx(1 / 3)
    assert full.step_time == pytest.approx(none.step_time * 4 / 3)
    assert max(full.peak) < max(none.peak)


def test_an_unknown_rank_has_no_curve():
    timeline = simulate_costs(ChunkCosts.of_tables([[1.0, 1.0]]), schedule="1f1b", micro_batches=2)
    with pytest.raises(EvenloadError, match="ranks 0 to 1"):
        timeline.curve(2)


def test_units_and_notes_of_the_profile_are_passed_on():
    timeline = simulate(*given_plan(*PLANS[0]))
    assert (timeline.memory_unit, timeline.time_unit) == ("MB", "units")
    assert timeline.notes
    assert timeline.actions[0].op is Op.FORWARD
