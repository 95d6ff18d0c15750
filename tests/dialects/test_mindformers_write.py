"""A plan goes into MindFormers settings, and nothing else of the file changes."""

import difflib
from pathlib import Path

import pytest
from hypothesis import given

from evenload.dialects.mindformers import read_mindformers, without_empty
from evenload.dialects.mindformers_setup import SETUP_PATHS
from evenload.dialects.mindformers_write import write_mindformers
from evenload.dialects.yaml_source import parse_yaml, read_yaml
from evenload.errors import EvenloadError
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy, Recompute, first_layers
from evenload.setup import Setup

from .plans import first_layer_plans, plans

DATA = Path(__file__).parent.parent / "data" / "dialects"


def read(text):
    return read_mindformers(parse_yaml(text, name="m.yaml"))


def plan_of(table, policy=None, **setup):
    layout = Layout(table)
    return Plan(
        setup=Setup(pp=layout.pp, interleave=layout.interleave, **setup), layout=layout, policy=policy or Policy()
    )


@given(first_layer_plans())
def test_a_plan_comes_back_from_a_new_file(plan):
    again = read(write_mindformers(plan).text).plan
    assert again.layout == plan.layout
    assert again.policy == without_empty(plan.policy)
    for name in SETUP_PATHS:
        assert getattr(again.setup, name) == getattr(plan.setup, name), name
    assert again.setup.zero == plan.setup.zero
    assert again.setup.sequence_parallel == plan.setup.sequence_parallel


@given(plans())
def test_any_plan_comes_back_as_it_acts_or_the_policy_is_refused(plan):
    try:
        text = write_mindformers(plan).text
    except EvenloadError as error:
        named = error.where.removeprefix("$.policy.")
    else:
        again = read(text).plan
        views = [(again.for_layer(layer), plan.for_layer(layer)) for layer in range(plan.layout.num_layers)]
        assert all(one == other for one, other in views)
        return
    assert named.startswith(("recompute", "select_"))


def test_a_policy_that_counts_cannot_say_is_refused_by_name():
    plan = plan_of(((4, 4),), Policy(full=frozenset({1, 4}), select={r"feed_forward\.mul": frozenset({4, 5})}))
    with pytest.raises(EvenloadError) as caught:
        write_mindformers(plan)
    assert "recompute is planned for layers 1 of chunk 0 on stage 0, which holds layers 0-3" in caught.value.fact
    assert caught.value.where == "$.policy.recompute"


def test_counts_run_over_layers_that_are_recomputed_whole():
    choices = [Recompute.FULL, Recompute.SELECT, Recompute.NONE, Recompute.BOTH, Recompute.NONE]
    plan = plan_of(((3, 2),), Policy.of_choices(choices))
    text = write_mindformers(plan).text
    assert "  recompute: [1, 0]\n" in text
    assert "  select_recompute: [2, 1]\n" in text, "the default patterns need no names"
    again = read(text).plan
    assert [again.for_layer(layer).choice for layer in range(5)] == choices


def lines_changed(plan, file, text=None):
    source = read_yaml(file) if text is None else parse_yaml(text, name="m.yaml")
    writing = write_mindformers(plan, source)
    lines = list(difflib.ndiff(source.text.splitlines(), writing.text.splitlines()))
    return [line[2:] for line in lines if line[0] == "-"], [line[2:] for line in lines if line[0] == "+"], writing


def test_a_file_gets_the_plan_and_keeps_everything_else():
    layout = Layout(((9, 10, 11, 10),))
    policy = Policy(full=first_layers(((4, 2, 0, 0),), layout), select={r"attention\.softmax": frozenset(range(40))})
    plan = plan_of(layout.table, policy, dp=2, seq=8192, micro_batches=64, schedule="1f1b")
    gone, come, writing = lines_changed(plan, DATA / "glm4_9b.yaml")
    assert gone == [
        "    offset: [-1, 0, 2, -1]",
        "  recompute: [6, 3, 2, 3]",
        "  select_recompute: False",
        "  recompute_slice_activation: True",
    ]
    assert come == [
        "    offset: [-1, 0, 1, 0]",
        "  recompute: [4, 2, 0, 0]",
        r"  select_recompute: ['attention\.softmax']",
        "  recompute_slice_activation: False",
    ]
    assert writing.losses == ()


def test_the_plan_of_a_file_changes_nothing_in_it():
    for name in ("glm4_9b.yaml", "seed.yaml", "thousand_cards.yaml"):
        plan = read_mindformers(read_yaml(DATA / name)).plan
        again = read_mindformers(parse_yaml(write_mindformers(plan, read_yaml(DATA / name)).text)).plan
        assert again == plan
    plan = read_mindformers(read_yaml(DATA / "glm4_9b.yaml")).plan
    assert lines_changed(plan, DATA / "glm4_9b.yaml")[:2] == ([], [])


def test_interleave_is_switched_on_where_the_plan_has_chunks():
    text = "parallel_config:\n  pipeline_stage: 2\nmodel:\n  model_config:\n    num_layers: 8  # all\n"
    plan = plan_of(((3, 2), (1, 2)), schedule="mindspore_interleaved")
    gone, come, _ = lines_changed(plan, None, text)
    assert gone == []
    assert come == [
        "    offset: [[1, 0], [-1, 0]]",
        "    pp_interleave_num: 2",
        "parallel:",
        "  pipeline_config:",
        "    pipeline_interleave: true",
    ]


def test_only_what_is_recomputed_is_added():
    text = "parallel_config:\n  pipeline_stage: 2\nmodel_config:\n  num_layers: 8\n"
    gone, come, _ = lines_changed(plan_of(((4, 4),), Policy(full=frozenset({0}))), None, text)
    assert (gone, come) == ([], ["recompute_config:", "  recompute: [1, 0]"])


def test_a_file_for_another_run_is_refused_or_named():
    text = "parallel_config: {pipeline_stage: 4, model_parallel: 8}\nmodel_config: {num_layers: 8, seq_length: 4096}\n"
    with pytest.raises(EvenloadError) as caught:
        lines_changed(plan_of(((4, 4),)), None, text)
    assert caught.value.fact == "the file has pipeline_stage 4, the plan is for 2"
    assert caught.value.where == "m.yaml:1:35"
    with pytest.raises(EvenloadError, match="the file has num_layers 8, the plan is for 12"):
        lines_changed(plan_of(((3, 3, 3, 3),)), None, text)
    losses = lines_changed(plan_of(((2, 2, 2, 2),), tp=4), None, text)[2].losses
    assert [loss.fact for loss in losses] == ["the plan was made for model_parallel 4, the file says 8 and keeps it"]


def test_under_swap_layers_are_written_by_number():
    text = "parallel_config: {pipeline_stage: 2}\nmodel_config: {num_layers: 8}\nswap_config: {swap: True}\n"
    plan = plan_of(((4, 4),), Policy(full=frozenset({1, 6}), select={r"feed_forward\.mul": frozenset({0, 7})}))
    _, come, writing = lines_changed(plan, None, text)
    assert "  recompute: [1, 6]" in come
    assert any("swap is on" in loss.fact for loss in writing.losses)
    assert read(writing.text).plan.policy == plan.policy


def test_a_schedule_that_mindformers_lacks_is_named():
    plan = plan_of(((2, 2), (2, 2)), schedule="interleaved_1f1b_less_memory")
    assert any("no schedule interleaved_1f1b_less_memory" in loss.fact for loss in write_mindformers(plan).losses)
