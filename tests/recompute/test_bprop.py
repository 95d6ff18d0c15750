"""Custom operators keep what their bprop uses and nothing else."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from evenload.recompute import CustomOperator

MIB8 = (1024, 2048)
"""Shape of 8 MiB of fp32."""


def double(*, used, inputs=2):
    """An operator that multiplies its inputs and notes what bprop gets."""

    class Product(CustomOperator):
        def __init__(self):
            super().__init__()
            if used != "not set":
                self.used_bprop_inputs = used
            self.got = None

        def forward(self, *factors):
            return factors[0] * factors[1] if len(factors) == 2 else factors[0] * 2

        def bprop(self, *arguments):
            self.got = arguments
            dout = arguments[-1]
            return tuple(dout.clone() for _ in range(len(arguments) - 2))

    return Product()


def ones(*shape):
    return torch.ones(shape or (3,), requires_grad=True)


@pytest.mark.parametrize(
    ("used", "there"),
    [
        ("not set", [True, True, True]),
        (None, [True, True, True]),
        ([], [False, False, False]),
        ((), [False, False, False]),
        ([0], [True, False, False]),
        ([1], [False, True, False]),
        ([2], [False, False, True]),
        ([3], [False, False, False]),
        ([0, 2], [True, False, True]),
        ((0, 1, 2, 3), [True, True, True]),
        ([1, 1], [False, True, False]),
    ],
)
def test_what_is_listed_arrives_and_the_rest_is_none_and_dout_always_comes(used, there):
    operator = double(used=used)
    operator(ones(), ones()).sum().backward()
    *kept, dout = operator.got
    assert [one is not None for one in kept] == there
    assert torch.equal(dout, torch.ones(3))


def test_for_one_input_position_two_is_dout_as_in_the_documentation():
    """The reduce-scatter of the checklist lists [2] and keeps nothing."""
    operator = double(used=[2], inputs=1)
    operator(ones()).sum().backward()
    assert operator.got[:2] == (None, None)


# Memory


class Scale(CustomOperator):
    """Needs nothing in backward."""

    def forward(self, x):
        return x * 2

    def bprop(self, x, out, dout):
        return dout * 2


def bytes_kept(used):
    """Bytes of the storages that one call keeps alive beyond its output: saved tensors, and the input itself."""
    operator = Scale()
    operator.used_bprop_inputs = used
    x = torch.ones(MIB8, requires_grad=True) * 1
    storage = weakref.ref(x.untyped_storage())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.nbytes) or tensor.detach(), lambda t: t
    ):
        y = operator(x)
    del x
    gc.collect()
    alive = storage() is not None
    return sum(saved), 8 * 2**20 if alive else 0, y


def test_eight_mebibytes_are_kept_or_none():
    assert bytes_kept(None)[:2] == (16 * 2**20, 8 * 2**20)  # the input and the output, which is alive anyway
    assert bytes_kept([])[:2] == (0, 0)
    assert bytes_kept([2])[:2] == (0, 0)
    assert bytes_kept([0])[:2] == (8 * 2**20, 8 * 2**20)
    assert bytes_kept([1])[:2] == (8 * 2**20, 0)


def test_a_saved_output_makes_no_cycle_when_backward_never_runs():
    gc.collect()
    gc.disable()
    try:
        y = Scale()(torch.ones(MIB8, requires_grad=True))
        storage = weakref.ref(y.untyped_storage())
        del y
        assert storage() is None
    finally:
        gc.enable()


# Autograd


class Power(CustomOperator):
    used_bprop_inputs = (0, 2)

    def forward(self, x, exponent):
        return x**exponent

    def bprop(self, x, exponent, out, dout):
        assert exponent is None
        return dout * 2 * out / x, None


def test_gradients_are_right_also_for_arguments_that_are_no_tensors():
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    Power()(x, 2).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
    Power()(x, exponent=2).sum().backward()
    assert torch.equal(x.grad, 4 * x.detach())


def test_a_saved_tensor_that_is_changed_in_place_is_an_error_and_a_dropped_one_is_not():
    x = ones() * 1
    y = double(used=[0])(x, ones())
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    x = ones() * 1
    y = double(used=[1])(x, ones())
    x.add_(1)
    y.sum().backward()


def test_hooks_see_every_kept_tensor_once():
    class Two(CustomOperator):
        used_bprop_inputs = (0, 2)

        def forward(self, x, w):
            return x * w, x + w

        def bprop(self, x, w, out, dout):
            assert w is None
            assert len(out) == len(dout) == 2
            return dout[0] + dout[1], None

    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: packed.append(one) or one.detach(), lambda one: one):
        first, second = Two()(ones(), ones())
    (first + second).sum().backward()
    assert len(packed) == 3


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("used", [None, [], [0, 1]])
def test_under_checkpointing_nothing_is_kept_and_gradients_are_the_same(used, reentrant):
    class Sine(CustomOperator):
        used_bprop_inputs = used

        def forward(self, x):
            return x.sin() if used is None or used else x * 3

        def bprop(self, x, out, dout):
            return dout * x.cos() if x is not None else dout * 3

    operator = Sine()
    x = torch.randn(64, 64, requires_grad=True)
    operator(x).square().sum().backward()
    expected, x.grad = x.grad, None
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: packed.append(one) or one, lambda one: one):
        y = checkpoint(lambda value: operator(value).square(), x, use_reentrant=reentrant)
    assert len(packed) <= 1  # the input of the region
    y.sum().backward()
    assert torch.equal(x.grad, expected)


def test_gradients_of_gradients_are_those_of_bprop():
    class Cube(CustomOperator):
        used_bprop_inputs = (0,)

        def forward(self, x):
            return x**3

        def bprop(self, x, out, dout):
            return 3 * x**2 * dout

    x = torch.tensor([2.0], requires_grad=True, dtype=torch.float64)
    (first,) = torch.autograd.grad(Cube()(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert (first.item(), second.item()) == (12.0, 12.0)
    assert torch.autograd.gradcheck(Cube(), (torch.randn(3, dtype=torch.float64, requires_grad=True),))


def test_nested_arguments_get_nested_gradients():
    class Sum(CustomOperator):
        used_bprop_inputs = (0,)

        def forward(self, parts, scale):
            return (parts["a"] + parts["b"][0]) * scale

        def bprop(self, parts, scale, out, dout):
            assert torch.equal(parts["b"][0], torch.ones(3))
            return {"a": dout, "b": [dout * 2, None]}, None

    a, b = ones(), ones()
    Sum()({"a": a, "b": [b, 5]}, 1.0).sum().backward()
    assert torch.equal(b.grad, torch.full((3,), 2.0))
    assert torch.equal(a.grad, torch.ones(3))


def test_outputs_that_are_unused_or_have_no_gradient():
    seen = []

    class Several(CustomOperator):
        used_bprop_inputs = ()

        def forward(self, x):
            return x * 2, x * 3, x > 0, None

        def bprop(self, x, out, dout):
            seen.append(dout)
            return dout[0] * 2 + dout[1] * 3

    x = ones()
    first, _, positive, nothing = Several()(x)
    assert positive.dtype is torch.bool
    assert nothing is None
    first.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert torch.equal(seen[0][1], torch.zeros(3))


def test_a_returned_input_and_one_that_is_changed_and_returned():
    class Same(CustomOperator):
        used_bprop_inputs = ()

        def forward(self, x):
            return x

        def bprop(self, x, out, dout):
            return dout * 7

    x = ones()
    Same()(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 7.0))

    class Clamp(CustomOperator):
        used_bprop_inputs = ()

        def forward(self, x):
            return x.mul_(2)

        def bprop(self, x, out, dout):
            return dout * 2

    x = ones()
    h = x * 1
    y = Clamp()(h)
    (y + h).sum().backward()  # h is y now
    assert torch.equal(x.grad, torch.full((3,), 4.0))


def test_forward_is_a_plain_function_without_gradients():
    operator = Scale()
    with torch.no_grad():
        assert not operator(ones()).requires_grad
    with torch.inference_mode():
        assert operator(torch.ones(3)).sum() == 6
    assert not operator(torch.ones(3)).requires_grad


def test_a_subclass_may_call_the_forward_of_its_base():
    class Triple(Scale):
        def forward(self, x):
            return super().forward(x) * 1.5

        def bprop(self, x, out, dout):
            return dout * 3

    x = ones()
    Triple()(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))


def test_modules_hooks_and_compilation_of_the_module_tree_work_as_ever():
    calls = []
    model = nn.Sequential(nn.Linear(3, 3), Scale())
    model[1].register_forward_hook(lambda *_: calls.append("hook"))
    model(torch.ones(2, 3)).sum().backward()
    assert calls == ["hook"]
    assert model[0].weight.grad is not None
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
