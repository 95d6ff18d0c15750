import random

import numpy as np
import pytest
from tests.planner.problems import _rank_options, layouts, problem_of, random_model, random_table

from evenload.planner.candidate import candidate
from evenload.planner.costs import CHOICES, FULL
from evenload.planner.problem import Problem
from evenload.planner.ranks import Ranks
from evenload.profile.given import read_layer_table
from evenload.setup import Setup
from evenload.simulate.timeline import simulate

CASES = [*(random_model(seed) for seed in range(6)), *(random_table(seed) for seed in range(6))]


def some_layouts(problem, seed, number=6):
    every = list(layouts(problem))
    return random.Random(seed).sample(every, min(number, len(every)))


@pytest.mark.parametrize("case", CASES)
def test_candidates_take_the_time_and_memory_that_the_simulator_says(case):
    problem = problem_of(case)
    ranks = Ranks(problem)
    for counts in some_layouts(problem, 1):
        found = candidate(ranks, counts)
        if found is None:
            continue
        timeline = simulate(problem.profile, problem.plan(counts, found.choices))
        assert found.peaks == pytest.approx(timeline.peak, rel=1e-12)
        assert timeline.costs.forward == pytest.approx(found.forward, rel=1e-12)
        assert timeline.costs.backward == pytest.approx(found.backward, rel=1e-12)
        assert timeline.fits(problem.limit)
        assert (problem.choices(problem.plan(counts, found.choices)) == found.choices).all()


@pytest.mark.parametrize("case", CASES)
def test_options_of_a_rank_are_all_that_no_other_beats(case):
    problem = problem_of(case)
    ranks = Ranks(problem)
    for counts in some_layouts(problem, 2, 4):
        contents, bounds = ranks.contents(counts), [0, *np.cumsum(counts).tolist()]
        for stage in range(problem.pp):
            options = ranks.options(stage, ranks.of_rank(stage, contents))
            mine = {tuple(np.round(row, 9)) for row in options.times[:, 1].tolist()}
            best = {tuple(np.round(times[1], 9)) for times in _rank_options(problem, stage, bounds, expressible=True)}
            if problem.interleave == 1:
                best = {min(best)} if best else set()
            assert mine == best
            assert options.complete


def test_a_given_combination_is_pinned_where_it_fits():
    problem = problem_of(random_table(3, interleaves=(2,), kinds=(1,)))
    ranks = Ranks(problem)
    found = next(found for counts in layouts(problem) if (found := candidate(ranks, counts)) is not None)
    again = candidate(ranks, found.counts, found.choices)
    assert again is not None
    assert (again.choices == found.choices).all()
    assert all(len(options) == 1 for options in again.ranks)


def test_a_combination_that_settings_cannot_express_is_not_pinned():
    problem = problem_of(random_table(3, interleaves=(2,), kinds=(1,)))
    ranks = Ranks(problem)
    counts = next(layouts(problem))
    contents = ranks.of_rank(0, ranks.contents(counts))
    wrong = np.full((2, len(CHOICES)), 7)
    assert ranks.pinned(0, contents, wrong) is None


def test_forced_choices_are_taken_whether_they_fit_or_not():
    profile, setup, _ = random_table(5, kinds=(1,))
    problem = problem_of((profile, setup, 1.0))
    ranks = Ranks(problem)
    counts = next(layouts(problem))
    options = ranks.forced(0, ranks.of_rank(0, ranks.contents(counts)), FULL)
    assert len(options) == 1
    assert options.peak[0] > problem.limit


def test_of_very_many_combinations_the_quickest_are_kept_and_the_rest_is_owned_up_to():
    kept = {"activation": 101, "select_rec": 83, "select_comm": 67, "both_comm_select": 43, "recompute": 7}
    body = {"name": "A", "type": "BODY", "time": 10, "nb_layer": 48, "memory_parameter": 1}
    table = {"layers_description": [body | {f"memory_{name}": size for name, size in kept.items()}]}
    setup = Setup(pp=2, interleave=6, micro_batches=4, schedule="interleaved_1f1b")
    problem = Problem(profile=read_layer_table(table).profile, setup=setup, limit=3000.0)
    ranks = Ranks(problem)
    options = ranks.options(0, ranks.of_rank(0, ranks.contents((4,) * 12)))
    assert 0 < len(options) <= 64
    assert not options.complete
    assert (options.peak <= problem.limit).all()
