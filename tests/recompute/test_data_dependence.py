"""Layers whose code depends on data are followed as long as they go the same way, and never guessed at."""

from __future__ import annotations

import pytest
import torch
from tests.recompute import blocks
from tests.recompute.following import backward, follows
from tests.recompute.measuring import same
from tests.recompute.models import FAMILIES, toy
from torch import nn
from torch.nn import functional

from evenload.recompute import apply

torch.set_num_threads(1)


@pytest.mark.parametrize("signs", [(1, -1, 1, -1, -1, 1), (1, 1, 1, -1)])
def test_code_that_depends_on_data_is_followed_only_as_long_as_it_goes_the_same_way(signs):
    model, _ = toy(blocks.Branch)
    x = torch.randn(2, 16, 8)
    current = []

    def forward():
        return model(current[-1])

    def turn(sign):
        current.append(sign * x)
        with torch.no_grad():
            for layer in model.layers:
                layer.a.bias.fill_(float(4 * sign))

    found = follows(model, forward, [lambda sign=sign: turn(sign) for sign in signs])
    assert found["mode"] + found["recorded"] + found["kept"] == len(signs)
    assert not found["hooks"]


@pytest.mark.parametrize("way", ["item", "list"])
def test_a_number_taken_from_a_tensor_is_code_that_depends_on_data(way):
    class Takes(blocks.Ends):
        def middle(self, y):
            y = functional.silu(y)
            largest = y.detach().abs().max()
            factor = largest.item() if way == "item" else largest.reshape(1).tolist()[0]
            return (y * factor).exp() * y

    model, _ = toy(Takes, layers=1)
    current = []
    changes = [lambda x=x: current.append(x) for x in torch.randn(4, 2, 16, 8)]
    found = follows(model, lambda: model(current[-1]), changes)
    assert not found["hooks"]


def test_what_comes_before_code_that_depends_on_data_is_followed_by_hooks():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.then = blocks.LayerNorm(), nn.Linear(32, 32)

        def forward(self, x):
            x = self.first(x)
            for row in range(int(x.detach().sum().item() > 0) + 1):
                x = x + self.then(x) * row
            return x

    model, _ = toy(Late)
    inputs = [torch.randn(2, 16, 8) * sign for sign in (1, -1, 1, 1, -1)]
    current = []
    changes = [lambda x=x: current.append(x) for x in inputs]
    found = follows(model, lambda: model(current[-1]), changes, patterns=[r"first\..*"])
    assert found == {"recorded": 1, "hooks": 4}


def test_experts_that_get_other_tokens_every_time():
    model, _ = FAMILIES["mixtral with a loop over experts"]()
    current = []
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randint(0, 128, (2, 32), generator=generator) for _ in range(4)]
    changes = [lambda ids=ids: current.append(ids) for ids in inputs]

    def forward():
        return model(input_ids=current[-1], labels=current[-1]).loss

    found = follows(model, forward, changes, patterns=[".*"])
    assert found["recorded"] >= 2
    model, _ = FAMILIES["mixtral with a loop over experts"]()
    found = follows(model, forward, changes, patterns=["self_attn", "input_layernorm"])
    assert found == {"recorded": 1, "hooks": 3}


def test_an_operator_that_gives_something_else_the_second_time_is_left_alone():
    from torch.library import custom_op

    calls = []

    @custom_op("evenload_tests::counting", mutates_args=())
    def counting(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * len(calls)

    counting.register_autograd(lambda ctx, grad: grad * 2)

    class Counts(blocks.Ends):
        def middle(self, y):
            z = functional.silu(y)
            return counting(z).sin().cos() * z

    model, forward = toy(Counts, layers=1)
    expected = []
    for _ in range(3):
        calls.clear()
        expected.append(backward(model, forward))
    with apply(model, select=["silu", "sin", "cos", "counting"]) as handle:
        for one in expected:
            calls.clear()
            assert same(backward(model, forward), one)
        dropped = handle._states[0].last.decision.dropped
        assert "silu" in dropped
        assert "cos" in dropped
        assert not any("counting" in name for name in dropped)
