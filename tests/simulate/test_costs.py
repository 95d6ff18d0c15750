from dataclasses import replace

import numpy as np
import pytest
from tests.simulate.profiles import GIVEN, even_plan, given_plan, layer, profile_of

from evenload.errors import EvenloadError
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy, Recompute
from evenload.setup import Setup
from evenload.simulate.costs import ChunkCosts, chunk_costs


def test_layers_are_added_up_by_chunk():
    profile = profile_of(layer("block", time=2.0, parameters=10.0, kept=3.0), blocks=("block",) * 6)
    plan = Plan(setup=Setup(pp=2, interleave=2), layout=Layout(((1, 2), (3, 0))), policy=Policy())
    costs = chunk_costs(profile, plan)
    assert costs.forward.tolist() == [[2, 4], [6, 0]]
    assert costs.backward.tolist() == [[4, 8], [12, 0]]
    assert costs.kept.tolist() == [[3, 6], [9, 0]]
    assert costs.parameters.tolist() == [40, 20]
    assert costs.gradients.tolist() == [20, 10]
    assert costs.optimizer.tolist() == [80, 40]
    assert costs.static.tolist() == [140, 70]


def test_embedding_is_in_the_first_chunk_of_the_first_stage_and_the_head_in_the_last_of_the_last():
    kinds = (
        layer("block"),
        layer("embedding", time=0.5, parameters=4.0),
        layer("mtp", time=3.0),
        layer("head", time=7.0),
    )
    profile = profile_of(*kinds, blocks=("block",) * 4, first=("embedding",), last=("mtp", "head"))
    plan = even_plan(profile, pp=2, interleave=2, micro_batches=2, schedule="interleaved_1f1b")
    assert chunk_costs(profile, plan).forward.tolist() == [[1.5, 1.0], [1.0, 11.0]]
    assert chunk_costs(profile, plan).parameters.tolist() == [4.0, 0.0]


def test_recompute_moves_memory_into_time():
    profile = profile_of(layer("block", kept=5.0), blocks=("block",) * 4)
    policy = Policy.of_choices([Recompute.FULL, Recompute.NONE, Recompute.NONE, Recompute.FULL])
    costs = chunk_costs(profile, even_plan(profile, pp=2, micro_batches=2, policy=policy))
    assert costs.kept.tolist() == [[5.0, 5.0]]
    assert costs.recompute.tolist() == [[1.0, 1.0]]
    assert costs.backward.tolist() == [[5.0, 5.0]]


def test_the_ends_are_never_recomputed():
    profile = profile_of(layer("block"), layer("head", kept=9.0), blocks=("block",), last=("head",))
    plan = even_plan(profile, pp=1, micro_batches=1, policy=Policy.of_choices([Recompute.FULL]))
    assert chunk_costs(profile, plan).kept.tolist() == [[9.0]]


def test_a_forward_peaks_in_its_last_layers_and_a_backward_in_its_first():
    """Three layers keep 1 each; the middle one needs 4 more in forward, every one 2 more in backward."""
    profile = profile_of(
        layer("plain", backward_extra=2.0),
        layer("wide", extra=4.0, backward_extra=2.0),
        blocks=("plain", "wide", "plain"),
    )
    costs = chunk_costs(profile, even_plan(profile, pp=1, micro_batches=1))
    assert costs.forward_peak.tolist() == [[1 + 1 + 4]]
    assert costs.backward_peak.tolist() == [[2]]


def test_full_recompute_brings_one_layer_back_at_a_time():
    profile = profile_of(layer("block", kept=5.0, extra=1.0, backward_extra=2.0), blocks=("block",) * 3)
    plan = even_plan(profile, pp=1, micro_batches=1, policy=Policy.everywhere(Recompute.FULL, 3))
    costs = chunk_costs(profile, plan)
    assert costs.kept.tolist() == [[0.0]]
    assert costs.forward_peak.tolist() == [[6.0]]
    assert costs.backward_peak.tolist() == [[7.0]]


def test_buffers_of_layers_add_to_those_of_the_stage():
    block = replace(layer("block"), buffers=2.0)
    profile = profile_of(block, blocks=("block",) * 4, buffers=lambda stage, layers: 10.0 * stage)
    costs = chunk_costs(profile, even_plan(profile, pp=2, micro_batches=1))
    assert costs.buffers.tolist() == [4.0, 14.0]
    assert costs.static.tolist() == [0.0, 0.0]


def test_buffers_outside_and_the_optimizer_step_are_asked_for_by_stage():
    profile = profile_of(
        layer("block", parameters=3.0, buffers=0.25),
        blocks=("block",) * 3,
        constant=11.0,
        outside=5.0,
        buffers=lambda stage, layers: 100.0 * stage + layers,
        optimizer_transient=lambda parameters: 2 * parameters,
    )
    costs = chunk_costs(profile, even_plan(profile, pp=3, micro_batches=1))
    assert costs.buffers.tolist() == [1.25, 101.25, 201.25]
    assert costs.optimizer_transient.tolist() == [6.0, 6.0, 6.0]
    assert costs.constant.tolist() == [11.0, 11.0, 11.0]
    assert costs.outside.tolist() == [5.0, 5.0, 5.0]


def test_a_plan_for_another_model_is_refused():
    profile = profile_of(layer("block"), blocks=("block",) * 5)
    with pytest.raises(EvenloadError, match="places 4 layers, the model has 5"):
        chunk_costs(profile, Plan(setup=Setup(pp=2), layout=Layout(((2, 2),)), policy=Policy()))


def test_a_choice_that_a_table_has_no_number_for_is_refused():
    instance = next(one for one in GIVEN if one["id"] == "small12_s4")
    profile, plan = given_plan(instance, instance["plans"][0])
    select = Plan(setup=plan.setup, layout=plan.layout, policy=Policy.everywhere(Recompute.SELECT, 12))
    with pytest.raises(EvenloadError, match="no memory for layers 'BODY0' under recompute 'select'"):
        chunk_costs(profile, select)


def test_costs_known_by_chunk_are_taken_as_they_are():
    costs = ChunkCosts.of_tables([[1, 2], [3, 4]], recompute=[[0, 1], [0, 0]], kept=2, static=[5, 6], constant=7)
    assert costs.backward.tolist() == [[2, 5], [6, 8]]
    assert costs.kept.tolist() == [[2, 2], [2, 2]]
    assert costs.base.tolist() == [12, 13]
    given = ChunkCosts.of_tables([[1, 2]], backward=[[3, 3]], recompute=[[1, 0]])
    assert given.backward.tolist() == [[3, 3]]


@pytest.mark.parametrize("tables", [{"forward": [1, 2]}, {"forward": [[]]}, {"forward": [[1, 2]], "kept": [[1]]}])
def test_tables_of_the_wrong_shape_are_refused(tables):
    with pytest.raises(EvenloadError, match="shape"):
        ChunkCosts.of_tables(**tables)


def test_costs_do_not_share_memory_with_what_they_were_made_from():
    forward = np.ones((1, 2))
    costs = ChunkCosts.of_tables(forward)
    forward[:] = 9
    assert costs.forward.tolist() == [[1, 1]]
