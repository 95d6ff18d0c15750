"""evenload's own plan file holds a plan whole."""

import json
import re
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.dialects.native import read_native, write_native
from evenload.dialects.yaml_source import parse_yaml
from evenload.errors import EvenloadError
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy
from evenload.setup import Setup

from .plans import plans


def read(text):
    return read_native(parse_yaml(text, name="p.yaml")).plan


@given(plans(names=st.text(max_size=40).map(re.escape)))
def test_a_plan_comes_back_as_it_was(plan):
    again = read(write_native(plan).text)
    assert again == plan
    for name in ("select", "comm", "select_exclude", "comm_exclude"):
        assert list(getattr(again.policy, name)) == list(getattr(plan.policy, name)), "patterns keep their order"


def test_the_file_is_readable_by_eye():
    plan = Plan(
        setup=Setup(pp=2, tp=4, micro_batches=8),
        layout=Layout(((3, 2),)),
        policy=Policy(full=frozenset({0, 1, 3}), select={r"mlp\.act_fn": frozenset({2})}),
        model="llama-3-8b",
    )
    lines = write_native(plan).text.splitlines()
    assert lines[:3] == ["evenload: 1", "model: llama-3-8b", "setup:"]
    assert "  - [3, 2]" in lines
    assert "  full: '0-1,3'" in lines
    assert r"    'mlp\.act_fn': '2'" in lines
    assert "  comm: {}" in lines


def test_json_is_read_as_well():
    plan = {"setup": {"pp": 2}, "layout": [[3, 1]], "policy": {"full": [0, "2-3"], "select": {"mlp\\.act_fn": 1}}}
    read_plan = read(json.dumps(plan, indent=1))
    assert read_plan.layout.table == ((3, 1),)
    assert read_plan.policy.full == {0, 2, 3}
    assert read_plan.policy.select == {"mlp\\.act_fn": {1}}
    assert read_plan.setup == Setup(pp=2)


def test_every_setting_is_written_so_that_changed_defaults_change_no_plan():
    text = write_native(Plan(setup=Setup(), layout=Layout(((1,),)), policy=Policy())).text
    assert all(f"  {field.name}: " in text for field in fields(Setup))


GOOD = "evenload: 1\nsetup:\n  pp: 2\nlayout:\n  - [3, 1]\npolicy:\n  full: 0-1\n"


@pytest.mark.parametrize(
    ("old", "new", "fact", "where", "fix"),
    [
        ("pp: 2", "ppp: 2", "the key 'ppp' is not known", "3:3", "did you mean 'pp'?"),
        ("policy:", "policies:", "the key 'policies' is not known", "6:1", "did you mean 'policy'?"),
        ("full:", "ful:", "the key 'ful' is not known", "7:3", "did you mean 'full'?"),
        ("pp: 2", "pp: two", "pp is 'two': expected int, got str", "3:7", None),
        ("pp: 2", "pp: true", "pp is True: expected int, got bool", "3:7", None),
        ("pp: 2", "pp: 2.5", "pp is 2.5: expected int, got float", "3:7", None),
        ("pp: 2", "pp: 0", "pp is 0", "3:7", "at least 1"),
        ("pp: 2", "pp: 3", "the layout has 1 chunks x 2 stages, the setup 1 x 3", "5:", None),
        ("pp: 2", "pp: 2\n  zero: 7", "zero is 7", "4:9", "use one of 0, 1, 2, 3"),
        ("pp: 2", "pp: 2\n  grad_dtype: fp12", "grad_dtype is 'fp12'", "4:15", "use one of fp32, bf16, fp16, fp8"),
        ("setup:\n  pp: 2", "setup: 2", "2 stands where a mapping should", "2:8", "give pp, interleave"),
        ("setup:\n  pp: 2\n", "", "the plan has no setup", "1:1", None),
        ("[3, 1]", "[3, x]", "'x' is no number of layers", "5:9", None),
        ("[3, 1]", "[3, -1]", "-1 is no number of layers", "5:9", None),
        ("[3, 1]", "[3, true]", "True is no number of layers", "5:9", None),
        ("  - [3, 1]", "  3", "3 is no table", "5:3", None),
        ("  - [3, 1]", "  - [3, 1]\n  - [1]", "row 1 has 1 stages, row 0 has 2", "6:5", None),
        ("  - [3, 1]", "  []", "at least one chunk", "5:3", None),
        ("0-1", "0-4", "there is no layer 4: the model has 4 layers", "7:9", "0 to 3"),
        ("0-1", "1-0", "the range 1-0 runs backwards", "7:9", "write 0-1"),
        ("0-1", "first two", "'first two' is no range of layers", "7:9", "0-3,8"),
        ("0-1", "true", "True names no layers", "7:9", None),
        ("0-1", "1.5", "1.5 names no layers", "7:9", None),
        ("full: 0-1", "select:\n    a: 9", "there is no layer 9", "8:8", None),
        ("full: 0-1", "select:\n    'a(': 1", "is no regular expression", "8:5", None),
        ("full: 0-1", "select: [a]", "['a'] is no mapping", "7:11", None),
        ("full: 0-1", "mp_comm: 1", "1 is no switch", "7:12", "true or false"),
        ("evenload: 1", "evenload: 2", "this is version 2", "1:11", None),
        ("evenload: 1", "evenload: 1\nmodel: [a]", "['a'] is no model", "2:8", None),
    ],
)
def test_a_mistake_is_named_with_its_place(old, new, fact, where, fix):
    assert old in GOOD
    with pytest.raises(EvenloadError) as caught:
        read(GOOD.replace(old, new))
    assert fact in caught.value.fact
    assert caught.value.where is not None
    assert caught.value.where.startswith(f"p.yaml:{where}")
    assert fix is None or (caught.value.fix is not None and fix in caught.value.fix)


def test_a_policy_beyond_the_layout_is_not_written():
    plan = Plan(setup=Setup(), layout=Layout(((2,),)), policy=Policy(full=frozenset({5})))
    with pytest.raises(EvenloadError, match="names layer 5"):
        write_native(plan)


def test_a_pattern_that_names_nothing_is_said_at_its_place():
    reading = read_native(parse_yaml(GOOD.replace("full: 0-1", "select:\n    mlp.act_fn: 0-2"), name="p.yaml"))
    (said,) = reading.notices
    assert said.fact == "pattern 'mlp.act_fn' names no operator: matched 0 of 3 layers"
    assert said.where == "p.yaml:8:5"


def test_a_chunk_without_layers_is_said_at_its_place():
    reading = read_native(parse_yaml("evenload: 1\nsetup: {pp: 2}\nlayout:\n  - [0, 2]\n", name="plan.yaml"))
    assert [str(notice) for notice in reading.notices] == ["plan.yaml:4:3: stage 0 of chunk 0 holds no layer"]
