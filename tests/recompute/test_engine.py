from __future__ import annotations

import pytest
import torch
from tests.recompute.measuring import Operators, allocated, gradients, same
from tests.recompute.models import DEFAULT, llama, toy

from evenload.recompute import apply

torch.set_num_threads(1)


def backward(model, forward, runs: int = 1):
    model.zero_grad()
    for _ in range(runs):
        forward().backward()
    return gradients(model)


@pytest.mark.parametrize("make", [toy, llama])
def test_gradients_are_those_without_recomputation_to_the_bit(make):
    model, forward = make()
    expected = backward(model, forward)
    with apply(model, select=DEFAULT):
        for _ in range(3):
            assert same(backward(model, forward), expected)
    assert same(backward(model, forward), expected)


@pytest.mark.parametrize("make", [toy, llama])
def test_the_operators_named_run_again_in_backward_and_no_others(make):
    model, forward = make()
    with apply(model, select=DEFAULT):
        forward().backward()
        loss = forward()
        with Operators() as ours:
            loss.backward()
    loss = forward()
    with Operators() as plain:
        loss.backward()
    extra = ours.counts - plain.counts
    assert dict(extra) == {"silu": 3, "mul": 3}


@pytest.mark.parametrize("make", [toy, llama])
@pytest.mark.parametrize("patterns", [DEFAULT, (".*norm",), ("mlp",)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_freed_are_the_bytes_predicted(make, patterns, dtype):
    model, forward = make(dtype=dtype)
    plain, _, _ = allocated(forward)
    with apply(model, select=patterns) as handle:
        recorded, _, _ = allocated(forward)
        followed, _, _ = allocated(forward)
        freed = sum(state.last.decision.freed for state in handle._states)
    assert freed > 0
    assert plain - recorded == freed
    assert plain - followed == freed
