import itertools
import random

import numpy as np
import pytest
from tests.planner.problems import layouts, problem_of, random_model, random_table

from evenload.planner.candidate import candidate
from evenload.planner.columns import Columns
from evenload.planner.hulls import hulls
from evenload.planner.master import Master
from evenload.planner.ranks import Ranks
from evenload.planner.rows import layer_rows, memory_rows, order_rows
from evenload.planner.timing import Timing

CASES = [*(random_model(seed) for seed in range(10)), *(random_table(seed) for seed in range(10))]


def feasible(problem, seed, number=20):
    """Candidates that fit, with random combinations of recompute."""
    rng, ranks = random.Random(seed), Ranks(problem)
    few = list(itertools.islice(layouts(problem), 5000))
    rng.shuffle(few)
    found = [one for counts in few[: 4 * number] if (one := candidate(ranks, counts)) is not None][:number]
    for one in found:
        changes = {stage: (options, rng.randrange(len(options))) for stage, options in enumerate(one.ranks)}
        yield one.changed(changes)


def values_of(columns, found):
    """The candidate as a solution of the program."""
    problem = columns.problem
    values = np.zeros(columns.step + 1)
    group_of = [number for number, group in enumerate(columns.groups) for _ in range(group.layers)]
    if not columns.ordered:
        group_of = problem.kinds.tolist()
    layer = 0
    for chunk, row in enumerate(found.choices.tolist()):
        for choice, count in enumerate(row):
            for _ in range(count):
                values[columns.counts.index((chunk, group_of[layer], choice))] += 1
                layer += 1
    if columns.ordered:
        ends = np.cumsum([group.layers for group in columns.groups])
        placed = np.cumsum(found.counts)
        for number in range(len(columns.groups) - 1):
            for chunk in range(problem.chunks):
                values[columns.switch(number, chunk)] = placed[chunk] >= ends[number]
    return values


def keeps(row, values):
    total = sum(values[column] * weight for column, weight in zip(row.columns, row.coefficients, strict=True))
    return row.lower - 1e-6 <= total <= row.upper + 1e-6


@pytest.mark.parametrize("switches", [0, 256])
@pytest.mark.parametrize("case", CASES)
def test_every_plan_that_fits_keeps_every_row(case, switches, monkeypatch):
    monkeypatch.setattr("evenload.planner.columns.MOST_SWITCHES", switches)
    problem = problem_of(case)
    columns = Columns(problem)
    for found in feasible(problem, 1):
        values = values_of(columns, found)
        assert all(keeps(row, values) for row in layer_rows(columns))
        assert all(keeps(row, values) for row in order_rows(columns))
        for rows in memory_rows(columns, scale=1e4 / problem.limit):
            assert rows.excess(values).max() <= 1e-6
            assert keeps(rows.row(0), values)


def test_many_alternating_kinds_are_counted_by_kind():
    profile, setup, limit = random_model(4, layers=(120, 120), stages=(3, 3), interleaves=(2,))
    columns = Columns(problem_of((profile, setup, limit)))
    assert not columns.ordered
    assert len(columns.groups) == 2
    assert columns.switches == 0


@pytest.mark.parametrize("case", CASES)
def test_the_program_knows_the_durations_of_a_plan_and_no_path_is_longer_than_its_step(case):
    problem = problem_of(case)
    master, timing = Master(problem, time_scale=100.0, seed=0), Timing(problem)
    columns = Columns(problem)
    candidates = list(feasible(problem, 2, 6))
    for found in candidates:
        values = values_of(columns, found)
        forward, backward = master.durations(values)
        assert forward == pytest.approx(found.forward)
        assert backward == pytest.approx(found.backward)
        assert (master.choices(values) == found.choices).all()
        assert master.totals(values)[problem.pp :].tolist() == list(found.counts)
        timing.learn(found.forward, found.backward)
    for found in candidates:
        step_time = timing.step_time(found)
        assert timing.lower(found.forward[None], found.backward[None])[0] <= step_time * (1 + 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_no_plan_that_is_quick_enough_is_outside_the_hull_of_a_rank(case):
    problem = problem_of(case)
    timing, columns = Timing(problem), Columns(problem)
    master = Master(problem, time_scale=100.0, seed=0)
    candidates = list(feasible(problem, 3, 12))
    if not candidates:
        return
    steps = [timing.step_time(found) for found in candidates]
    ceiling = float(np.median(steps))
    clouds = hulls(problem, Ranks(problem), quicker_than=ceiling, seed=0)
    assert any(cloud is not None for cloud in clouds)
    for found, step in zip(candidates, steps, strict=True):
        if step > ceiling:
            continue
        for stage, cloud in enumerate(clouds):
            if cloud is not None:
                assert cloud.outside(*master.point(stage, values_of(columns, found))) is None


def test_a_point_outside_a_hull_is_cut_off_and_the_points_inside_are_not():
    problem = problem_of(random_table(0, interleaves=(2,), kinds=(1,)))
    master, columns, ranks = Master(problem, time_scale=100.0, seed=0), Columns(problem), Ranks(problem)
    clouds = hulls(problem, ranks, quicker_than=1e9, seed=0)
    found = next(feasible(problem, 5))
    values = values_of(columns, found)
    counts, backward = master.point(0, values)
    half = clouds[0].outside(counts, backward * 0.5)
    assert half is not None
    assert half.weights @ (backward * 0.5) + (half.layers * counts).sum() < half.least
    assert half.weights @ backward + (half.layers * counts).sum() >= half.least - 1e-9
