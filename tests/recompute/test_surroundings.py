"""Where recomputation cannot work it says so, with one line that helps."""

from __future__ import annotations

import pytest
import torch
from tests.recompute.models import DEFAULT, FAMILIES, toy
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from evenload import EvenloadError
from evenload.recompute import apply

torch.set_num_threads(1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_inside_a_checkpoint(reentrant):
    model, _ = toy()
    x = torch.randn(2, 16, 8, requires_grad=True)
    with apply(model, select=DEFAULT), pytest.raises(EvenloadError, match=r"'layers.0' is checkpointed already"):
        checkpoint(model, x, use_reentrant=reentrant).backward()


def test_a_hugging_face_model_with_gradient_checkpointing_on():
    model, forward = FAMILIES["llama"]()
    model.gradient_checkpointing_enable()
    with pytest.raises(EvenloadError, match=r"call `model.gradient_checkpointing_disable\(\)` first"):
        apply(model, select=DEFAULT)
    model.gradient_checkpointing_disable()
    with apply(model, select=DEFAULT):
        forward().backward()
        model.gradient_checkpointing_enable()
        with pytest.raises(EvenloadError, match="gradient_checkpointing_disable"):
            forward()
    model.gradient_checkpointing_disable()
    forward().backward()


def test_a_checkpoint_inside_a_layer_works_and_keeps_nothing_inside():
    from tests.recompute.measuring import allocated, gradients, same

    model, forward = toy()
    inner = [layer.mlp for layer in model.layers]
    plain = [mlp.forward for mlp in inner]
    for mlp, own in zip(inner, plain, strict=True):
        mlp.forward = lambda x, own=own: checkpoint(own, x, use_reentrant=False)
    forward().backward()
    expected, kept = gradients(model), allocated(forward)[0]
    with apply(model, select=[".*norm"]) as handle:
        for _ in range(3):
            model.zero_grad()
            forward().backward()
            assert same(gradients(model), expected)
        assert kept - allocated(forward)[0] == handle.report().freed > 0


@pytest.mark.parametrize("transform", ["grad", "vjp", "vmap", "jvp"])
def test_transforms_of_torch_func(transform):
    model, _ = toy()
    parameters = dict(model.named_parameters())
    x = torch.randn(2, 16, 8)

    def loss(given):
        return torch.func.functional_call(model, given, (x,))

    calls = {
        "grad": lambda: torch.func.grad(loss)(parameters),
        "vjp": lambda: torch.func.vjp(loss, parameters),
        "vmap": lambda: torch.func.vmap(model)(x[:, None]),
        "jvp": lambda: torch.func.jvp(model, (x,), (x,)),
    }
    with apply(model, select=DEFAULT), pytest.raises(EvenloadError, match=r"torch\.func"):
        calls[transform]()


def test_saved_tensor_hooks_that_are_switched_off():
    model, forward = toy()
    off = disable_saved_tensors_hooks("not here")
    with (
        apply(model, select=DEFAULT),
        off,
        pytest.raises(EvenloadError, match=r"switched off round layer .*: not here"),
    ):
        forward()


def test_hooks_round_the_model_would_see_nothing_of_what_is_kept():
    model, forward = toy()
    outer = torch.autograd.graph.save_on_cpu()
    with apply(model, select=DEFAULT), outer, pytest.raises(EvenloadError, match="saved-tensor hooks"):
        forward()


def test_a_second_recomputation_of_the_same_layers():
    model, _ = toy()
    with apply(model, select=DEFAULT), pytest.raises(EvenloadError, match="recomputed already"):
        apply(model, select=DEFAULT)
    apply(model, select=DEFAULT).remove()
