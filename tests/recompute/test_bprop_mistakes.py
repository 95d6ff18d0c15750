"""Custom operators whose definition makes no sense are refused where they are called, with what to do."""

import pytest
import torch
from tests.recompute.test_bprop import double, ones
from torch import nn

from evenload.errors import EvenloadError
from evenload.recompute import CustomOperator
from evenload.recompute.bprop import kept_positions


@pytest.mark.parametrize(
    ("used", "says"),
    [
        ([4], "has no argument 4: it gets 2 inputs, out and dout"),
        ([-1], "has no argument -1"),
        ([0, True], "true is no position"),
        (["out"], "'out' is no position"),
        ([1.0], "1.0 is no position"),
        (2, "is 2, not a list"),
        ("0", "not a list of positions"),
        ({0}, "not a list of positions"),
    ],
)
def test_positions_that_do_not_exist_are_errors_in_forward(used, says):
    with pytest.raises(EvenloadError, match=says.replace("(", "\\(")):
        double(used=used)(ones(), ones())


def test_positions_are_counted_by_inputs():
    assert kept_positions(None, 2) == {0, 1, 2}
    assert kept_positions([0, 3], 2) == {0}
    assert kept_positions([], 0) == set()
    with pytest.raises(EvenloadError):
        kept_positions([2], 0)


def test_a_parameter_that_would_silently_get_no_gradient_is_refused():
    class Linear(CustomOperator):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x, weight=None):
            return x * (self.weight if weight is None else weight)

        def bprop(self, x, weight, out, dout):
            return dout * weight, dout * x

    with pytest.raises(EvenloadError, match=r"weight is a parameter of Linear and no input(.|\n)*operator\.weight"):
        Linear()(ones())
    for passed in (lambda weight: weight, lambda weight: weight.view(3), lambda weight: weight.double().float()):
        operator = Linear()
        operator(ones(), passed(operator.weight)).sum().backward()
        assert torch.equal(operator.weight.grad, torch.ones(3))
    frozen = Linear().requires_grad_(False)
    frozen(ones())


@pytest.mark.parametrize(
    ("forward", "bprop", "says"),
    [
        (lambda x: x * 2, lambda x, out, dout: (dout, dout), "returned 2 gradients for 1 input"),
        (lambda x: x * 2, lambda x, out, dout: (), "returned 0 gradients for 1 input"),
        (lambda x: "no tensor", None, "returned 'no tensor', and no tensor"),
        (lambda x: x.mul_(2) * 1, None, "changed an input in place and did not return it"),
    ],
)
def test_definitions_that_make_no_sense_are_named(forward, bprop, says):
    class Wrong(CustomOperator):
        def forward(self, x):
            return forward(x)

        def bprop(self, x, out, dout):
            return bprop(x, out, dout)

    with pytest.raises(EvenloadError, match=says):
        Wrong()(ones() * 1).sum().backward()


def test_an_operator_without_bprop_is_refused_in_forward():
    class Half(CustomOperator):
        def forward(self, x):
            return x / 2

    with pytest.raises(EvenloadError, match="Half has no bprop"):
        Half()(ones())
    with torch.no_grad():
        Half()(ones())


def test_arguments_that_only_have_names_are_refused():
    class Named(CustomOperator):
        def forward(self, x, *, scale=1):
            return x * scale

        def bprop(self, x, out, dout):
            return dout

    with pytest.raises(EvenloadError, match="scale can only be given by name"):
        Named()(ones(), scale=2)


def test_gradients_of_the_wrong_shape_are_refused():
    class Wrong(CustomOperator):
        def forward(self, x):
            return x * 2

        def bprop(self, x, out, dout):
            return dout[:1]

    with pytest.raises(RuntimeError, match="invalid gradient"):
        Wrong()(ones()).sum().backward()


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (lambda x: (x * 2, (x * 3,)), "tensors inside of other values, and they would get no gradient"),
        (lambda x: (x * 2, {"more": [x * 3]}), "tensors inside of other values"),
        (lambda x: {"out": x * 2}, "and no tensor"),
    ],
)
def test_outputs_that_autograd_would_not_see_are_refused(forward, says):
    class Wrong(CustomOperator):
        def forward(self, x):
            return forward(x)

        def bprop(self, x, out, dout):
            return dout

    with pytest.raises(EvenloadError, match=says):
        Wrong()(ones())


@pytest.mark.parametrize("gradient", [2.0, "none", {"a": 1}])
def test_a_gradient_that_is_no_tensor_is_named(gradient):
    class Wrong(CustomOperator):
        def forward(self, x):
            return x * 2

        def bprop(self, x, out, dout):
            return gradient

    with pytest.raises(EvenloadError, match=r"gradient of input 0: .* is no tensor"):
        Wrong()(ones()).sum().backward()


def test_a_bprop_that_does_not_take_what_it_gets_is_refused_before_backward():
    class Short(CustomOperator):
        def forward(self, x, scale=2.0):
            return x * scale

        def bprop(self, x, out, dout):
            return dout * 2

    with pytest.raises(EvenloadError, match="does not take what it gets: 2 inputs, out and dout"):
        Short()(ones())
