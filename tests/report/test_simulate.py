import json
from dataclasses import replace

import numpy as np
import pytest

from evenload.report.simulate import timeline_answer, timeline_text
from evenload.report.simulate_trace import chrome_trace
from evenload.simulate.costs import ChunkCosts
from evenload.simulate.timeline import simulate_costs


def timeline(forward, micro_batches=4, **more):
    units = {key: more.pop(key) for key in ("memory_unit", "time_unit") if key in more}
    return simulate_costs(ChunkCosts.of_tables(forward, **more), schedule="1f1b", micro_batches=micro_batches, **units)


def test_a_small_step_is_drawn_rank_by_rank():
    text = timeline_text(timeline([[1, 1]], kept=3 * 2**30, static=2**34), width=80)
    assert text == (
        "1f1b: 2 ranks x 1 chunk, 4 micro-batches\n"
        "step    15 s = work 12 s + bubble 25.0 %\n"
        "bubble  ideal 25.0 %, imbalance 0.0 %, recompute 0.0 %, communication 0.0 % (of the work)\n"
        "\n"
        "rank  works                                  peak  in flight  while\n"
        "   0  ###################.....  80.0 %  22.00 GiB  2          forward of chunk 0\n"
        "   1  ###################.....  80.0 %  19.00 GiB  1          forward of chunk 0\n"
        "\n"
        "   0  F0 -F1 -........B0 =====F2 -B1 =====F3 -B2 =====....B3 =====\n"
        "   1  ....F0 -B0 =====F1 -B1 =====F2 -B2 =====F3 -B3 =====........\n"
        "      F forward, B backward of a micro-batch"
    )


def test_a_drawing_says_the_chunk_where_there_are_several():
    text = timeline_text(timeline([[1, 1], [1, 1]], micro_batches=2), width=140)
    assert "F0a" in text
    assert "B1b" in text
    assert "a, b ... chunk" in text


def test_every_line_of_a_drawing_is_equally_long_whatever_the_times():
    for forward in ([[1, 1.37, 2.2]], [[0.5, 3, 1.1]], [[1, 0, 1]]):
        drawing = timeline_text(timeline(forward, micro_batches=3), width=240).split("\n\n")[2].splitlines()[:-1]
        assert len({len(line) for line in drawing}) == 1


def test_a_long_step_is_not_drawn():
    assert timeline_text(timeline([[1, 1]], micro_batches=100)).count("\n\n") == 1
    assert timeline_text(timeline([[0, 0]])).count("\n\n") == 1


def test_units_of_a_table_are_kept():
    text = timeline_text(timeline([[180, 180]], kept=900, static=11000, memory_unit="MB", time_unit="units"))
    assert "step    2,700 units" in text
    assert "12,800 MB" in text


def test_a_rank_over_the_limit_says_by_how_much():
    one = timeline([[1, 1]], kept=10, memory_unit="MB")
    lines = timeline_text(one, limit=15).splitlines()
    assert lines[5].endswith("OVER the limit by 5 MB")
    assert "OVER" not in lines[6]


def test_memory_outside_the_allocator_has_a_column_of_its_own():
    costs = replace(ChunkCosts.of_tables([[1.0, 1.0]], kept=2**30), outside=np.full(2, 2.0**30))
    lines = timeline_text(simulate_costs(costs, schedule="1f1b", micro_batches=4)).splitlines()
    assert lines[4].split() == ["rank", "works", "peak", "outside", "in", "flight", "while"]
    assert "2.00 GiB  1.00 GiB  2" in lines[5]


def test_the_answer_holds_the_same_numbers():
    one = timeline([[1, 1]], kept=10, static=5, memory_unit="MB")
    answer = json.loads(json.dumps(timeline_answer(one, limit=20)))
    assert answer["step_time"] == 15
    assert answer["bubble"] == {"ideal": 0.25, "imbalance": 0, "recompute": 0, "communication": 0, "real": 0.25}
    assert answer["peak"] == [25, 15]
    assert (answer["limit"], answer["fits"]) == (20, False)
    assert len(answer["actions"]) == 16
    assert answer["actions"][0] == {"rank": 0, "op": "F", "chunk": 0, "micro_batch": 0, "start": 0, "end": 1}
    assert answer["ranks"][0]["lines"]["kept"] == 20
    assert answer["ranks"][0]["busy"] == 12
    assert "limit" not in timeline_answer(one)


@pytest.mark.parametrize(("unit", "scale"), [("seconds", 1e6), ("ms", 1.0)])
def test_a_trace_holds_every_action_and_the_memory_of_every_rank(unit, scale):
    one = timeline([[1, 1]], kept=10, memory_unit="MB", time_unit=unit)
    trace = json.loads(chrome_trace(one))
    events = trace["traceEvents"]
    actions = [event for event in events if event["ph"] == "X"]
    assert len(actions) == 16
    assert max(event["ts"] + event["dur"] for event in actions) == 15 * scale
    assert {event["name"] for event in events if event["ph"] == "C"} == {"memory of rank 0", "memory of rank 1"}
    assert max(event["args"]["MB"] for event in events if event["ph"] == "C") == max(one.peak)
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0", "rank 1"]
