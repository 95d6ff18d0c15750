"""Custom operators among what else a program has: mixins, threads, autocast, transforms, compilation."""

import gc
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import NamedTuple

import pytest
import torch
from tests.recompute.test_bprop import ones
from torch import nn

from evenload.recompute import CustomOperator


class Product(CustomOperator):
    used_bprop_inputs = (0, 1)

    def forward(self, x, w):
        return x * w

    def bprop(self, x, w, out, dout):
        return dout * w, dout * x


class Times(nn.Module):
    """A plain module whose forward operators inherit."""

    def forward(self, x):
        return x * 2


def test_a_forward_from_a_plain_mixin_is_recorded_too():
    class Mixed(Times, CustomOperator):
        used_bprop_inputs = ()

        def bprop(self, x, out, dout):
            return dout * 9

    x = ones()
    Mixed()(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 9.0))


def test_one_operator_in_several_threads_at_once():
    together = Barrier(4)

    class Slow(CustomOperator):
        used_bprop_inputs = ()

        def forward(self, x):
            together.wait(timeout=20)  # all threads are in forward before any of them leaves it
            return x * 2

        def bprop(self, x, out, dout):
            return dout * 5

    operator = Slow()

    def gradient(_):
        x = ones()
        operator(x).sum().backward()
        return x.grad[0].item()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(gradient, range(8))) == [5.0] * 8


def test_a_default_counts_whether_it_is_given_or_not():
    class Scale(CustomOperator):
        used_bprop_inputs = (1,)

        def forward(self, x, scale=2.0):
            return x * scale

        def bprop(self, x, scale, out, dout):
            assert (x, out) == (None, None)
            return dout * scale, None

    for call in (Scale(), lambda x: Scale()(x, 2.0), lambda x: Scale()(x=x)):
        x = ones()
        call(x).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_what_is_not_listed_is_let_go_also_where_it_is_no_tensor():
    class Batch:
        def __init__(self):
            self.tensor = torch.ones(3)

    class Scale(CustomOperator):
        used_bprop_inputs = ()

        def forward(self, x, batch):
            return x * batch.tensor

        def bprop(self, x, batch, out, dout):
            assert batch is None
            return dout, None

    batch = Batch()
    alive = weakref.ref(batch)
    y = Scale()(ones(), batch)
    del batch
    gc.collect()
    assert alive() is None
    y.sum().backward()


def test_lists_named_tuples_and_dictionaries_keep_their_class():
    class Pair(NamedTuple):
        first: torch.Tensor
        second: torch.Tensor

    class Two(CustomOperator):
        def forward(self, parts):
            assert type(parts) is OrderedDict
            return Pair(parts["x"] * 2, parts["x"] * 3)

        def bprop(self, parts, out, dout):
            assert type(parts) is OrderedDict
            return {"x": dout[0] * 2 + dout[1] * 3}

    class Listed(CustomOperator):
        def forward(self, x):
            return [x * 2]

        def bprop(self, x, out, dout):
            return dout[0] * 2

    x = ones()
    pair = Two()(OrderedDict(x=x))
    (pair.first + pair.second).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 5.0))
    assert isinstance(Listed()(x), list)


@pytest.mark.parametrize("inside", [True, False])
def test_bprop_runs_under_the_autocast_of_forward_and_no_other(inside):
    class Linear(CustomOperator):
        def forward(self, x, w):
            return x @ w

        def bprop(self, x, w, out, dout):
            return dout @ w.t(), x.t() @ dout

    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        y = Linear()(x, w)
    plain = (x.bfloat16() @ w.bfloat16() if inside else x @ w).float()
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        got = torch.autograd.grad(y.float().square().sum(), [x, w])
    assert y.dtype is (torch.bfloat16 if inside else torch.float32)
    for one, expected in zip(got, torch.autograd.grad(plain.square().sum(), [x, w]), strict=True):
        assert torch.equal(one, expected)


def test_tensors_made_in_inference_mode_are_inputs_as_long_as_nothing_keeps_them():
    class Scale(CustomOperator):
        used_bprop_inputs = ()

        def forward(self, x, table):
            return x * table

        def bprop(self, x, table, out, dout):
            return dout, None

    with torch.inference_mode():
        table = torch.ones(3)
    x = ones()
    Scale()(x, table).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_function_transforms_go_through_bprop():
    operator, x, w = Product(), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    assert torch.equal(torch.func.grad(lambda one: operator(one, w).sum())(x), w)
    assert torch.equal(torch.func.jacrev(lambda one: operator(one, w))(x), torch.diag(w))
    per_sample = torch.func.vmap(torch.func.grad(lambda one, other: operator(one, other).sum()), in_dims=(0, None))
    assert torch.equal(per_sample(torch.stack([x, x]), w), torch.stack([w, w]))
    batch = torch.stack([x, x]).requires_grad_()
    torch.vmap(operator)(batch, torch.stack([w, w])).sum().backward()
    assert torch.equal(batch.grad, torch.stack([w, w]))


def test_a_compiled_model_gets_the_gradients_of_bprop():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.operator = nn.Linear(3, 3), Product()

        def forward(self, x):
            return self.operator(self.linear(x), x)

    model, x = Model(), torch.ones(2, 3)
    (expected,) = torch.autograd.grad(model(x).sum(), [model.linear.weight])
    compiled = torch.compile(model, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(x).sum(), [model.linear.weight])
    assert torch.allclose(got, expected)
