"""Few layers stand for many: which are traced, and how a traced step becomes the step of all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.errors import EvenloadError
from evenload.profile.profile import Segment
from evenload.simulate.composition import NO_LAYER, compose, reduction

KINDS = st.lists(
    st.tuples(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), st.integers(1, 12)), min_size=1, max_size=3
).map(lambda runs: [kind for unit, count in runs for kind in unit * count])


@given(KINDS)
def test_every_layer_has_a_traced_one_of_its_kind_with_neighbours_of_the_same_kinds(kinds):
    reduced = reduction(kinds)
    of_traced = [kinds[layer] for layer in reduced.traced]
    assert list(reduced.traced) == sorted(set(reduced.traced))
    assert len(reduced.source) == len(kinds)

    def around(sequence, position):
        return [sequence[i] if 0 <= i < len(sequence) else None for i in range(position - 1, position + 2)]

    for layer, source in enumerate(reduced.source):
        assert around(kinds, layer) == around(of_traced, source)
    assert [reduced.source[layer] for layer in reduced.traced] == list(range(len(reduced.traced)))


@given(KINDS)
def test_a_sweep_over_the_traced_layers_becomes_a_sweep_over_all(kinds):
    reduced = reduction(kinds)
    count = len(reduced.traced)
    made = compose([NO_LAYER, *range(count), NO_LAYER, *reversed(range(count)), NO_LAYER], reduced)
    depth = len(kinds)
    assert made.layer.tolist() == [NO_LAYER, *range(depth), NO_LAYER, *reversed(range(depth)), NO_LAYER]
    inside = made.layer != NO_LAYER
    source = np.array(reduced.source)[made.layer[inside]]
    expected = np.where(made.piece[inside] <= count, made.piece[inside] - 1, 2 * count + 1 - made.piece[inside])
    np.testing.assert_array_equal(source, expected)


def test_equal_layers_are_traced_at_both_ends_and_twice_between():
    reduced = reduction(["dense"] * 3 + ["moe"] * 58)
    assert reduced.traced == (0, 1, 2, 3, 4, 59, 60)
    assert reduced.twins == ((4, 5),)
    assert reduction("ab" * 10).traced == (0, 1, 2, 3, 16, 17, 18, 19)
    assert not reduction("abcd").reduces


def test_events_are_repeated_where_layers_are():
    reduced = reduction("a" * 6)
    pieces = [NO_LAYER, 0, 1, 2, 3, NO_LAYER, 3, 2, 1, 0]
    segments = [Segment(events=(float(10 * i), float(-i))) for i in range(len(pieces))]
    events = compose(pieces, reduced).events(segments)
    order = [0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8, 8, 8, 9]
    assert events.tolist() == [value for i in order for value in (10.0 * i, float(-i))]


def test_a_sweep_over_some_kinds_visits_the_layers_of_these_kinds():
    reduced = reduction("ddd" + "m" * 8)
    made = compose([3, 4, 5, 6], reduced)
    assert made.layer.tolist() == list(range(3, 11))


def test_two_sweeps_in_a_row_stay_two():
    reduced = reduction("a" * 7)
    made = compose([0, 1, 2, 3, 0, 1, 2, 3, 3, 2, 1, 0], reduced)
    assert made.layer.tolist() == [*range(7), *range(7), *reversed(range(7))]


def test_a_sweep_that_leaves_one_of_two_alike_out_is_no_repetition():
    with pytest.raises(EvenloadError, match="look alike"):
        compose([0, 1, 3], reduction("a" * 8))
