import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.errors import EvenloadError
from evenload.planner.effort import EFFORTS, find_effort
from evenload.planner.hull import lines_below
from evenload.planner.pareto import lowest_by, nondominated

numbers = st.integers(-50, 50).map(float)


@given(st.lists(numbers, min_size=1, max_size=12), st.integers(0, 5))
def test_lines_stay_below_the_points_and_touch_the_first_and_the_last(values, first):
    lines = lines_below(values, first)
    for index, value in enumerate(values, start=first):
        highest = max(slope * index + offset for slope, offset in lines)
        assert highest <= value + 1e-9
        if index in {first, first + len(values) - 1}:
            assert highest == pytest.approx(value, abs=1e-9)


@given(st.integers(1, 4).flatmap(lambda width: st.lists(st.lists(numbers, min_size=width, max_size=width), min_size=1)))
def test_nondominated_rows_beat_all_others_and_none_of_each_other(table):
    rows = np.array(table)
    kept = nondominated(rows)
    assert all((rows[kept] <= row).all(axis=1).any() for row in rows)
    for index in kept:
        others = [other for other in kept if other != index]
        assert not any((rows[other] <= rows[index]).all() for other in others)


def test_the_lowest_row_is_that_of_the_first_key_then_of_the_next():
    keys = (np.array([2.0, 1.0, 1.0]), np.array([0.0, 5.0, 4.0]))
    assert lowest_by(keys, np.array([True, True, True])) == 2
    assert lowest_by(keys, np.array([True, True, False])) == 1
    assert lowest_by(keys, np.zeros(3, dtype=bool)) is None


def test_a_budget_pays_for_fewer_batches_of_longer_schedules():
    normal = EFFORTS["normal"]
    assert normal.batches_for(100) == normal.batches
    assert normal.batches_for(10_000) < normal.batches
    assert normal.batches_for(10**9) == 20


def test_an_unknown_budget_is_an_error():
    with pytest.raises(EvenloadError, match="did you mean 'quick'"):
        find_effort("quik")
