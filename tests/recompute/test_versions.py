"""Torch does not look for changes in place under saved-tensor hooks: the engine does."""

from __future__ import annotations

import pytest
import torch
from tests.recompute import blocks
from tests.recompute.models import DEFAULT, FAMILIES, toy
from torch.nn import functional

from evenload.errors import EvenloadError
from evenload.recompute import apply

torch.set_num_threads(1)


class Leaky(blocks.Ends):
    """Hands out what it computes, so that somebody may change it."""

    def middle(self, y):
        self.first = y
        self.second = functional.silu(y)
        self.third = self.second * y
        self.fourth = self.third.exp()
        return self.fourth


def run(change, patterns, *, warm, layer=Leaky):
    model, forward = toy(layer, layers=1)
    with apply(model, select=patterns):
        if warm:
            forward().backward()
        loss = forward()
        with torch.no_grad():
            change(model.layers[0])
        loss.backward()


@pytest.mark.parametrize("warm", [False, True], ids=["recorded", "followed"])
def test_a_kept_tensor_that_was_changed_is_named(warm):
    with pytest.raises(RuntimeError, match=r"a\.linear\.addmm was changed in place.*version 1, expected 0"):
        run(lambda layer: layer.first.add_(1), ["nothing"], warm=warm)
    with pytest.raises(EvenloadError, match=r"exp was changed in place"):
        run(lambda layer: layer.fourth.mul_(2), ["nothing"], warm=warm)


class Wide(blocks.Ends):
    """Nothing needs the first result for backward, unless its wider copy is computed again."""

    def middle(self, y):
        self.first = y
        return y.double().sin().to(y.dtype)


@pytest.mark.parametrize("warm", [False, True], ids=["recorded", "followed"])
def test_a_tensor_that_recomputation_starts_from_is_named(warm):
    message = r"a\.linear\.addmm, from which recomputation starts, was changed in place.*version 1, expected 0"
    with pytest.raises(RuntimeError, match=message):
        run(lambda layer: layer.first.add_(1), ["double"], warm=warm, layer=Wide)


def test_a_dropped_tensor_may_be_changed_for_nobody_looks_at_it_again():
    run(lambda layer: layer.second.add_(1), ["silu", "mul"], warm=True)


@pytest.mark.parametrize("make", [toy, FAMILIES["llama"]])
def test_a_weight_that_was_changed_between_forward_and_backward_is_named(make):
    model, forward = make()
    with apply(model, select=DEFAULT):
        forward().backward()
        loss = forward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "down_proj" in name:
                    parameter.mul_(0.9)
        with pytest.raises(RuntimeError, match=r"mlp\.down_proj\.weight was changed in place"):
            loss.backward()


def test_without_recomputation_torch_says_the_same():
    model, forward = toy(Leaky, layers=1)
    loss = forward()
    with torch.no_grad():
        model.layers[0].first.add_(1)
    with pytest.raises(RuntimeError, match="version 1; expected version 0"):
        loss.backward()
