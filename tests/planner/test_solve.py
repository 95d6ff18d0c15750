import itertools
from dataclasses import replace

import pytest
from tests.planner.problems import BY_ID, INSTANCES, of_instance, optimum, problem_of, random_model, random_table

from evenload.errors import ANSWER_NO, EvenloadError
from evenload.planner.effort import EFFORTS, Effort
from evenload.planner.solve import Planner, solve
from evenload.simulate.timeline import simulate

NAMES = [instance["id"] for instance in INSTANCES]
REACHED = {
    "test_vpp1": 107460.0,
    "readme175b_v3_lm": 79543.8,
    "pp4_80l_v2": 218340.0,
    "hetero_moe61": 16851.0,
    "small12_s4": 1238.0,
}
LITTLE = Effort(actions=3e5, batches=20, exact=0.0, branch=0.0, relaxation=3e5, rounds=0)


def check(result, profile):
    """What holds for every answer: it is what its plan does, it fits, and its bound is one."""
    timeline = simulate(profile, result.plan)
    assert timeline.step_time == pytest.approx(result.step_time, rel=1e-12)
    assert timeline.peak == pytest.approx(result.peaks, rel=1e-12)
    assert timeline.fits(result.limit)
    assert result.bound <= result.step_time
    assert 0 <= result.gap <= 1
    least = result.baselines["even_least"]
    assert not least.fits or result.step_time <= least.step_time


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_recorded_instances_reach_the_best_known_step_time_and_beat_what_others_found(name):
    profile, setup, limit = of_instance(name)
    result = solve(profile, setup, limit)
    check(result, profile)
    instance = BY_ID[name]
    tolerance = 1 + 1e-9
    assert result.step_time <= REACHED[name] * tolerance
    if instance["best_known"] is not None:
        assert result.step_time <= instance["best_known"] * tolerance
    for recorded in instance["recorded"].values():
        assert result.step_time <= recorded["step_time"] * tolerance


def test_the_answer_for_the_small_instance_is_the_best_of_all_plans():
    case = of_instance("small12_s4")
    result = solve(*case)
    assert result.step_time == optimum(problem_of(case)) == 1238.0
    assert result.proved
    assert result.gap == 0.0


@pytest.mark.parametrize("name", ["test_vpp1", "small12_s4"])
def test_instances_with_one_chunk_are_proved(name):
    profile, setup, limit = of_instance(name)
    result = solve(profile, setup, limit, effort="quick")
    assert result.proved
    assert result.step_time == REACHED[name]


def best_of(case, effort="quick"):
    """(step time, bound) of the planner, infinite where it says that nothing fits."""
    profile, setup, limit = case
    try:
        result = solve(profile, setup, limit, effort=effort)
    except EvenloadError as error:
        if error.exit_code != ANSWER_NO:
            raise
        return float("inf"), float("inf")
    check(result, profile)
    return result.step_time, result.bound


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(2))
def test_200_random_small_tables_are_solved_to_the_optimum_and_never_bounded_above_it(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        case = random_table(seed)
        step_time, bound = best_of(case)
        best = optimum(problem_of(case))
        assert step_time == pytest.approx(best, rel=1e-9), seed
        assert bound <= best * (1 + 1e-12), seed


def test_what_every_chunk_takes_beside_its_layers_is_planned_with():
    for seed in range(12):
        profile, setup, limit = random_table(seed, layers=(4, 8), stages=(2, 3))
        profile = replace(profile, chunk_forward=3.0, chunk_backward=5.0)
        step_time, bound = best_of((profile, setup, limit))
        best = optimum(problem_of((profile, setup, limit)))
        assert step_time == pytest.approx(best, rel=1e-9), seed
        assert bound <= best * (1 + 1e-12), seed


@pytest.mark.slow
def test_random_small_models_with_working_memory_are_bounded_by_less_than_their_optimum():
    for seed in range(60):
        case = random_model(seed, layers=(4, 7), stages=(2, 3))
        step_time, bound = best_of(case)
        best = optimum(problem_of(case))
        assert step_time >= best * (1 - 1e-9), seed
        assert step_time <= best * 1.05 or step_time == best, seed
        assert bound <= best * (1 + 1e-12), seed


@pytest.mark.slow
def test_the_bound_holds_for_choices_that_settings_cannot_express():
    for seed in range(15):
        case = random_table(seed, layers=(4, 7), stages=(2, 3))
        _, bound = best_of(case)
        assert bound <= optimum(problem_of(case), expressible=False) * (1 + 1e-12), seed


@pytest.mark.slow
def test_500_random_tables_are_never_worse_than_even_layers_with_the_least_recompute():
    for seed in range(500):
        case = random_table(1000 + seed, layers=(6, 30), stages=(2, 6), interleaves=(1, 1, 2, 3), micro_batches=(1, 12))
        try:
            result = Planner(problem_of(case), seed=0, effort=EFFORTS["quick"] if seed % 25 == 0 else LITTLE).solve()
        except EvenloadError as error:
            if error.exit_code != ANSWER_NO:
                raise
        else:
            check(result, case[0])


def test_the_same_seed_gives_the_same_plan():
    case = random_table(11, layers=(20, 24), stages=(4, 4), interleaves=(2,))
    first, second = (solve(*case, seed=3, effort="quick") for _ in range(2))
    assert first.plan == second.plan
    assert (first.step_time, first.bound, first.evaluations) == (second.step_time, second.bound, second.evaluations)


def test_counts_of_recompute_add_up_to_the_layers():
    profile, setup, limit = random_table(8, layers=(20, 24), stages=(4, 4), interleaves=(3,))
    result = solve(profile, setup, limit, effort="quick")
    for chunk, stage in itertools.product(range(3), range(4)):
        counts = [table[chunk][stage] for table in result.recompute.values()]
        assert sum(counts) == result.layers_per_stage[chunk][stage]
        assert result.recompute["select"][chunk][stage] == 0 or result.recompute["comm"][chunk][stage] == 0


def test_ctrl_c_keeps_the_best_plan_and_says_so():
    profile, setup, limit = of_instance("test_vpp1")

    def stop(progress):
        raise KeyboardInterrupt

    result = solve(profile, setup, limit, progress=stop)
    assert result.interrupted
    check(result, profile)


def test_progress_is_told_with_the_best_plan_so_far():
    profile, setup, limit = of_instance("pp4_80l_v2")
    told = []
    result = solve(profile, setup, limit, effort="quick", progress=told.append)
    assert {"relaxation", "search", "exact solver"} <= {progress.phase for progress in told}
    assert told[-1].step_time >= result.step_time
    assert all(0 <= progress.done <= 1 for progress in told)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf"), True, "64GiB", None])
def test_a_limit_that_is_no_size_is_refused(limit):
    profile, setup, _ = of_instance("small12_s4")
    with pytest.raises(EvenloadError, match="memory limit is"):
        solve(profile, setup, limit)


def test_more_chunks_than_layers_are_refused():
    profile, setup, limit = of_instance("small12_s4")
    with pytest.raises(EvenloadError, match="needs at least 14 layers") as error:
        solve(profile, type(setup)(pp=16, micro_batches=2), limit)
    assert "lower pp" in error.value.fix


def test_an_unknown_effort_is_refused_with_the_nearest_name():
    with pytest.raises(EvenloadError, match="did you mean 'thorough'"):
        solve(*of_instance("small12_s4"), effort="thorogh")


def test_nothing_fits_is_the_answer_no():
    profile, setup, _ = of_instance("small12_s4")
    with pytest.raises(EvenloadError) as error:
        solve(profile, setup, 100.0)
    assert error.value.exit_code == ANSWER_NO
