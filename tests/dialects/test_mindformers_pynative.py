"""MindFormers r2.0 settings name layers and modules; both come into the plan, and back."""

from pathlib import Path

import pytest
from hypothesis import given

from evenload.dialects.detect import read_settings
from evenload.dialects.mindformers_pynative import house_pattern, read_pynative
from evenload.dialects.mindformers_pynative_write import write_pynative
from evenload.dialects.yaml_source import parse_yaml
from evenload.errors import EvenloadError
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy
from evenload.setup import Setup

from .plans import layouts

DATA = Path(__file__).parent.parent / "data" / "dialects"


def read(text, **given):
    return read_pynative(parse_yaml(text, name="p.yaml"), **given)


def test_modules_and_an_even_split_of_interleaved_chunks_are_read():
    reading = read_settings(DATA / "pynative.yaml")
    assert reading.dialect == "mindformers-pynative"
    layout = reading.plan.layout
    assert layout.table == ((4, 4), (4, 4))
    assert [list(layout.layers(chunk, 0)) for chunk in (0, 1)] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert [list(layout.layers(chunk, 1)) for chunk in (0, 1)] == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert reading.plan.policy.select == {"self_attention": frozenset(range(16)), "mlp": frozenset(range(10))}
    assert reading.written == {"self_attention": "layers.*.self_attention.*", "mlp": "layers.*.mlp.*"}
    assert not [notice for notice in reading.notices if "matched 0" in notice.fact]
    assert reading.plan.setup.micro_batches == 16


BASE = """parallelism:
  pipeline_parallel: 2
  pipeline_parallel_interleave_num: 2
  pipeline_parallel_layers_per_stage: ["0-1,5", "2-4,6-7"]
model: {num_hidden_layers: 8}
recompute:
  mode: full
  full_recompute_layer: ["0-1", "6"]
"""


def test_layers_per_stage_give_every_stage_its_chunks():
    plan = read(BASE).plan
    assert plan.layout.table == ((2, 3), (1, 2))
    assert plan.policy.full == {0, 1, 6}


@pytest.mark.parametrize(
    ("new", "table"),
    [
        ('"0-1,5|2-4,6-7"', ((2, 3), (1, 2))),
        ('["0,5", "1-4,6-7"]', ((1, 4), (1, 2))),
        ('[ "0 - 1, 5", "2-4,6-7" ]', ((2, 3), (1, 2))),
        ("auto", ((2, 2), (2, 2))),
        ("null", ((2, 2), (2, 2))),
    ],
)
def test_the_ways_to_write_layers_per_stage(new, table):
    assert read(BASE.replace('["0-1,5", "2-4,6-7"]', new)).plan.layout.table == table


def test_mtp_layers_follow_the_last_layer_and_are_not_dealt():
    text = BASE.replace("{num_hidden_layers: 8}", "{num_hidden_layers: 8, num_nextn_predict_layers: 1}")
    assert read(text.replace("6-7", "6-8")).plan.layout.table == ((2, 3), (1, 2))
    with pytest.raises(EvenloadError, match="the stages hold layers 0 to 8, the model has 8"):
        read(BASE.replace("6-7", "6-8"))


@pytest.mark.parametrize(
    ("old", "new", "fact", "where", "fix"),
    [
        ("num_hidden_layers: 8", "num_hidden_layers: 9", "the stages hold layers 0 to 7", "4:39", "every layer once"),
        ("2-4,6-7", "2-4,7", "chunk 1 of stage 1 begins with layer 7, and 6 is next", "4:49", None),
        ("0-1,5", "0-2,5", "begins with layer 2, and 3 is next", "4:49", None),
        ("0-1,5", "0-1", "stage 0 has 1 ranges of layers for 2 interleaves", "4:40", None),
        ("0-1,5", "1-0,5", "the range 1-0 runs backwards", "4:40", "0-1"),
        ("0-1,5", "first", "'first' is no range of layers", "4:40", "0-3,8-11"),
        ('["0-1,5", "2-4,6-7"]', '["0-7,8"]', "is 1 entries for 2 stages", "4:39", "one text per stage"),
        ('["0-1,5", "2-4,6-7"]', "even", "is 'even' for 2 stages", "4:39", "auto"),
        ("pipeline_parallel: 2", "pipeline_parallel: 0", "pipeline_parallel is 0", "2:22", "at least 1"),
        ("pipeline_parallel_interleave_num", "pipeline_parallel_interleave", "is not known", "3:3", "interleave_num'?"),
        ("mode: full", "mode: most", "mode is 'most'", "7:9", "None, full, select"),
        ("mode: full", "mode: select", "mode select needs select_module", "7:9", None),
        ("mode: full\n", "mode: full\n  fulll_recompute_layer: 1\n", "is not known", "8:3", "'full_recompute_layer'"),
        ('"6"]', '"8"]', "there is no layer 8", "8:33", "0 to 7"),
        ('"6"]', "x]", "'x' is no range", "8:33", None),
        ("recompute:\n", "recompute_comm: {enable: True}\nrecompute:\n", "without select_module", "6:26", None),
        ("mode: full", "mode: 1", "mode is 1, not a word", "7:9", None),
        ("model: {num_hidden_layers: 8}", "model: {}", "do not say how many layers", "", "num_hidden_layers"),
    ],
)
def test_a_mistake_is_named_with_its_place(old, new, fact, where, fix):
    assert old in BASE
    with pytest.raises(EvenloadError) as caught:
        read(BASE.replace(old, new, 1))
    assert fact in caught.value.fact
    assert caught.value.where == (f"p.yaml:{where}" if where else "p.yaml")
    assert fix is None or (caught.value.fix is not None and fix in caught.value.fix)


def test_auto_that_does_not_divide_shows_a_split_that_works():
    with pytest.raises(EvenloadError) as caught:
        read("parallelism: {pipeline_parallel: 4, pipeline_parallel_layers_per_stage: auto}\nmodel: {num_layers: 30}")
    assert "auto only divides evenly" in caught.value.fact
    assert caught.value.fix is not None
    assert "['0-6', '7-14', '15-22', '23-29'] works" in caught.value.fix


def test_settings_that_say_nothing_are_warned_about():
    text = BASE.replace("mode: full", "mode: None") + "  select_module: {mlp: ['0']}\n"
    reading = read(text)
    assert reading.plan.policy == Policy()
    said = [notice.fact for notice in reading.notices]
    assert "full_recompute_layer says nothing under mode None" in said
    assert "select_module says nothing under mode None" in said


def test_excluded_operators_and_recomputed_communication_are_read():
    reading = read(
        BASE.replace("mode: full", "mode: select")
        + "  select_module: {self_attention: ['0-7']}\n  exclude_op: [flash_attention]\n"
        + "recompute_comm: {enable: True, select_module: {input_layernorm: ['2-3']}}\n"
        + "swap: {enable: True}\n"
    )
    view = reading.plan.for_layer(2)
    assert view.select == ("self_attention",)
    assert r".*\.flash_attention" in view.select_exclude
    assert view.comm == ("input_layernorm",)
    assert reading.plan.for_layer(0).full
    assert any("swap is on" in notice.fact for notice in reading.notices)


def test_a_module_that_does_not_exist_is_warned_about_at_its_place():
    reading = read(BASE.replace("mode: full", "mode: select") + "  select_module:\n    attentions: ['0-3']\n")
    (said,) = [notice for notice in reading.notices if "matched 0 of 4 layers" in notice.fact]
    assert said.where == "p.yaml:10:5"


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("layers.*.self_attention.*", "self_attention"),
        ("model.layers.*.mlp", "mlp"),
        (r"layers.\d+.mlp", "mlp"),
        ("mlp.linear_fc1", r"mlp\.linear_fc1"),
        (r"mlp\.mul", r"mlp\.mul"),
        ("self_attention.linear_.*", r"self_attention\.linear_.*"),
        ("*.norm", r".*\.norm"),
        (".*norm", ".*norm"),
    ],
)
def test_module_paths_become_patterns(path, pattern):
    assert house_pattern(path) == pattern


@given(layouts(least=1))
def test_a_plan_comes_back_from_its_settings(layout):
    last = layout.num_layers - 1
    plan = Plan(
        setup=Setup(
            pp=layout.pp, interleave=layout.interleave, tp=2, sequence_parallel=True, dp=4, etp=1, zero=3,
            micro_batch=2, micro_batches=8, backend="mindspore", hardware="ascend-910b",
            schedule="1f1b" if layout.interleave == 1 else "mindspore_interleaved",
        ),
        layout=layout,
        policy=Policy(
            full=frozenset({0, last}),
            select={"mlp": frozenset({0}), r"self_attention\.core_attention": frozenset(range(last + 1))},
            comm={"input_layernorm": frozenset({last})},
        ),
    )  # fmt: skip
    writing = write_pynative(plan)
    assert writing.losses == ()
    assert read(writing.text).plan == plan


def test_what_r2_settings_cannot_say_is_named():
    layout = read(BASE).plan.layout
    plan = Plan(
        setup=Setup(pp=2, interleave=2, tp=2, dp=2, zero=1, schedule="interleaved_1f1b_less_memory"),
        layout=layout,
        policy=Policy(optimizer_comm=True, select_exclude={"mlp": frozenset({0})}),
    )
    said = " / ".join(loss.fact for loss in write_pynative(plan).losses)
    for part in ("interleaved_1f1b_less_memory", "optimizer_comm", "select_exclude", "ZeRO stage 1", "sequence"):
        assert part in said
