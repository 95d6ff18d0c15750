import re

import pytest
from tests.planner.problems import of_instance, problem_of, random_model, random_table

from evenload.errors import ANSWER_NO
from evenload.planner.baselines import baselines, even_counts
from evenload.planner.effort import EFFORTS
from evenload.planner.explain import explain, one_more
from evenload.planner.lean import leanest, repair
from evenload.planner.ranks import Ranks
from evenload.planner.solve import Planner
from evenload.planner.timing import Timing
from evenload.planner.verdict import NothingFitsError, amount
from evenload.simulate.timeline import simulate
from evenload.units import GIB


def planned(case):
    problem = problem_of(case)
    return problem, Planner(problem, seed=0, effort=EFFORTS["quick"]).solve()


@pytest.mark.parametrize("name", ["test_vpp1", "small12_s4", "hetero_moe61"])
def test_every_named_change_is_a_plan_that_takes_its_time_and_keeps_its_limit(name):
    problem, result = planned(of_instance(name))
    told = explain(result, problem)
    changes = (*told.changes, *told.interleaves)
    assert len(changes) >= 3
    for change in changes:
        timeline = simulate(problem.profile, change.plan)
        assert timeline.step_time == pytest.approx(change.step_time, rel=1e-12)
        assert change.difference == pytest.approx(change.step_time - result.step_time)
        assert max(rank.needed for rank in timeline.memory) == pytest.approx(change.needed)
        assert timeline.fits(change.limit)


def test_more_memory_never_makes_a_plan_slower():
    problem, result = planned(of_instance("test_vpp1"))
    more = next(change for change in explain(result, problem).changes if "more memory" in change.name)
    assert more.limit == result.limit + 1000
    assert more.step_time <= result.step_time


def test_one_layer_moved_differs_by_one_layer():
    problem, result = planned(of_instance("small12_s4"))
    moved = next(change for change in explain(result, problem).changes if "layer moved" in change.name)
    differences = [
        here - there for here, there in zip(moved.plan.layout.per_stage, result.plan.layout.per_stage, strict=True)
    ]
    assert sorted(differences) == [-1, 0, 0, 1]
    assert f"from stage {differences.index(-1)} to stage {differences.index(1)}" in moved.name


def test_the_binding_rank_and_its_lines_are_those_of_the_simulator():
    problem, result = planned(of_instance("hetero_moe61"))
    told = explain(result, problem)
    timeline = simulate(problem.profile, result.plan)
    fullest = max(timeline.memory, key=lambda rank: rank.needed)
    assert told.memory == fullest
    assert told.free == result.limit - fullest.needed
    assert [size for _, size in told.largest] == sorted(fullest.lines.values(), reverse=True)[:3]
    assert 0 < told.share <= 1
    assert told.busy == pytest.approx(timeline.busy[told.slowest] / timeline.step_time)


def test_interleaving_is_compared_by_plans_with_more_chunks_and_the_price_is_named():
    problem, result = planned(of_instance("small12_s4"))
    told = explain(result, problem)
    assert [change.plan.layout.interleave for change in told.interleaves] == [2, 3]
    assert any("no time for transfers" in note for note in told.notes)


def test_one_stage_has_nothing_to_interleave():
    profile, setup, _ = of_instance("small12_s4")
    problem, result = planned((profile, type(setup)(), 1e6))
    told = explain(result, problem)
    assert told.interleaves == ()
    assert "more than one stage" in told.notes[0]


@pytest.mark.parametrize(
    ("unit", "step", "name"),
    [("bytes", GIB, "1 GiB"), ("MB", 1000, "1000 MB"), ("units", 5.0, "1 % (5 units)")],
)
def test_a_step_of_memory_is_one_that_people_think_in(unit, step, name):
    assert one_more(unit, 500.0) == (step, name)


def test_amounts_are_in_gib_or_in_the_unit_of_the_table():
    assert amount(1.5 * GIB, "bytes") == "1.50 GiB"
    assert amount(53000, "MB") == "53,000 MB"


def nothing_fits(case):
    with pytest.raises(NothingFitsError) as error:
        planned(case)
    assert error.value.exit_code == ANSWER_NO
    return error.value


def test_when_static_memory_alone_is_too_much_the_answer_says_so():
    profile, setup, _ = of_instance("test_vpp1")
    error = nothing_fits((profile, setup, 9000.0))
    assert error.proved
    assert error.shortage.static_alone
    assert re.search(r"parameters, gradients, optimizer states and buffers of rank \d+ alone take", str(error))


def test_when_what_is_in_flight_is_too_much_the_answer_names_it():
    profile, setup, _ = of_instance("pp4_80l_v2")
    error = nothing_fits((profile, setup, 16000.0))
    assert not error.shortage.static_alone
    assert "micro-batches in flight" in str(error)


@pytest.mark.parametrize("case", [of_instance("test_vpp1"), random_table(2), random_model(2), random_model(7)])
def test_the_limit_that_is_named_fits(case):
    profile, setup, _ = case
    error = nothing_fits((profile, setup, 60.0))
    needed = error.shortage.needed
    timeline = simulate(profile, error.shortage.plan)
    assert timeline.fits(needed)
    assert max(rank.needed for rank in timeline.memory) == needed
    _, result = planned((profile, setup, needed * (1 + 1e-9)))
    assert result.step_time > 0


def test_a_layout_that_does_not_fit_is_repaired_by_moving_layers():
    problem = problem_of(of_instance("test_vpp1"))
    ranks = Ranks(problem)
    counts = (30, *([4] * 14), 10)
    assert sum(counts) == 96
    fixed = repair(ranks, counts)
    assert fixed is not None
    assert sum(fixed) == 96
    assert all(len(ranks.options(stage, ranks.of_rank(stage, ranks.contents(fixed)))) for stage in range(problem.pp))


def test_a_layout_that_fits_is_left_alone():
    problem = problem_of(of_instance("test_vpp1"))
    assert repair(Ranks(problem), (6,) * 16) == (6,) * 16


def test_the_leanest_plan_needs_no_more_than_even_layers_with_everything_recomputed():
    problem = problem_of(of_instance("readme175b_v3_lm"))
    ranks, timing = Ranks(problem), Timing(problem)
    lean = min(max(leanest(ranks, counts).peaks) for counts in even_counts(problem))
    assert lean <= baselines(problem, ranks, timing)["even_full"].peak


def test_even_layouts_place_every_layer_and_keep_the_fewest():
    for seed in range(30):
        problem = problem_of(random_table(seed))
        for counts in even_counts(problem):
            assert sum(counts) == len(problem.kinds)
            assert max(counts) - min(counts) <= 1


def test_baselines_are_what_they_say():
    profile, setup, limit = of_instance("test_vpp1")
    problem = problem_of((profile, setup, limit))
    found = baselines(problem, Ranks(problem), Timing(problem))
    assert (found["even_none"].step_time, found["even_none"].peak, found["even_none"].fits) == (104850, 99794, False)
    assert (found["even_full"].step_time, found["even_full"].peak, found["even_full"].fits) == (138330, 23570, True)
    assert (found["even_least"].step_time, found["even_least"].fits) == (108270, True)
    for baseline in found.values():
        assert simulate(profile, baseline.plan).step_time == baseline.step_time
