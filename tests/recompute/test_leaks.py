from __future__ import annotations

import gc

import pytest
import torch
from tests.recompute.measuring import allocated
from tests.recompute.models import DEFAULT, llama, toy

from evenload.recompute import apply

torch.set_num_threads(1)


@pytest.fixture
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("make", [toy, llama])
@pytest.mark.parametrize("patterns", [DEFAULT, (".*norm",), ("mlp",), (".*",)])
def test_nothing_stays_behind_a_step(make, patterns, without_collector):
    model, forward = make()

    def step() -> None:
        model.zero_grad(set_to_none=False)
        forward().backward()

    step()
    with apply(model, select=patterns):
        assert [allocated(step)[0] for _ in range(4)] == [0, 0, 0, 0]


def test_a_forward_whose_result_is_thrown_away_leaves_nothing(without_collector):
    _, forward = toy()
    model, forward = toy()
    with apply(model, select=DEFAULT):
        for _ in range(3):
            left, _, _ = allocated(lambda: float(forward().detach()))
            assert left == 0
