"""The validator names the rank and the action of every fault."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.errors import EvenloadError
from evenload.plan.schedule import Action, Op, actions, validate

F, B, I, W = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT  # noqa: E741  # the letters of the field
SIZE = {"pp": 2, "interleave": 1, "micro_batches": 2}


def order(text):
    return tuple(Action(Op(word[0]), int(word[1]), int(word[2])) for word in text.split())


GOOD = order("F00 F01 B00 B01")


def test_a_good_list_passes():
    validate((GOOD, GOOD), **SIZE)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("F00 F01 B00", "F00 F01 B00 B01", "rank 0 never runs B1 of chunk 0"),
        ("F00 F01 B00 B01", "F00 B00 B01", "rank 1 never runs F1 of chunk 0"),
        ("F00 F01 B00 B01 B01", "F00 F01 B00 B01", "rank 0 runs B1 of chunk 0 2 times"),
        ("F00 F01 B00 B01 F10", "F00 F01 B00 B01", "rank 0 runs F0 of chunk 1, but chunks go from 0 to 0"),
        ("F00 F01 B00 B01 F02", "F00 F01 B00 B01", "rank 0 runs F2 of chunk 0, but chunks go"),
        ("B00 F00 F01 B01", "F00 F01 B00 B01", "rank 0 runs B0 of chunk 0 before F0 of chunk 0"),
        ("F00 F01 I00 B01", "F00 F01 B00 B01", "rank 0 never runs W0 of chunk 0"),
        ("F00 F01 W00 B01", "F00 F01 B00 B01", "rank 0 never runs I0 of chunk 0"),
        ("F00 F01 B00 W00 B01", "F00 F01 B00 B01", "both a whole and a split backward of micro-batch 0"),
        ("F00 F01 W00 I00 B01", "F00 F01 B00 B01", "rank 0 runs W0 of chunk 0 before I0 of chunk 0"),
        (  # rank 1 gives B0 back only after F1, which rank 0 holds back
            "F00 B00 F01 B01",
            "F00 F01 B00 B01",
            "deadlock: rank 0 waits at B0 of chunk 0 for B0 of chunk 0 on rank 1, which never comes",
        ),
    ],
)
def test_each_fault_is_named_with_its_rank_and_action(first, second, says):
    with pytest.raises(EvenloadError) as caught:
        validate((order(first), order(second)), **SIZE)
    assert says in str(caught.value)
    assert caught.value.where.startswith("$[")


@pytest.mark.parametrize("wrong", [("F", 0, 0), "F0", None, Action("X", 0, 0)])
def test_what_is_no_action_is_refused(wrong):
    with pytest.raises(EvenloadError, match="is no action") as caught:
        validate((GOOD, (*GOOD, wrong)), **SIZE)
    assert caught.value.where == "$[1][4]"


def test_operations_may_be_written_as_letters():
    letters = tuple(Action(str(action.op), action.chunk, action.micro_batch) for action in GOOD)
    validate((letters, letters), **SIZE)


def test_a_list_for_another_number_of_ranks_is_refused():
    with pytest.raises(EvenloadError, match="has 1 ranks, the pipeline 2 stages"):
        validate((GOOD,), **SIZE)


def test_a_split_backward_is_valid_and_lets_the_stage_before_go_on_after_its_first_half():
    first = order("F00 F01 I00 I01 W00 W01")
    second = order("F00 I00 F01 I01 W00 W01")
    validate((first, second), **SIZE)


@given(seed=st.integers(0, 10**6), pp=st.integers(2, 5), interleave=st.integers(1, 3), micro_batches=st.integers(1, 6))
def test_dropping_or_doubling_any_action_is_noticed(seed, pp, interleave, micro_batches):
    size = {"pp": pp, "interleave": interleave, "micro_batches": micro_batches}
    lists = [list(one) for one in actions("interleaved_1f1b", **size)]
    rng = random.Random(seed)
    rank = rng.randrange(pp)
    index = rng.randrange(len(lists[rank]))
    if rng.random() < 0.5:
        del lists[rank][index]
    else:
        lists[rank].insert(rng.randrange(len(lists[rank]) + 1), lists[rank][index])
    with pytest.raises(EvenloadError, match=f"rank {rank}"):
        validate(tuple(map(tuple, lists)), **size)
