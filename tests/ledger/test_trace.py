"""The Chrome trace and the table of a ledger hold its numbers."""

import csv
import dataclasses
import io
import json

import numpy as np
from tests.ledger.ledgers import allocations, random_rows, step

from evenload.ledger import trace
from evenload.ledger.curve import curve
from evenload.ledger.ledger import ALIVE, Ledger, Metadata
from evenload.ledger.trace import chrome_trace, csv_table, times


def events(ledger, ph):
    return [event for event in json.loads(chrome_trace(ledger))["traceEvents"] if event["ph"] == ph]


def large(count):
    rows = random_rows(np.random.default_rng(5), count)
    return dataclasses.replace(step(), allocations=rows, end=int(rows.allocated.max()) * 2, owners=())


def test_the_counter_of_a_trace_follows_the_curve():
    ledger = step()
    totals = [sum(event["args"].values()) for event in events(ledger, "C")]
    assert totals == curve(ledger).level.tolist()


def test_a_long_curve_is_thinned_out_and_keeps_its_peak(monkeypatch):
    monkeypatch.setattr(trace, "POINTS", 100)
    ledger = large(2000)
    counters = events(ledger, "C")
    assert len(counters) <= 101
    assert max(sum(event["args"].values()) for event in counters) == curve(ledger).peak
    stamps = [event["ts"] for event in counters]
    assert stamps == sorted(stamps)


def test_steps_and_phases_are_slices_one_after_the_other():
    slices = events(step(), "X")
    assert [event["name"] for event in slices] == ["step 0", "forward 0", "backward 0"]
    forward, backward = slices[1:]
    assert forward["ts"] + forward["dur"] == backward["ts"]


def test_notes_and_failures_are_instants():
    assert [event["name"] for event in events(step(), "i")] == ["layers.0"]


def test_the_largest_allocations_are_shown_from_begin_to_end(monkeypatch):
    monkeypatch.setattr(trace, "LARGEST", 3)
    begins, ends = events(step(), "b"), events(step(), "e")
    assert [event["id"] for event in begins] == [0, 4, 2]
    assert begins[0]["name"] == "100 B layers.0"
    for begin, end in zip(begins, ends, strict=True):
        assert begin["id"] == end["id"]
        assert begin["ts"] <= end["ts"]


def test_times_between_the_known_ones_are_between_them():
    ledger = step()
    at = times(ledger, np.array([4, 5, 8, 11]))
    assert at[0] == 10
    assert at.tolist() == sorted(at)
    assert at[3] == 20


def test_a_ledger_without_times_is_shown_by_its_order():
    ledger = Ledger(metadata=Metadata(evenload="1"), allocations=allocations((10, 3, 4, 9)), end=9)
    assert times(ledger, np.array([3, 9])).tolist() == [3000, 9000]
    assert events(ledger, "C")[0]["ts"] == 3


def test_the_table_has_every_allocation():
    rows = list(csv.DictReader(io.StringIO(csv_table(step()))))
    assert len(rows) == 6
    assert rows[2] == {
        "bytes": "40",
        "category": "activation",
        "phase": "forward",
        "step": "0",
        "micro_batch": "0",
        "module": "layers.0",
        "operator": "aten.mm",
        "device": "cuda:0",
        "allocated": "4",
        "last_used": "12",
        "freed": "13",
        "time_ns": "10",
        "source": "train.py:9 forward",
    }
    assert rows[0]["freed"] == rows[0]["operator"] == rows[0]["step"] == ""
    assert [int(row["bytes"]) for row in rows] == step().allocations.nbytes.tolist()


def test_an_empty_ledger_has_an_empty_trace_and_table():
    ledger = Ledger(metadata=Metadata(evenload="1"), allocations=allocations(), end=1)
    assert events(ledger, "C") == []
    assert csv_table(ledger).count("\n") == 1
    assert ledger.end < ALIVE
