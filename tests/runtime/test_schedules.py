"""Schedules by name, and their rules: the same as PyTorch's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from evenload.errors import EvenloadError
from evenload.runtime.schedules import SCHEDULES, torch_schedule


def stand_in(index: int, pp: int, chunks: int) -> SimpleNamespace:
    return SimpleNamespace(
        stage_index=index,
        num_stages=chunks,
        group_size=pp,
        group_rank=0,
        is_first=index == 0,
        is_last=index == chunks - 1,
        submod=SimpleNamespace(modules=list),
    )


def torch_accepts(name: str, pp: int, interleave: int, micro_batches: int) -> bool:
    kind = SCHEDULES[name]
    chunks = pp * interleave
    back = [chunks - 1] if kind.style == "v" else [pp * chunk for chunk in range(1, interleave)]
    stages = [stand_in(index, pp, chunks) for index in ([0, *back] if interleave > 1 else [0])]
    try:
        get_schedule_class(kind.torch_name)(stages if kind.several else stages[0], micro_batches, loss_fn=None)
    except (ValueError, AssertionError):
        return False
    return kind.several or interleave == 1


def accepts(name: str, pp: int, interleave: int, micro_batches: int) -> bool:
    try:
        torch_schedule(name, pp=pp, interleave=interleave, micro_batches=micro_batches)
    except EvenloadError as error:
        return error.fix is None  # every rule says what to do
    return True


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("interleave", [1, 2, 3])
def test_the_rules_are_those_of_torch(name, pp, interleave):
    for micro_batches in range(1, 14):
        if name == "1f1b" and interleave > 1:
            continue  # means interleaved_1f1b
        assert accepts(name, pp, interleave, micro_batches) == torch_accepts(name, pp, interleave, micro_batches)


def test_one_f_one_b_with_several_chunks_is_interleaved():
    assert torch_schedule("1F1B", pp=2, interleave=2, micro_batches=4).name == "interleaved_1f1b"


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "zero-bubble-v", "zbv"])
def test_schedules_answer_to_the_names_of_frameworks(name):
    assert torch_schedule(name, pp=2, interleave=2, micro_batches=4).name == "zbv"


@pytest.mark.parametrize("name", ["dualpipe", "", None, 7])
def test_a_schedule_that_is_not_there_is_refused(name):
    with pytest.raises(EvenloadError, match="has no schedule"):
        torch_schedule(name, pp=2, interleave=2, micro_batches=4)
