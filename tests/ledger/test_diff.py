"""Two memories subtracted: sums hold on both sides."""

import dataclasses

import pytest
from tests.ledger.ledgers import step

from evenload.errors import EvenloadError
from evenload.ledger.diff import diff, predicted_side, side
from evenload.ledger.words import Category
from evenload.profile.profile import Line
from evenload.report.diff import as_json, as_text

ESTIMATE = {
    "stages": [
        {"rank": 0, "parameters": 90, "gradients": 100, "kept": 60, "transient": 10, "peak_allocated": 260},
        {"rank": 1, "parameters": 5.4, "peak_allocated": 5.4},
    ]
}


def doubled(category):
    ledger = step()
    rows = ledger.allocations
    twice = rows.nbytes * (1 + (rows.category == category.code))
    return dataclasses.replace(ledger, allocations=dataclasses.replace(rows, nbytes=twice))


def test_a_ledger_does_not_differ_from_itself():
    same = diff(side(step(), "a"), side(step(), "b"))
    assert all(change.nbytes == 0 for change in (*same.peaks, *same.lines))
    assert same.places == ()
    assert "every module holds the same" in as_text(same)


def test_what_changed_is_found_by_category_and_module():
    found = diff(side(step(), "a"), side(doubled(Category.ACTIVATION), "b"))
    assert (found.held.before, found.held.after, found.held.nbytes) == (250, 290, 40)
    assert found.held.percent == pytest.approx(16)
    [place] = found.places
    assert (place.name, place.nbytes) == ("activation of layers.0", 40)
    assert sum(change.nbytes for change in found.lines) == found.held.nbytes
    assert "+40 B" in as_text(found)


def test_what_is_only_on_one_side_counts_from_zero():
    found = diff(side(step(), "a"), side(dataclasses.replace(step(), strings=("x", "other", *step().strings[2:])), "b"))
    assert sorted(change.nbytes for change in found.places) == [-100, -100, -40, 40, 100, 100]


def test_a_prediction_is_subtracted_line_by_line():
    found = diff(predicted_side(ESTIMATE, 0, "estimate.json", "estimate.json"), side(step(), "run.ledger"))
    lines = {change.name: change for change in found.lines}
    assert (lines[Line.PARAMETERS].before, lines[Line.PARAMETERS].after) == (90, 100)
    assert (lines[Line.KEPT].before, lines[Line.KEPT].after) == (60, 50)  # activations and inputs
    assert (found.held.before, found.held.after) == (260, 250)
    assert "predicted" in as_text(found)
    assert "measured" in as_text(found)
    plain = as_json(found)
    assert plain["peaks"]["held"] == {"before": 260, "after": 250, "change": -10, "percent": -3.846}
    assert plain["peaks"]["needed"]["before"] is None


def test_unknown_categories_are_no_line_of_a_prediction():
    unknown = dataclasses.replace(
        step(),
        allocations=dataclasses.replace(
            step().allocations, category=step().allocations.category * 0 + Category.UNKNOWN.code
        ),
    )
    found = diff(predicted_side(ESTIMATE, 0, "e", "e"), side(unknown, "b"))
    assert {change.name: change.after for change in found.lines}["unknown"] == 250


def test_two_predictions_can_be_subtracted():
    found = diff(predicted_side(ESTIMATE, 0, "a", "a"), predicted_side(ESTIMATE, 1, "b", "b"))
    assert found.held.nbytes == 5 - 260


@pytest.mark.parametrize(
    ("estimate", "stage", "says"),
    [
        ({}, 0, "no estimate"),
        ({"stages": 5}, 0, "no estimate"),
        (ESTIMATE, 2, "no stage 2"),
        ({"stages": [{"rank": 0, "kept": "x"}]}, 0, "kept is 'x'"),
        ({"stages": [{"rank": 0, "kept": -1}]}, 0, "kept is -1"),
        ({"stages": [{"rank": 0, "kept": 10**400}]}, 0, "kept is a number of more than 18 digits"),
        ({"stages": [{"rank": 0, "kept": 1e300}]}, 0, r"kept is 1e\+300"),
    ],
)
def test_estimates_that_make_no_sense_are_wrong_input(estimate, stage, says):
    with pytest.raises(EvenloadError, match=says):
        predicted_side(estimate, stage, "e", "e.json")


@pytest.mark.parametrize("stages", [None, [], "x"])
def test_an_estimate_without_stages_is_none(stages):
    with pytest.raises(EvenloadError, match="it has no stages"):
        predicted_side({"stages": stages}, 0, "a.json", "a.json")
