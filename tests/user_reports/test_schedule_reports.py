"""Public reports about schedules and memory along the pipeline, re-created small: what evenload answers to each."""

import numpy as np
import pytest
from tests.simulate.profiles import even_plan, layer, profile_of

from evenload.plan.policy import Policy, Recompute, first_layers
from evenload.plan.schedule import Action, Op, validate
from evenload.simulate.costs import ChunkCosts
from evenload.simulate.graph import ActionGraph
from evenload.simulate.inflight import in_flight
from evenload.simulate.timeline import simulate, simulate_costs


def peak(schedule, interleave, *, pp=8, micro_batches=24):
    """Highest activation memory of a model whose stage keeps 1 a micro-batch, whatever the chunks."""
    chunk = np.full((interleave, pp), 1 / interleave)
    costs = ChunkCosts.of_tables(chunk, kept=chunk)
    return max(simulate_costs(costs, schedule=schedule, micro_batches=micro_batches).peak)


def test_interleaved_1f1b_needs_more_memory_than_1f1b():
    """sail-sg/zero-bubble-pipeline-parallelism#21: 48 GB under 1F1B, 57 GB interleaved, on 8 GPUs."""
    assert peak("1f1b", 1) == pytest.approx(8)
    assert peak("1f1b", 1) < peak("interleaved_1f1b", 2) < peak("gpipe", 1)
    assert peak("interleaved_1f1b", 2) == pytest.approx(8 * (1 + 7 / 16))  # pp (1 + (pp - 1) / (pp * chunks))
    assert peak("less_memory", 2) == pytest.approx(peak("1f1b", 1))


def test_unequal_use_of_two_stages_is_explained_by_micro_batches_in_flight():
    """NVIDIA/Megatron-LM#307: selective recompute at pp 2 fills some nodes to 50 %, others to 70 %; full does not."""
    profile = profile_of(layer("block", parameters=10.0, kept=20.0), blocks=("block",) * 8)
    kept = simulate(profile, even_plan(profile, pp=2, micro_batches=8))
    assert [rank.in_flight for rank in kept.memory] == [(2,), (1,)]
    assert kept.memory[0].kept == 2 * kept.memory[1].kept
    assert kept.memory[0].static == kept.memory[1].static  # nothing but what is in flight differs
    full = simulate(profile, even_plan(profile, pp=2, micro_batches=8, policy=Policy.everywhere(Recompute.FULL, 8)))
    assert full.peak[0] == full.peak[1]
    layout = even_plan(profile, pp=2, micro_batches=8).layout
    first_stage = Policy(full=first_layers(((2, 0),), layout))
    mended = simulate(profile, even_plan(profile, pp=2, micro_batches=8, policy=first_stage))
    assert mended.peak[0] == mended.peak[1]
    assert mended.step_time < full.step_time


def test_the_first_of_two_stages_holds_more_though_parameters_are_even():
    """deepspeedai/DeepSpeed#3676: 2739 MB on one GPU, 2187 and 1425 MB on two stages, not twice 1370 MB."""
    early, late = layer("early", parameters=2.0, kept=100.0), layer("late", parameters=2.0, kept=40.0)
    profile = profile_of(early, late, blocks=("early",) * 4 + ("late",) * 4)
    one = simulate(profile, even_plan(profile, pp=1, micro_batches=4))
    two = simulate(profile, even_plan(profile, pp=2, micro_batches=4))
    assert two.memory[0].parameters == two.memory[1].parameters
    assert two.memory[0].in_flight == (2,)
    assert two.peak[0] > two.peak[1]
    assert sum(two.peak) > one.peak[0]


def test_a_custom_schedule_with_all_forwards_first_is_valid_and_holds_every_chunk():
    """pytorch/torchtitan, custom_schedule.csv: 2 ranks, 4 virtual stages, 8 micro-batches, 48 actions a rank."""
    forwards = [Action(Op.FORWARD, chunk, index) for chunk in (0, 1) for index in range(8)]
    backwards = [
        Action(op, chunk, index)
        for first in range(0, 8, 2)
        for chunk in (1, 0)
        for index in (first, first + 1)
        for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    ]
    size = {"pp": 2, "interleave": 2, "micro_batches": 8}
    order = (*forwards, *backwards)
    assert len(order) == 48
    validate((order, order), **size)
    assert in_flight(order, interleave=2).fullest.sum(axis=1).max() == 16
    ranks = ActionGraph.scheduled("interleaved_1f1b", **size).in_flight
    assert [moments.fullest.sum(axis=1).max() for moments in ranks] == [5, 3]


def test_recompute_that_ends_before_the_late_stages_fits_and_is_faster_than_recompute_everywhere():
    """IEIT-Yuan/Yuan-2.0#18: stage 0 holds as many micro-batches as there are stages, so it overflows first."""
    profile = profile_of(layer("block", parameters=1.0, kept=10.0), blocks=("block",) * 16)
    none = simulate(profile, even_plan(profile, pp=4, micro_batches=8))
    assert list(none.peak) == sorted(none.peak, reverse=True)
    limit = none.peak[2]
    layout = even_plan(profile, pp=4, micro_batches=8).layout
    by_stage = Policy(full=first_layers(((2, 2, 0, 0),), layout))
    mixed = simulate(profile, even_plan(profile, pp=4, micro_batches=8, policy=by_stage))
    full = simulate(profile, even_plan(profile, pp=4, micro_batches=8, policy=Policy.everywhere(Recompute.FULL, 16)))
    assert not none.fits(limit)
    assert mixed.fits(limit)
    assert full.fits(limit)
    assert none.step_time < mixed.step_time < full.step_time
