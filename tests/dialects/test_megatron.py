"""Megatron-LM's arguments are read as Megatron-LM reads them, and written with what they cannot express."""

import subprocess

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evenload.dialects.megatron import MODULES, read_megatron, uniform_units
from evenload.dialects.megatron_layout import read_layout_string, write_layout_string
from evenload.dialects.megatron_write import write_megatron
from evenload.errors import EvenloadError
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy, Recompute, counts, first_layers
from evenload.setup import Setup

from .plans import layouts, plans

PP4 = "--pipeline-model-parallel-size 4 "


def read(text):
    return read_megatron(text, name="args.sh")


def expand(text):
    """Megatron-LM's documented expansion, by hand: groups first, then letters."""
    import re

    text = text.replace(",", "")
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda m: m[1] * int(m[2]), text)
    return re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), text)


# layouts


@pytest.mark.parametrize(
    ("text", "pp", "table", "mtp"),
    [
        ("Et*3|(tt|)*29,m|L", 16, ((3, *[2] * 15), (*[2] * 14, 0, 0)), 1),
        ("Ettt|ttt|tL", 3, ((3, 3, 1),), 0),
        ("Et*2|(t*2|)*34,t*3|L", 37, ((2, *[2] * 34, 3, 0),), 0),
        ("E||tL", 3, ((0, 0, 1),), 0),
        ("Et*16|t*16|t*16|t*12,m,L", 2, ((16, 16), (16, 12)), 1),
        ("EtL", 1, ((1,),), 0),
    ],
)
def test_layout_strings_in_use_are_read(text, pp, table, mtp):
    assert read_layout_string(text, pp=pp) == (Layout(table), mtp)


@given(layouts(), st.integers(0, 2))
def test_a_layout_comes_back_from_its_string(layout, mtp):
    text = write_layout_string(layout, mtp=mtp)
    assert read_layout_string(text, pp=layout.pp) == (layout, mtp)
    chunks = expand(text).split("|")
    assert [chunk.count("t") for chunk in chunks] == [count for row in layout.table for count in row]
    assert "".join(chunks) == "E" + "t" * layout.num_layers + "m" * mtp + "L"


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("Ett|xL", "holds 'x'"),
        ("Ett|tt|L", "has 3 chunks, which 2 stages cannot share"),
        ("tt|tL", "must begin with E"),
        ("Ett|tt", "must end with L"),
        ("EtE|tL", "must begin with E"),
        ("Em|tL", "layers after the MTP layers"),
        ("E(tt|tL", "a bracket or a \\*"),
        ("Et*|tL", "a bracket or a \\*"),
        ("Et*999999|tL", "more layers than any model has"),
        ("", "has 1 chunks"),
    ],
)
def test_a_broken_layout_string_is_refused(text, fact):
    with pytest.raises(EvenloadError, match=fact):
        read_layout_string(text, pp=2)


# reading


@pytest.mark.parametrize(
    ("text", "table"),
    [
        (PP4 + "--num-layers 8", ((2, 2, 2, 2),)),
        ("--num-layers=8", ((8,),)),
        (PP4 + "--num-layers 16 --num-layers-per-virtual-pipeline-stage 2", ((2,) * 4,) * 2),
        (PP4 + "--num-layers 16 --num-virtual-stages-per-pipeline-rank 2", ((2,) * 4,) * 2),
        (PP4 + "--num-layers 61 --decoder-last-pipeline-num-layers 13", ((16, 16, 16, 13),)),
        (PP4 + "--num-layers 30 --decoder-first-pipeline-num-layers 6", ((6, 8, 8, 8),)),
        (PP4 + "--num-layers 30 --decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 8",
         ((6, 8, 8, 8),)),
        (PP4 + "--num-layers 16 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 6 "
         "--num-virtual-stages-per-pipeline-rank 2", ((1, 2, 2, 3),) * 2),
        (PP4 + "--num-layers 30 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
         ((7, 8, 8, 7),)),
        (PP4 + "--num-layers 30 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
         "--num-layers-per-virtual-pipeline-stage 4", ((3, 4, 4, 4), (4, 4, 4, 3))),
        (PP4 + "--num-layers 5 --pipeline-model-parallel-layout 'Et|tt|t|tL'", ((1, 2, 1, 1),)),
    ],
)  # fmt: skip
def test_layers_are_placed_as_megatron_places_them(text, table):
    assert read(text).plan.layout.table == table


def test_thirty_layers_on_four_stages_are_refused_because_only_28_would_be_built():
    with pytest.raises(EvenloadError) as caught:
        read(PP4 + "\\\n  --num-layers 30")
    assert caught.value.fact == "30 layers do not divide over 4 stages: with 7 each, 28 of 30 would be built"
    assert caught.value.where == "args.sh:2"
    assert caught.value.fix is not None
    assert "Et*7|t*8|t*8|t*7L" in caught.value.fix


def test_the_last_stage_holds_as_many_layers_as_the_argument_says():
    layout = read("--num-layers 61 --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 13").plan.layout
    assert layout.per_stage == (16, 16, 16, 13)
    assert layout.offsets() == ((1, 1, 1, -2),)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (PP4, "do not name the layers"),
        (PP4 + "--num-layers 3", "with 0 each, 0 of 3"),
        (PP4 + "--num-layers many", "'many', not a whole number"),
        (PP4 + "--num-layers", "--num-layers has no value"),
        (PP4 + "--num-layers 0", "--num-layers is 0"),
        (PP4 + "--num-layers -4", "--num-layers is -4"),
        (PP4 + "--num-layers ${LAYERS}", "is the shell variable"),
        (PP4 + "--num-layers 8 --num-layers 9", "given twice, as 8 and as 9"),
        (PP4 + "--num-layer 8", "--num-layer is not an argument"),
        ("--pipeline-model-parallel-size 0 --num-layers 8", "--pipeline-model-parallel-size is 0"),
        (PP4 + "--num-layers 16 --num-layers-per-virtual-pipeline-stage 3", "no multiple of 4 stages x 3"),
        (PP4 + "--num-layers 30 --decoder-last-pipeline-num-layers 7", "23 layers are left for 3 stages"),
        (PP4 + "--num-layers 30 --decoder-last-pipeline-num-layers 40", "-10 layers are left"),
        (PP4 + "--num-layers 16 --decoder-first-pipeline-num-layers 4 --num-layers-per-virtual-pipeline-stage 2",
         "exclude each other"),
        (PP4 + "--num-layers 16 --decoder-first-pipeline-num-layers 4 --account-for-loss-in-pipeline-split",
         "exclude each other"),
        (PP4 + "--num-layers 16 --decoder-first-pipeline-num-layers 1 --num-virtual-stages-per-pipeline-rank 2",
         "the 1 layers of stage 0 do not divide over 2 chunks"),
        (PP4 + "--num-layers 9 --pipeline-model-parallel-layout 'Et|tt|t|tL'", "holds 5 layers, --num-layers says 9"),
        (PP4 + "--mtp-num-layers 2 --pipeline-model-parallel-layout 'Et|tt|t|tmL'", "holds 1 MTP layers"),
        (PP4 + "--num-layers 8 --recompute-method block", "says nothing without --recompute-granularity"),
        (PP4 + "--num-layers 8 --recompute-granularity full", "full with --recompute-method None"),
        (PP4 + "--num-layers 8 --recompute-granularity some", "--recompute-granularity is 'some'"),
        (PP4 + "--num-layers 8 --recompute-granularity full --recompute-method block --recompute-num-layers 0",
         "--recompute-num-layers is 0"),
        (PP4 + "--num-layers 8 --recompute-granularity selective --recompute-modules core_atn", "names 'core_atn'"),
        (PP4 + "--num-layers 8 --recompute-granularity selective --recompute-num-layers 2", "says nothing with"),
        (PP4 + "--num-layers 8 --micro-batch-size 3 --global-batch-size 8", "no multiple of --micro-batch-size 3"),
        (PP4 + "--num-layers 8 --tensor-model-parallel-size 0", "tp is 0"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_meant_are_refused(text, fact):
    with pytest.raises(EvenloadError) as caught:
        read(text)
    assert fact in caught.value.fact
    assert caught.value.where is not None
    assert caught.value.where.startswith("args.sh")


def test_a_shell_script_is_read_with_comments_arrays_and_line_ends():
    script = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1   # --num-layers 3 in a comment says nothing
MODEL_ARGS=(
    --num-layers 8 --hidden-size $HIDDEN  # other arguments may be variables
)
torchrun pretrain_gpt.py "${MODEL_ARGS[@]}" \\
    --pipeline-model-parallel-size 2 --tensor-model-parallel-size 8 --sequence-parallel \\
    --recompute-granularity selective --recompute-modules core_attn layernorm \\
    --context-parallel-size 2 --expert-model-parallel-size 4 --bf16 --use-distributed-optimizer \\
    --micro-batch-size 2 --global-batch-size 32 --seq-length 8192
"""
    plan = read(script).plan
    assert plan.layout.table == ((4, 4),)
    assert plan.setup == Setup(
        pp=2,
        tp=8,
        sequence_parallel=True,
        cp=2,
        ep=4,
        zero=1,
        micro_batch=2,
        micro_batches=16,
        seq=8192,
        backend="megatron",
    )
    assert set(plan.policy.select) == {*MODULES["core_attn"], *MODULES["layernorm"]}


def test_uniform_units_end_with_what_is_left():
    assert [len(unit) for unit in uniform_units(24, 7)] == [7, 7, 7, 3]
    reading = read("--num-layers 24 --recompute-granularity full --recompute-method uniform --recompute-num-layers 7")
    assert reading.plan.policy.full == frozenset(range(24))
    assert "7+7+7+3" in reading.notices[0].fact


def test_uniform_by_one_is_every_layer_and_block_by_one_is_one_layer_of_every_chunk():
    full = "--num-layers 8 --pipeline-model-parallel-size 2 --recompute-granularity full --recompute-num-layers 1 "
    uniform = read(full + "--recompute-method uniform")
    assert uniform.plan.policy.full == frozenset(range(8))
    assert uniform.notices == ()
    assert read(full + "--recompute-method block").plan.policy.full == {0, 4}


# writing


def plan_of(table, policy=None, **setup):
    layout = Layout(table)
    sizes = {"pp": layout.pp, "interleave": layout.interleave, "backend": "megatron"}
    sizes["schedule"] = "1f1b" if layout.interleave == 1 else "interleaved_1f1b"
    return Plan(setup=Setup(**(sizes | setup)), layout=layout, policy=policy or Policy())


@pytest.mark.parametrize(
    ("table", "argument"),
    [
        (((2, 2, 2, 2),), None),
        (((2, 2), (2, 2)), "--num-layers-per-virtual-pipeline-stage 2"),
        (((16, 16, 16, 13),), "--decoder-last-pipeline-num-layers 13"),
        (((6, 8, 8, 8),), "--decoder-first-pipeline-num-layers 6"),
        (((6, 8, 8, 7),), "--decoder-first-pipeline-num-layers 6\n    --decoder-last-pipeline-num-layers 7"),
        (((7, 8, 9, 6),), "--pipeline-model-parallel-layout 'Et*7|t*8|t*9|t*6L'"),
        (((2, 1), (1, 2)), "--pipeline-model-parallel-layout 'Ett|t|t|ttL'"),
        (((5,),), None),
    ],
)
def test_the_shortest_arguments_for_a_layout_are_written(table, argument):
    writing = write_megatron(plan_of(table))
    assert read(writing.text).plan.layout.table == table
    if argument is None:
        assert "layout" not in writing.text
        assert "-pipeline-num-layers" not in writing.text
    else:
        assert f"    {argument}\n" in writing.text


def test_mtp_layers_are_placed_before_the_loss():
    writing = write_megatron(plan_of(((2, 2),)), mtp=1)
    assert "--pipeline-model-parallel-layout 'Ett|ttmL'" in writing.text


def test_what_is_written_is_a_bash_array():
    text = write_megatron(plan_of(((7, 8, 9, 6),), tp=8)).text
    done = subprocess.run(
        ["bash", "-c", text + 'printf "%s\\n" "${EVENLOAD_ARGS[@]}"'], capture_output=True, text=True, check=True
    )
    assert "Et*7|t*8|t*9|t*6L" in done.stdout.splitlines()


def test_one_count_for_all_stages_takes_the_largest_and_says_what_is_lost():
    layout = Layout(((9, 10, 12, 9),))
    plan = plan_of(layout.table, Policy(full=first_layers(((6, 3, 2, 3),), layout)))
    writing = write_megatron(plan)
    assert "--recompute-method block\n    --recompute-num-layers 6\n" in writing.text
    (loss,) = writing.losses
    assert loss.fact == (
        "Megatron-LM has one recompute count: the plan's [6, 3, 2, 3] becomes the first 6 layers of every stage, "
        "10 more than planned"
    )


def test_policies_that_megatron_has_lose_nothing():
    layout = Layout(((4, 4), (4, 4)))
    for policy in (
        Policy(),
        Policy.everywhere(Recompute.FULL, 16),
        Policy(full=first_layers(((2, 2), (2, 2)), layout)),
        Policy(select=dict.fromkeys(MODULES["core_attn"], frozenset(range(16)))),
        Policy(select=dict.fromkeys((*MODULES["moe"], *MODULES["layernorm"]), frozenset(range(16)))),
        Policy(full=frozenset(range(16)), slice_activation=True),
    ):
        plan = plan_of(layout.table, policy, tp=2, micro_batches=4)
        writing = write_megatron(plan)
        assert writing.losses == ()
        assert read(writing.text).plan == plan


def test_patterns_become_modules_and_the_difference_is_named():
    everywhere, half = frozenset(range(4)), frozenset({0, 1})
    policy = Policy(
        select={r"feed_forward\.mul": everywhere, r"attention\.softmax": half, r"attention\.wq": everywhere}
    )
    writing = write_megatron(plan_of(((2, 2),), policy))
    assert "--recompute-modules mlp core_attn" in writing.text
    facts = " / ".join(loss.fact for loss in writing.losses)
    assert r"'attention\.softmax' is planned for layers 0-1" in facts
    assert r"no module of --recompute-modules holds what 'attention\.wq' names" in facts
    assert "the whole module mlp is recomputed" in facts


def test_full_beside_select_recomputes_more_rather_than_less():
    policy = Policy(full=frozenset({0}), select={r"feed_forward\.mul": frozenset({1, 2})})
    writing = write_megatron(plan_of(((2, 2),), policy))
    assert "layers 1-2 are recomputed whole" in writing.losses[0].fact
    assert {0, 1, 2} <= read(writing.text).plan.policy.full


@pytest.mark.parametrize(
    ("setup", "policy", "fact"),
    [
        ({"zero": 3}, Policy(), "ZeRO stage 3"),
        ({"schedule": "gpipe"}, Policy(), "no schedule gpipe"),
        ({}, Policy(comm={r".*\.norm": frozenset({0})}), "recomputed communication is left out"),
        ({}, Policy(optimizer_comm=True), "gathering sharded parameters again"),
        ({"tp": 2}, Policy(full=frozenset(range(4)), mp_comm=False), "runs tensor-parallel collectives again"),
    ],
)
def test_every_loss_is_named(setup, policy, fact):
    assert any(fact in loss.fact for loss in write_megatron(plan_of(((2, 2),), policy, **setup)).losses)


@given(plans())
def test_any_plan_is_written_and_never_recomputes_less_than_whole_layers_asked_for(plan):
    setup = plan.setup
    assume(setup.micro_batches * setup.dp <= 2**16)  # read back, all replicas' micro-batches are those of one
    writing = write_megatron(plan)
    again = read(writing.text).plan
    assert again.setup.pp == plan.setup.pp
    if plan.layout.pp > 1:
        assert again.layout == plan.layout
        wanted, got = counts(plan.policy.full, plan.layout), counts(again.policy.full, plan.layout)
        assert all(a <= b for left, right in zip(wanted, got, strict=True) for a, b in zip(left, right, strict=True))
    if again.policy.full != plan.policy.full or again.layout != plan.layout:
        assert writing.losses


def test_a_stage_for_the_embedding_alone_is_said():
    reading = read_megatron("--pipeline-model-parallel-layout E|tt|ttL --pipeline-model-parallel-size 3", name="a.sh")
    assert [str(notice) for notice in reading.notices] == ["a.sh: stage 0 of chunk 0 holds no layer"]
