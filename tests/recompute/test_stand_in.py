"""What stands in for a layer's forward: the layer's own stays, whatever it is, and comes back."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from tests.recompute.measuring import gradients, same
from tests.recompute.models import DEFAULT, toy

from evenload import EvenloadError
from evenload.recompute import apply, selective_checkpoint

torch.set_num_threads(1)


class Doubled:
    """A forward of one module's own, as libraries put it on (`accelerate`, adapters)."""

    def __init__(self, layer):
        self.inner = layer.forward

    def __call__(self, x):
        return 2 * self.inner(x)


def step(model, forward):
    model.zero_grad()
    forward().backward()
    return gradients(model)


def test_a_forward_that_a_layer_holds_itself_runs_and_comes_back():
    model, forward = toy()
    own = model.layers[1].forward = Doubled(model.layers[1])
    expected = step(model, forward)
    with apply(model, select=DEFAULT) as handle:
        for _ in range(3):
            assert same(step(model, forward), expected)
        assert handle.report().freed > 0
        copied = copy.deepcopy(model)
        restored = pickle.loads(pickle.dumps(model))
    assert model.layers[1].__dict__["forward"] is own
    assert "forward" not in model.layers[0].__dict__
    x = torch.randn(2, 16, 8)
    assert torch.equal(copied(x), model(x))
    assert torch.equal(restored(x), model(x))


def test_a_wrapper_that_came_later_goes_on_without_recomputation_when_the_handle_is_removed():
    model, forward = toy()
    handle = apply(model, select=DEFAULT)
    model.layers[0].forward = Doubled(model.layers[0])
    expected = step(model, forward)
    before = sum(handle.report().kinds[0].served.values())
    handle.remove()
    assert same(step(model, forward), expected)
    assert sum(handle.report().kinds[0].served.values()) == before


def test_a_copy_of_a_model_can_be_given_a_policy_of_its_own():
    model, forward = toy()
    expected = step(model, forward)
    handle = apply(model, select=DEFAULT)
    copied = copy.deepcopy(model)
    x = torch.randn(2, 16, 8)
    with apply(copied, select=[".*norm"]):
        copied(x).backward()
    assert not any("forward" in layer.__dict__ for layer in copied.modules())
    assert same(step(model, forward), expected)
    assert handle.report().freed > 0


def test_the_signature_stays():
    model, _ = toy()
    before = inspect.signature(model.layers[0].forward)
    with apply(model, select=DEFAULT):
        assert inspect.signature(model.layers[0].forward) == before


def test_a_layer_that_is_recomputed_is_not_made_ready_for_the_compiler():
    model, _ = toy()
    x = torch.randn(2, 16, 32)
    with apply(model, select=DEFAULT):
        with pytest.raises(EvenloadError, match="recomputed already"):
            selective_checkpoint(model.layers[0], DEFAULT, x)
        assert "forward" in model.layers[0].__dict__
    selective_checkpoint(model.layers[0], DEFAULT, x)


def test_a_copy_of_the_model_is_recomputed_with_its_own_weights():
    model, forward = toy()
    with apply(model, select=DEFAULT):
        forward().backward()
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        x = torch.randn(2, 16, 8)
        found = step(other, lambda: other(x))
        assert "forward" in other.layers[0].__dict__
    for layer in other.layers:
        del layer.__dict__["forward"]
    assert same(step(other, lambda: other(x)), found)


def test_a_model_can_be_saved_whole_and_its_weights_are_named_as_before():
    model, forward = toy()
    names, kinds = list(model.state_dict()), [type(one) for one in model.modules()]
    with apply(model, select=DEFAULT):
        forward().backward()
        assert list(model.state_dict()) == names
        assert [type(one) for one in model.modules()] == kinds
        assert [name for name, _ in model.named_modules()] == [name for name, _ in toy()[0].named_modules()]
        stored = io.BytesIO()
        torch.save(model, stored)
        loaded = pickle.loads(pickle.dumps(model))
    x = torch.randn(2, 16, 8)
    assert torch.equal(loaded(x), model(x))
    stored.seek(0)
    assert torch.equal(torch.load(stored, weights_only=False)(x), model(x))
