import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.golden_orders import FOLDER, expand, read

from evenload.errors import EvenloadError
from evenload.plan.schedule import SCHEDULES, Op, actions, default_schedule, find_schedule, validate

CASES = read("torch.jsonl")


def size(case):
    return {key: case[key] for key in ("pp", "interleave", "micro_batches")}


def letters(orders):
    return [[(str(action.op), action.chunk, action.micro_batch) for action in order] for order in orders]


def test_every_golden_case_equals_the_order_of_pytorch():
    made = [case for case in CASES if not case.get("refused")]
    for case in made:
        assert letters(actions(case["schedule"], **size(case))) == expand(case), size(case)
    assert len(made) > 250
    assert {case["pp"] for case in made} == set(range(2, 9))
    assert {case["interleave"] for case in made} == {1, 2, 3}


def test_every_golden_case_equals_the_order_of_mindspore():
    cases = read("mindspore.jsonl")
    for case in cases:
        assert letters(actions(case["schedule"], **size(case))) == expand(case), size(case)
    assert any(case["micro_batches"] % case["pp"] for case in cases if case["interleave"] > 1)


def test_sizes_that_pytorch_refuses_are_valid_schedules_here():
    refused = [case for case in CASES if case.get("refused")]
    assert refused
    for case in refused:
        validate(actions(case["schedule"], **size(case)), **size(case))


def test_every_schedule_is_valid_for_any_sizes():
    for name, pp, interleave, micro_batches in product(SCHEDULES, (1, 2, 3, 5, 8), (1, 2, 3, 4), (1, 2, 3, 7, 8, 13)):
        if interleave == 1 or not SCHEDULES[name].one_chunk:
            size = {"pp": pp, "interleave": interleave, "micro_batches": micro_batches}
            validate(actions(name, **size), **size)


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    pp=st.integers(1, 10),
    interleave=st.integers(1, 5),
    micro_batches=st.integers(1, 24),
)
def test_a_random_size_gives_a_valid_schedule(name, pp, interleave, micro_batches):
    interleave = 1 if SCHEDULES[name].one_chunk else interleave
    size = {"pp": pp, "interleave": interleave, "micro_batches": micro_batches}
    validate(actions(name, **size), **size)


def test_1f1b_of_two_stages_reads_as_in_the_paper():
    assert [[f"{a.op}{a.micro_batch}" for a in order] for order in actions("1f1b", pp=2, micro_batches=3)] == [
        ["F0", "F1", "B0", "F2", "B1", "B2"],
        ["F0", "B0", "F1", "B1", "F2", "B2"],
    ]


def test_the_short_warm_up_holds_fewer_micro_batches_than_the_long_one():
    long = actions("interleaved_1f1b", pp=4, interleave=2, micro_batches=8)
    short = actions("less_memory", pp=4, interleave=2, micro_batches=8)
    first_backward = [[a.op for a in order].index(Op.BACKWARD) for order in (*long, *short)]
    assert first_backward == [11, 9, 7, 5, 8, 7, 6, 5]


def test_mindspore_gives_the_left_over_micro_batches_to_the_first_round_where_pytorch_spreads_them():
    pytorch = actions("interleaved_1f1b", pp=4, interleave=2, micro_batches=10)[0]
    mindspore = actions("mindspore_interleaved", pp=4, interleave=2, micro_batches=10)[0]

    def first_round(order):
        forwards = [a for a in order if a.op is Op.FORWARD]
        return next(index for index, a in enumerate(forwards) if a.chunk == 1)

    assert (first_round(pytorch), first_round(mindspore)) == (5, 6)
    for micro_batches in (3, 4, 6, 8, 12):  # one round, or no remainder: no difference
        size = {"pp": 4, "interleave": 3, "micro_batches": micro_batches}
        assert actions("interleaved_1f1b", **size) == actions("mindspore_interleaved", **size)


@pytest.mark.parametrize("name", ["mindspore_interleaved", "interleaved_1f1b_less_memory"])
def test_orders_of_mindspore_on_one_chunk_are_plain_1f1b(name):
    assert actions(name, pp=5, micro_batches=7) == actions("1f1b", pp=5, micro_batches=7)
    assert find_schedule(name, interleave=1).name == "1f1b"
    assert find_schedule(name, interleave=2).name == find_schedule(name).name == name


def test_1f1b_over_several_chunks_is_interleaved_1f1b():
    size = {"pp": 4, "interleave": 2, "micro_batches": 8}
    assert actions("1f1b", **size) == actions("interleaved_1f1b", **size)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("1F1B", "1f1b"),
        ("GPipe", "gpipe"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("ScheduleInterleaved1F1B", "interleaved_1f1b"),
        ("interleaved-1f1b", "interleaved_1f1b"),
        ("less memory", "interleaved_1f1b_less_memory"),
        ("vpp", "mindspore_interleaved"),
    ],
)
def test_names_of_other_frameworks_are_understood(name, found):
    assert find_schedule(name).name == found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("1f1c", "did you mean '1f1b'?"),
        ("interleved", "did you mean 'interleaved'?"),
        ("zzz", "use one of gpipe, 1f1b"),
        ("", "use one of gpipe, 1f1b"),
        ("LoopedBFS", "not there yet"),
        ("ScheduleZBVZeroBubble", "not there yet"),
        (None, "schedule is None"),
        (7, "schedule is 7"),
    ],
)
def test_an_unknown_schedule_is_refused_with_a_way_out(name, says):
    with pytest.raises(EvenloadError, match=r"schedule") as caught:
        actions(name, pp=2, micro_batches=2)
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


def test_gpipe_over_several_chunks_is_refused():
    with pytest.raises(EvenloadError, match="one chunk per stage"):
        actions("gpipe", pp=2, interleave=2, micro_batches=4)


@pytest.mark.parametrize("word", ["pp", "interleave", "micro_batches"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "4", None, float("nan")])
def test_a_size_that_is_no_whole_number_is_refused(word, value):
    size = {"pp": 2, "interleave": 2, "micro_batches": 2} | {word: value}
    with pytest.raises(EvenloadError, match=word):
        actions("interleaved_1f1b", **size)


def test_a_size_beyond_reason_is_refused_at_once():
    with pytest.raises(EvenloadError, match="actions"):
        actions("1f1b", pp=64, micro_batches=2**24)


def test_the_same_arguments_give_the_same_object():
    assert actions("1f1b", pp=3, micro_batches=4) is actions("1F1B", pp=3, micro_batches=4)


def test_the_default_follows_the_number_of_chunks():
    assert default_schedule(1) == default_schedule(1, less_memory=True) == "1f1b"
    assert default_schedule(2) == "interleaved_1f1b"
    assert default_schedule(2, less_memory=True) == "interleaved_1f1b_less_memory"


@pytest.mark.slow
def test_the_golden_file_is_what_pytorch_makes_today(tmp_path):
    pytest.importorskip("torch")
    script, target = Path(__file__).with_name("make_golden_torch.py"), tmp_path / "torch.jsonl"
    subprocess.run([sys.executable, str(script), str(target)], check=True, capture_output=True)
    assert target.read_text() == (FOLDER / "torch.jsonl").read_text()
