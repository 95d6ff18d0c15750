"""Running bytes, the three peaks, and what is there at a point, against a count by hand and a naive count."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ledger.ledgers import random_rows, step

from evenload.ledger.curve import by_category, curve, live, lives, peaks, shares
from evenload.ledger.ledger import ALIVE
from evenload.ledger.words import Category
from evenload.profile.profile import Line


def test_the_curve_of_a_step_follows_its_events():
    running = curve(step())
    assert running.index.tolist() == [0, 1, 4, 5, 8, 11, 13, 16]
    assert running.level.tolist() == [100, 110, 150, 180, 150, 250, 210, 200]
    assert (running.peak, running.peak_index) == (250, 11)
    assert [running.at(index) for index in (0, 3, 5, 7, 8, 100)] == [100, 110, 180, 180, 150, 200]


def test_what_is_needed_ends_with_the_last_use_and_pinned_memory_is_not_the_device():
    found = peaks(step())
    assert (found.held, found.reserved, found.at) == (250, 512, 11)
    assert found.needed == 250
    late = dataclasses.replace(
        step(), allocations=dataclasses.replace(step().allocations, last_used=np.array([14, 15, 6, 7, 14, 18]))
    )
    assert peaks(late).needed == 210
    assert peaks(late).held == 250


def test_the_peak_is_explained_by_category_module_operator_and_line():
    ledger = step()
    rows = live(ledger, peaks(ledger).at)
    assert rows.tolist() == [0, 1, 2, 4]
    found = by_category(ledger, rows)
    assert {category: nbytes for category, nbytes in found.items() if nbytes} == {
        Category.PARAMETER: 100,
        Category.INPUT: 10,
        Category.ACTIVATION: 40,
        Category.GRADIENT: 100,
    }
    groups = shares(ledger, rows, "module", "operator")
    assert [(share.key, share.nbytes, share.count) for share in groups] == [
        (("layers.0", "aten.mm"), 140, 2),
        (("layers.0", None), 100, 1),
        ((None, "aten.empty"), 10, 1),
    ]
    assert groups[0].largest == 4
    assert shares(ledger, rows, "source")[0].key == ("train.py:9 forward",)
    assert ledger.stack(2) == ("train.py:9 forward", "train.py:3 main")


def test_every_category_has_its_memory_line():
    assert {category: category.line for category in Category} == {
        Category.PARAMETER: Line.PARAMETERS,
        Category.GRADIENT: Line.GRADIENTS,
        Category.OPTIMIZER: Line.OPTIMIZER,
        Category.ACTIVATION: Line.KEPT,
        Category.INPUT: Line.KEPT,
        Category.TEMPORARY: Line.TRANSIENT,
        Category.COMMUNICATION: Line.BUFFERS,
        Category.UNKNOWN: Line.TRANSIENT,
    }


def test_steps_number_the_events():
    ledger = step()
    assert ledger.step_of(ledger.allocations.allocated).tolist() == [-1, 0, 0, 0, 0, 0]


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 40), life=st.sampled_from(["held", "needed"]))
@settings(max_examples=80, deadline=None)
def test_the_curve_equals_a_count_at_every_index(seed, count, life):
    ledger = dataclasses.replace(step(), allocations=random_rows(np.random.default_rng(seed), count), end=10**6)
    running = curve(ledger, life)
    begin, end = lives(ledger, life)
    rows = ledger.allocations
    points = sorted({0, *begin.tolist(), *(end[end != ALIVE] - 1).tolist(), *end[end != ALIVE].tolist()})
    naive = []
    for point in points:
        there = (begin <= point) & (point < end) & (rows.device == 0)
        naive.append(int(rows.nbytes[there].sum()))
        assert running.at(point) == naive[-1]
        assert live(ledger, point, life).tolist() == np.flatnonzero(there).tolist()
    assert running.peak == max(naive)
    if running.peak:
        assert running.at(running.peak_index) == running.peak


def test_an_empty_ledger_has_no_peak():
    ledger = dataclasses.replace(step(), allocations=step().allocations.take(np.array([], dtype=np.int64)), end=0)
    assert peaks(ledger).held == 0
    assert live(ledger, 0).tolist() == []
    assert shares(ledger, live(ledger, 0), "module") == ()
