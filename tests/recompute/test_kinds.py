"""Layers of one kind are recorded once; another is compared with the record, and gets its own where it differs."""

from __future__ import annotations

import pytest
import torch
from tests.recompute import blocks
from tests.recompute.blocks import WIDE
from tests.recompute.following import EVERYTHING
from tests.recompute.measuring import backward, same
from tests.recompute.models import FAMILIES, toy
from torch import nn

from evenload.recompute import apply

torch.set_num_threads(1)


def served(handle):
    return [dict(state.served) for state in handle._states]


ALIKE = [{"recorded": 1, "hooks": 1}, {"compared": 1, "hooks": 1}, {"compared": 1, "hooks": 1}]


@pytest.mark.parametrize("name", ["toy", "views", "llama", "qwen3"])
def test_layers_of_one_kind_are_recorded_once(name):
    model, forward = {"toy": toy, "views": lambda: toy(blocks.Views), **FAMILIES}[name]()
    expected = backward(model, forward)
    with apply(model, select=EVERYTHING) as handle:
        for _ in range(2):
            assert same(backward(model, forward), expected)
        assert served(handle) == ALIKE
        assert len({id(state.last) for state in handle._states}) == 1


def test_layers_that_only_look_alike_get_plans_of_their_own():
    """Everything that layers hold is alike, but the code depends on which layer it is."""

    class Crossed(blocks.Ends):
        def __init__(self):
            super().__init__()
            self.c, self.layer_idx = nn.Linear(WIDE, WIDE), next(numbers)

        def middle(self, y):
            one, other = self.c(y).sin(), y.cos()
            one, other = (one, other) if self.layer_idx != 1 else (other, one)
            return (one * other.exp()).tanh() * one

    numbers = iter(range(3))
    model, forward = toy(Crossed)
    expected = backward(model, forward)
    with apply(model, select=EVERYTHING) as handle:
        for _ in range(3):
            assert same(backward(model, forward), expected)
        assert served(handle)[1:] == [{"kept": 1, "recorded": 1, "hooks": 1}, {"compared": 1, "hooks": 2}]


class Chooses(torch.autograd.Function):
    """Saves one of its inputs, which look alike."""

    @staticmethod
    def forward(ctx, x, y, first):
        ctx.save_for_backward(x if first else y)
        return x * 1.5 + y

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        return grad * saved, grad * saved, None


def test_a_custom_function_that_saves_something_else_in_another_layer_is_noticed():
    class Custom(blocks.Ends):
        def __init__(self):
            super().__init__()
            self.block_id = next(numbers)

        def middle(self, y):
            return Chooses.apply(y.sin(), y.cos(), self.block_id == 0)

    numbers = iter(range(3))
    model, forward = toy(Custom)
    expected = backward(model, forward)
    with apply(model, select=EVERYTHING) as handle:
        for _ in range(3):
            assert same(backward(model, forward), expected)
        assert handle._states[1].served["kept"] == 1
