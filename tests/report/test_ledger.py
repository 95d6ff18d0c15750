"""The report on a ledger: JSON and screen show the same, and nothing that is not known."""

import dataclasses
import json

import msgspec
import pytest
from tests.ledger.ledgers import allocations, step
from tests.ledger.snapshots import snapshot, training
from tests.ledger.test_growth import healthy
from tests.ledger.test_held import program

from evenload.ledger.ledger import ALIVE, HostLine, Ledger, Mark, Metadata
from evenload.ledger.snapshot import snapshot_ledger
from evenload.ledger.words import Hold, MarkKind, Role
from evenload.report.ledger import as_json, as_text, report
from evenload.units import MIB


def plain(ledger, **options):
    return json.loads(msgspec.json.encode(as_json(report(ledger, **options))))


def test_json_has_the_peaks_and_everything_that_is_there():
    answer = plain(step())
    assert answer["peaks"] == {"needed": 250, "held": 250, "reserved": 512}
    assert sum(place["bytes"] for place in answer["at_peak"]) == 250
    assert sum(place["share"] for place in answer["at_peak"]) == pytest.approx(1)
    assert answer["at_peak"][0] == {
        "category": "parameter",
        "module": "layers.0",
        "operator": None,
        "bytes": 100,
        "count": 1,
        "share": 0.4,
        "source": None,
    }
    assert answer["by_category"] == {"parameter": 100, "gradient": 100, "activation": 40, "input": 10}
    assert answer["by_layer"] == {"layers.0": 240}
    assert answer["at"]["doing"] == "backward of step 0, micro-batch 0"
    assert answer["unreleased"] == []


def test_an_allocation_that_failed_says_what_was_held_and_what_the_collector_would_have_freed():
    failed = Mark(kind=MarkKind.FAILED, index=7, time=0, value=2**30, text="aten.empty: no room")
    note = Mark(kind=MarkKind.NOTE, index=9, time=0, text="ended by OutOfMemoryError")
    ledger = Ledger(
        metadata=Metadata(evenload="1", device="cpu"),
        allocations=allocations(
            (100, 1, 2, 7), (40, 3, 4, 8), (7, 5, 6, ALIVE), (900, 7, 8, ALIVE), roles=[Role.COLLECTED] * 2 + [0, 0]
        ),
        end=9,
        marks=(failed, note),
    )
    [found] = plain(ledger)["failures"]
    assert (found["asked"], found["held"], found["unreachable"]) == (2**30, 147, 140)
    text = as_text(report(ledger), "heading")
    assert "  ended by OutOfMemoryError\n" in text
    held = "147 B were held, of which gc.collect() would have freed 140 B"
    assert f"no room for 1.00 GiB in aten.empty (between phases): {held}" in text


def test_the_host_stands_beside_the_device():
    line = HostLine(step=0, index=5, time=0, resident=3 * 2**30, pinned=2**20)
    lines = (line, dataclasses.replace(line, step=1, resident=2 * 2**30, pinned=0))
    text = as_text(report(dataclasses.replace(step(), host=lines)), "heading")
    assert (
        "  host          3.00 GiB  resident set of the process, at the end of a step; 1.00 MiB of it pinned\n" in text
    )
    assert "host  " not in as_text(report(dataclasses.replace(step(), host=())), "heading")


def test_another_point_can_be_explained():
    answer = plain(step(), at=5)
    assert answer["at"] == {"event": 5, "doing": "forward of step 0, micro-batch 0", "bytes": 180}
    assert sum(place["bytes"] for place in answer["at_peak"]) == 180


def leaking():
    ledger = healthy()
    for number in range(8):
        row = ledger.make(number, 2 * MIB, 7, lives=None)
        if number == 3:
            ledger.own(row, Hold.RETAINED, "history[3] (variable of main)", "train.py:5")
    return ledger.ledger()


def test_what_is_not_released_has_class_rate_owner_line_and_end():
    [one] = plain(leaking(), capacity=10**9)["unreleased"]
    assert (one["class"], one["bytes"], one["per_step"]) == ("retained", 14 * MIB, 2 * MIB)
    assert (one["owner"], one["source"], one["made_at"]) == (
        "history[3] (variable of main)",
        "train.py:5",
        "train.py:7",
    )
    assert one["full_at_step"] > 300
    text = as_text(report(leaking(), capacity=10**9), "run.ledger")
    assert "retained: 14.00 MiB, 2.00 MiB a step since step 0" in text
    assert "held by history[3] (variable of main), set in train.py:5" in text
    assert f"the device is full at step {one['full_at_step']}" in text


def test_steps_and_their_trend_are_there():
    answer = plain(leaking())
    assert answer["trend"] == "growth"
    assert [one["between_steps"] for one in answer["steps"][:2]] != []
    assert plain(healthy().ledger())["trend"] == "flat"


def test_dead_but_held_memory_names_its_holder():
    [logits, _] = plain(program())["held_after_use"]
    assert (logits["bytes"], logits["owner"]) == (600, "outputs (variable of train)")
    assert "held by outputs (variable of train)" in as_text(report(program()), "x")


def test_what_the_format_does_not_tell_is_null_and_said():
    ledger = snapshot_ledger(snapshot(training()))
    assert plain(ledger)["peaks"]["needed"] is None
    assert "needed       not known" in as_text(report(ledger), "snap.pickle")


def test_the_same_place_of_every_layer_is_one_line_on_the_screen():
    ledger = Ledger(
        metadata=Metadata(evenload="1", device="cpu"),
        allocations=allocations(
            *[(100, 1 + layer, 9, 9) for layer in range(4)], (50, 6, 9, 9), module=[0, 1, 2, 3, 4], operator=[5] * 5
        ),
        end=9,
        strings=("layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "layers.10.mlp", "head", "aten.mm"),
    )
    text = as_text(report(ledger), "x")
    assert "layers.*.mlp" in text
    assert "400 B  88.9 %" in text
    assert "layers.0 to layers.10: 100 B to 100 B each" in text
    assert len(plain(ledger)["at_peak"]) == 5


def test_an_empty_ledger_is_no_error():
    empty = Ledger(metadata=Metadata(evenload="1"), allocations=allocations(), end=1)
    assert plain(empty)["peaks"]["held"] == 0
    assert "nothing grows over steps (too few steps to tell growth)" in as_text(report(empty), "x")
