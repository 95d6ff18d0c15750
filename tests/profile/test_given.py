from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.errors import EvenloadError
from evenload.plan.policy import LayerPolicy, Recompute
from evenload.profile.given import load_layer_table, read_layer_table

HEAD = {"name": "Embedding", "type": "HEAD", "time": 30, "nb_layer": 1, "memory_parameter": 11000}
BODY = {
    "name": "Decoder",
    "type": "BODY",
    "time": 180,
    "nb_layer": 96,
    "memory_parameter": 1583,
    "memory_activation": 826,
    "memory_recompute": 32,
}
TAIL = {"name": "Norm", "type": "TAIL", "time": 90, "nb_layer": 1, "memory_parameter": 2473}
TABLE = {"name": "llama", "stage_const_mem": 7, "layers_description": [HEAD, BODY, TAIL]}


def changed(**body):
    """The table with other values in its body layer; None takes a key away."""
    merged = {key: value for key, value in {**BODY, **body}.items() if value is not None}
    return {**TABLE, "layers_description": [HEAD, merged, TAIL]}


def backward(table, choice):
    return read_layer_table(table).profile.kind("Decoder").cost(LayerPolicy.of(choice)).backward_time


def test_a_table_gives_kinds_in_the_order_of_the_pipeline():
    profile = read_layer_table({**TABLE, "layers_description": [TAIL, BODY, HEAD]}).profile
    assert profile.first == ("Embedding",)
    assert profile.last == ("Norm",)
    assert profile.blocks == ("Decoder",) * 96
    assert profile.constant == 7
    assert (profile.memory_unit, profile.time_unit, profile.origin) == ("MB", "units", "given")
    assert profile.kind("Decoder").static == 1583


def test_the_ends_take_their_time_forward_and_twice_that_backward():
    profile = read_layer_table(TABLE).profile
    head, tail = (profile.kind(kind).cost(LayerPolicy()) for kind in ("Embedding", "Norm"))
    assert (head.forward_time, head.backward_time, head.kept) == (30, 60, 0)
    assert (tail.forward_time, tail.backward_time, tail.kept) == (90, 180, 0)


def test_an_end_costs_the_same_whatever_the_policy():
    head = read_layer_table(TABLE).profile.kind("Embedding")
    assert head.cost(LayerPolicy(full=True)) == head.cost(LayerPolicy())
    assert head.choices == (Recompute.NONE,)


@pytest.mark.parametrize(
    ("choice", "coefficient"),
    [("none", 0), ("select", 0.04), ("comm", 0.125), ("both", 0.165), ("full", 0.5)],
)
def test_default_coefficients_lengthen_the_backward_of_a_body_layer(choice, coefficient):
    table = changed(memory_select_rec=614, memory_select_comm=426, memory_both_comm_select=310)
    layer = read_layer_table(table).profile.kind("Decoder")
    cost = layer.cost(LayerPolicy.of(Recompute(choice)))
    assert cost.forward_time == 180
    assert cost.backward_time == pytest.approx(360 * (1 + coefficient), rel=1e-12)
    assert cost.recompute_time == pytest.approx(360 * coefficient, rel=1e-12, abs=1e-9)


@pytest.mark.parametrize(
    ("key", "memory", "choice"),
    [
        ("select_rec_coef", "memory_select_rec", Recompute.SELECT),
        ("select_comm_coef", "memory_select_comm", Recompute.COMM),
        ("both_comm_select_coef", "memory_both_comm_select", Recompute.BOTH),
        ("both_coef", "memory_both_comm_select", Recompute.BOTH),
        ("recompute_coef", "memory_recompute", Recompute.FULL),
    ],
)
def test_a_coefficient_of_the_table_beats_the_default(key, memory, choice):
    assert backward(changed(**{memory: 100, key: 0.25}), choice) == 450


def test_the_coefficient_of_no_recompute_lengthens_the_plain_backward():
    table = changed(backward_coef=0.1)
    assert backward(table, Recompute.NONE) == pytest.approx(396)
    cost = read_layer_table(table).profile.kind("Decoder").cost(LayerPolicy(full=True))
    assert cost.recompute_time == pytest.approx(540 - 396)


def test_backward_times_written_out_beat_coefficients():
    assert backward(changed(recompute_time=501, recompute_coef=0.9), Recompute.FULL) == 501
    assert backward(changed(**{"recompute_time ": 502}), Recompute.FULL) == 502
    assert backward(changed(backward_time=333), Recompute.NONE) == 333


def test_a_forward_time_of_its_own_leaves_the_backward_alone():
    cost = read_layer_table(changed(forward_time=200)).profile.kind("Decoder").cost(LayerPolicy())
    assert (cost.forward_time, cost.backward_time) == (200, 360)


def test_only_choices_with_a_memory_number_are_there():
    layer = read_layer_table(TABLE).profile.kind("Decoder")
    assert layer.choices == (Recompute.NONE, Recompute.FULL)
    assert layer.cost(LayerPolicy(full=True)).kept == 32
    with pytest.raises(EvenloadError, match="no memory for layers 'Decoder' under recompute 'select'") as caught:
        layer.cost(LayerPolicy.of(Recompute.SELECT))
    assert "memory_select_rec" in caught.value.fix


def test_zero_memory_means_not_measured():
    assert read_layer_table(changed(memory_select_rec=0)).profile.kind("Decoder").choices == (
        Recompute.NONE,
        Recompute.FULL,
    )


def test_what_forward_keeps_is_gone_after_backward():
    cost = read_layer_table(TABLE).profile.kind("Decoder").cost(LayerPolicy())
    assert cost.forward.net + cost.backward.net == 0
    assert cost.forward.peak == cost.kept == 826
    assert cost.backward.peak == 0


def test_several_bodies_are_kinds_in_order():
    first = {**BODY, "name": "dense", "nb_layer": 3}
    second = {**BODY, "name": "moe", "nb_layer": 58}
    profile = read_layer_table({"layers_description": [HEAD, first, second, TAIL]}).profile
    assert profile.blocks == ("dense",) * 3 + ("moe",) * 58


def test_a_planning_problem_with_a_table_inside_is_read():
    problem = {"id": "small", "layers": TABLE, "S": 16, "V": 1, "M": 16, "mem": 53000}
    assert read_layer_table(problem).profile.blocks == read_layer_table(TABLE).profile.blocks


def test_short_tables_without_names_are_read():
    short = {
        "head": {"time": 30, "mem_par": 11000},
        "body": {"count": 192, "time_fwd": 180, "mem_par": 1583, "mem_act": 826, "mem_full_recompute": 32}
        | {"mem_select": 614, "coef_select": 0.125},
        "tail": {"time": 90, "mem_par": 2473},
    }
    for data in (short, {"model": {"layer_table": short}}):
        profile = read_layer_table(data).profile
        assert profile.blocks == ("BODY",) * 192
        cost = profile.kind("BODY").cost(LayerPolicy.of(Recompute.SELECT))
        assert (cost.kept, cost.backward_time) == (614, 405)


def test_a_table_may_name_its_units():
    profile = read_layer_table({**TABLE, "memory_unit": "MiB", "time_unit": "ms"}).profile
    assert (profile.memory_unit, profile.time_unit) == ("MiB", "ms")


def test_reading_changes_nothing_of_the_caller():
    data = copy.deepcopy(TABLE)
    read_layer_table(data)
    assert data == TABLE


def test_numbers_that_contradict_themselves_are_told():
    table = read_layer_table(changed(memory_recompute=900, recompute_time=100))
    facts = [notice.fact for notice in table.notices]
    assert any("keeps more than" in fact for fact in facts)
    assert any("faster than" in fact for fact in facts)


def test_a_key_of_no_use_is_told_and_a_misspelt_one_is_an_error():
    assert [notice.where for notice in read_layer_table(changed(remark="measured")).notices] == [
        "$.layers_description[1].remark"
    ]
    with pytest.raises(EvenloadError, match="memory_activaton") as caught:
        read_layer_table(changed(memory_activaton=3))
    assert "memory_activation" in caught.value.fix


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (None, "$"),
        ([], "$"),
        ({}, "$"),
        ({"layers_description": {}}, "$.layers_description"),
        ({"layers_description": []}, "$"),
        ({"layers_description": [3]}, "$.layers_description[0]"),
        ({"layers_description": [HEAD, TAIL]}, "$"),
        ({"layers_description": [BODY, BODY]}, "$"),
        ({"layers_description": [{**BODY, "type": "MIDDLE"}]}, "$.layers_description[0].type"),
        ({"layers_description": [BODY, {**HEAD, "nb_layer": 2}]}, "$.layers_description[1].nb_layer"),
        ({**TABLE, "stage_const_mem": -1896}, "$.stage_const_mem"),
        (changed(name=7), "$.layers_description[1].name"),
        (changed(time=None), "$.layers_description[1]"),
        (changed(time="180"), "$.layers_description[1].time"),
        (changed(time=True), "$.layers_description[1].time"),
        (changed(time=-1), "$.layers_description[1].time"),
        (changed(time=float("nan")), "$.layers_description[1].time"),
        (changed(time=float("inf")), "$.layers_description[1].time"),
        (changed(time=10**400), "$.layers_description[1].time"),
        (changed(nb_layer=1.5), "$.layers_description[1].nb_layer"),
        (changed(nb_layer=10**7), "$.layers_description[1].nb_layer"),
        (changed(nb_layer=0), "$"),
        (changed(memory_parameter=None), "$.layers_description[1]"),
        (changed(memory_activation=None, memory_recompute=None), "$.layers_description[1].memory_activation"),
        (changed(memory_recompute=[1]), "$.layers_description[1].memory_recompute"),
        (changed(recompute_coef=-0.1), "$.layers_description[1].recompute_coef"),
    ],
)
def test_a_wrong_table_is_an_error_with_its_path(data, where):
    with pytest.raises(EvenloadError) as caught:
        read_layer_table(data)
    assert caught.value.where == where
    with pytest.raises(EvenloadError) as caught:
        read_layer_table(data, "layers.json")
    assert caught.value.where == f"layers.json: {where}"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(BODY)), JSON_VALUES)
def test_whatever_stands_in_a_table_the_answer_is_a_profile_or_an_error_of_the_house(key, value):
    table = {"layers_description": [HEAD, {**BODY, key: value}, TAIL]}
    try:
        profile = read_layer_table(table).profile
    except EvenloadError:
        return
    assert len(profile.blocks) == table["layers_description"][1]["nb_layer"] or value is None


def test_files_are_read_as_json_or_yaml(tmp_path):
    as_json, as_yaml = tmp_path / "layers.json", tmp_path / "layers.yaml"
    as_json.write_text(json.dumps(TABLE))
    as_yaml.write_text("body: {time: 10, count: 12, mem_par: 100, mem_act: 40}\n")
    assert len(load_layer_table(as_json).profile.blocks) == 96
    assert len(load_layer_table(as_yaml).profile.blocks) == 12


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"", "empty"),
        ("a.json", b"{\n 'a': 1}", "a.json:2:2"),
        ("a.json", b"\xff\xfe{}", "UTF-8"),
        ("a.json", b"[" * 100_000, "too deeply"),
        ("a.json", b"1" * 5000, "thousands of digits"),
        ("a.yaml", b"a: [1\nb: 2", "a.yaml:2:"),
        ("a.yaml", b"a: {1", "not valid YAML"),
    ],
)
def test_an_unreadable_file_is_an_error_of_the_house(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(EvenloadError, match=message):
        load_layer_table(path)


def test_a_missing_file_is_named():
    with pytest.raises(EvenloadError, match=r"nowhere\.json: there is no such file"):
        load_layer_table(Path("nowhere.json"))
