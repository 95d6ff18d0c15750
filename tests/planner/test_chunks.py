import random
from dataclasses import replace

import numpy as np
import pytest
from tests.planner.problems import ORDER, problem_of, random_model

from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy
from evenload.planner.chunks import ALL_MIXES, chunk_options, mixes
from evenload.planner.costs import BOTH, CHOICES, COMM, FULL, NONE, SELECT, EndCosts
from evenload.setup import Setup
from evenload.simulate.costs import chunk_costs


def test_choices_are_listed_in_the_order_in_which_their_layers_lie():
    assert CHOICES == ORDER


def test_mixes_of_all_choices_have_select_or_comm_layers_never_both():
    rows = mixes(3, [FULL, BOTH, SELECT, COMM, NONE])
    assert (rows.sum(axis=1) == 3).all()
    assert not ((rows[:, SELECT] > 0) & (rows[:, COMM] > 0)).any()
    assert len(rows) == len({tuple(row) for row in rows.tolist()}) == 20 + 20 - 10  # half is select, comm, or nothing


def test_an_empty_chunk_has_one_option():
    assert mixes(0, []).tolist() == [[0] * 5]
    options = chunk_options([], EndCosts(forward=2.0, kept=3.0), EndCosts())
    assert len(options) == 1
    assert options.forward.tolist() == [2.0]
    assert options.kept.tolist() == [3.0]


def test_many_layers_still_have_every_mix_of_two_choices():
    layers = ALL_MIXES + 5
    rows = {tuple(row) for row in mixes(layers, [FULL, BOTH, SELECT, COMM, NONE]).tolist()}
    assert len(rows) < 50_000
    for first, second in ((FULL, NONE), (BOTH, NONE), (FULL, BOTH), (SELECT, NONE), (FULL, COMM)):
        for count in range(layers + 1):
            row = [0] * 5
            row[first] += count
            row[second] += layers - count
            assert tuple(row) in rows


@pytest.mark.parametrize("seed", range(12))
def test_every_option_costs_what_the_simulator_says(seed):
    profile, _, _ = case = random_model(seed)
    problem = problem_of(case)
    rng = random.Random(seed)
    layers = rng.randint(1, len(profile.blocks))
    kinds = problem.kinds[:layers]
    options = chunk_options([problem.costs[kind] for kind in kinds], problem.before, EndCosts())
    layout = Layout(((layers, len(profile.blocks) - layers),))
    for index in rng.sample(range(len(options)), min(8, len(options))):
        choices = [CHOICES[choice] for choice, count in enumerate(options.counts[index]) for _ in range(count)]
        rest = [ORDER[-1]] * (len(profile.blocks) - layers)
        plan = Plan(setup=Setup(pp=2), layout=layout, policy=Policy.of_choices([*choices, *rest]))
        costs = chunk_costs(profile, plan)
        peaks = ("forward_peak", "backward_peak", "first_backward_peak")
        for name in ("forward", "backward", "recompute", "kept", *peaks):
            assert getattr(options, name)[index] == pytest.approx(getattr(costs, name)[0, 0], rel=1e-12, abs=1e-9), name
        assert options.born == pytest.approx(costs.born[0, 0])
        held = (
            costs.static[0]
            - costs.born[0, 0]
            + sum(profile.kind(profile.blocks[layer]).buffers for layer in range(layers))
        )
        held += sum(profile.kind(kind).buffers for kind in profile.first)
        assert options.base == pytest.approx(held)
        assert options.parameters == pytest.approx(costs.parameters[0])


@pytest.mark.parametrize("seed", range(6))
def test_the_best_options_beat_every_option_left_out(seed):
    problem = problem_of(random_model(seed))
    options = chunk_options([problem.costs[kind] for kind in problem.kinds[:4]], problem.before, EndCosts())
    best = options.best()
    columns = ("forward", "backward", "kept", "forward_peak", "backward_peak", "first_backward_peak")
    every, kept = (np.stack([getattr(one, name) for name in columns], axis=1) for one in (options, best))
    assert all((kept <= row).all(axis=1).any() for row in every)
    assert len(best) <= len(options)


def test_kinds_without_a_cost_for_a_choice_never_take_it():
    problem = problem_of(random_model(3))
    only = np.array([True, False, False, False, True])
    costs = [replace(problem.costs[0], available=only), problem.costs[0]]
    options = chunk_options(costs, EndCosts(), EndCosts())
    assert {tuple(row) for row in options.counts.tolist()} == {
        (0, 0, 0, 0, 2), (1, 0, 0, 0, 1), (2, 0, 0, 0, 0), (1, 1, 0, 0, 0), (1, 0, 1, 0, 0), (1, 0, 0, 1, 0)
    }  # fmt: skip
