import copy
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulate.profiles import DATA

from evenload.errors import EvenloadError
from evenload.simulate.stage_table import is_stage_table, read_stage_table
from evenload.simulate.timeline import simulate_costs

TABLE = {
    "forward": [[1, 1], [2.5, 1]],
    "recompute": [[0, 1], [2.5, 0]],
    "kept": [[2, 5], [2, 2]],
    "static": [20, 30],
    "constant": 7,
    "micro_batches": 4,
    "schedule": "mindspore_interleaved",
}
SHORT = {"bt": "forward", "lr": "recompute", "bm": "kept", "bp": "static", "cm": "constant", "m": "micro_batches"}


def run(table):
    assert table.micro_batches is not None
    return simulate_costs(table.costs, schedule=table.schedule or "1f1b", micro_batches=table.micro_batches)


def test_a_table_by_stage_is_simulated():
    timeline = run(read_stage_table(TABLE))
    assert timeline.step_time == 53
    assert timeline.peak == (37, 52)
    assert timeline.bubble.recompute == pytest.approx(0.212121, abs=1e-6)


def test_the_names_of_mindspores_simulator_are_understood():
    short = {name: TABLE[long] for name, long in SHORT.items()}
    short |= {"bp": [[20, 30], [20, 30]], "method": "vpp", "comm": False}
    for data in (short, {"input": short, "source": "a recording"}):
        assert is_stage_table(data)
        assert run(read_stage_table(data)).peak == (37, 52)


@pytest.mark.parametrize("case", json.loads((DATA / "recorded_cases.json").read_text())[:12], ids=str)
def test_recorded_cases_are_read_as_tables(case):
    data = {key: value for key, value in case.items() if key != "expected"}
    assert run(read_stage_table(data)).step_time == pytest.approx(case["expected"]["step_time"], rel=1e-9)


def test_one_chunk_may_be_a_plain_row_and_runs_plain_1f1b_under_either_method():
    for method in ("vpp", "vpp2"):
        table = read_stage_table({"bt": [1, 1, 1], "m": 3, "method": method})
        assert table.costs.forward.tolist() == [[1, 1, 1]]
        assert run(table).schedule == "1f1b"


def test_backward_can_be_given():
    table = read_stage_table({"forward": [1, 1], "backward": [3, 3], "recompute": [1, 1]})
    assert table.costs.backward.tolist() == [[3, 3]]
    assert (table.micro_batches, table.schedule) == (None, None)


def test_a_table_of_layers_is_no_table_of_stages():
    for data in ({"layers_description": []}, {"body": {}}, [], None, "forward", {"input": []}):
        assert not is_stage_table(data)


@pytest.mark.parametrize(
    ("change", "where", "says"),
    [
        ({"forward": None}, "$", "'forward' is missing"),
        ({"forward": 3}, "$.forward", "should be a list"),
        ({"forward": []}, "$.forward", "stages"),
        ({"forward": [[1, 1], [1]]}, "$.forward", "have 2, 1 stages"),
        ({"forward": [[1, 1], 1]}, "$.forward[1]", "should be a list"),
        ({"forward": [[1, "x"], [1, 1]]}, "$.forward[0][1]", "should be a number"),
        ({"forward": [[1, True], [1, 1]]}, "$.forward[0][1]", "should be a number"),
        ({"forward": [[1, -1], [1, 1]]}, "$.forward[0][1]", "negative"),
        ({"forward": [[1, float("nan")], [1, 1]]}, "$.forward[0][1]", "nan"),
        ({"kept": [[1, 1]]}, "$.kept", "kept is 1 chunks x 2 stages, forward is 2 chunks x 2 stages"),
        ({"static": [1, 2, 3]}, "$.static", "one number a stage"),
        ({"static": [[1, 2], [3, 4]]}, "$.static", "one number a stage"),
        ({"constant": "7"}, "$.constant", "should be a number"),
        ({"micro_batches": 2.5}, "$.micro_batches", "not a whole number"),
        ({"recompte": [1, 1]}, "$.recompte", "unknown key"),
    ],
)
def test_mistakes_are_named_with_their_place(change, where, says):
    data = {key: value for key, value in (copy.deepcopy(TABLE) | change).items() if value is not None}
    with pytest.raises(EvenloadError) as caught:
        read_stage_table(data, "stages.json")
    assert says in str(caught.value)
    assert caught.value.where == f"stages.json: {where}"


@given(
    data=st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["forward", "kept", "static", "m", "method", "input", "x"]), inner, max_size=4
            )
        ),
        max_leaves=8,
    )
)
def test_whatever_is_read_is_a_table_or_a_clear_error(data):
    is_stage_table(data)
    with suppress(EvenloadError):
        assert read_stage_table(data).costs.forward.size
