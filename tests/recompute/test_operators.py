"""Operators that give something else when they run again, or nothing that could be dropped."""

from __future__ import annotations

import pytest
import torch
from tests.recompute.measuring import allocated, gradients, same
from tests.recompute.models import FAMILIES, toy
from torch import nn

from evenload.plan.policy import LayerPolicy
from evenload.recompute import apply

torch.set_num_threads(1)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)


class Conjugate(Base):
    """Autograd saves a lazy conjugate, in whose memory its source lies."""

    def forward(self, x):
        pair = torch.complex(self.one(x), self.two(x))
        return (pair * pair.conj()).real.sqrt()


class Negative(Base):
    """The imaginary part of a conjugate is a lazy negative."""

    def forward(self, x):
        pair = torch.complex(self.one(x), self.two(x).exp()).conj()
        return x + pair.imag * pair.imag.sin()


class Recurrent(nn.Module):
    """Returns less when autograd is off."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(32, 32, batch_first=True)

    def forward(self, x):
        return x + torch.nn.functional.silu(self.inner(x)[0])


@torch.library.custom_op("evenload_tests::only_once", mutates_args=())
def only_once(x: torch.Tensor, calls: list[int]) -> torch.Tensor:
    if not _allowed:
        raise ValueError("not again")
    return x.exp()


@only_once.register_fake
def _(x, calls):
    return torch.empty_like(x)


only_once.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)
_allowed = [True]


class Unrepeatable(Base):
    """Cannot be called outside of its layer's forward."""

    def forward(self, x):
        _allowed.append(True)
        try:
            return x + self.two(only_once(self.one(x), []))
        finally:
            _allowed.clear()


class Hidden:
    """Holds a tensor where nobody looks."""

    def __init__(self, size) -> None:
        self.inner = torch.linspace(0, 1, size)


class Reads(Base):
    """Computes with a tensor that is no argument, parameter or buffer, and that autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = Hidden(32)

    def forward(self, x):
        return x + self.two(torch.nn.functional.silu(self.one(x) + self.hidden.inner.cos()))


class ReadsLate(Reads):
    """The same, and autograd saves it once the code has looked at data."""

    def forward(self, x):
        table = self.hidden.inner
        y = torch.nn.functional.silu(self.one(x) + table)
        if y.sum().item() != 0:
            y = y * table
        return x + self.two(y)


def check(model, forward, policy, **options):
    """Gradients to the bit, and bytes as reported."""

    def step():
        model.zero_grad()
        forward().backward()
        return gradients(model)

    step()
    expected, plain = step(), allocated(forward)[0]
    with apply(model, policy, layers="layers", **options) as handle:
        for _ in range(3):
            assert same(step(), expected)
        assert plain - allocated(forward)[0] == handle.report().freed >= 0
        return handle.report()


@pytest.mark.parametrize("rehearse", [False, True])
@pytest.mark.parametrize("policy", [[".*", r".*\..*"], LayerPolicy(full=True)], ids=["select", "full"])
@pytest.mark.parametrize("make", [Conjugate, Negative, Recurrent, Unrepeatable, Reads, ReadsLate])
def test_gradients_and_bytes(make, policy, rehearse):
    check(*toy(make), policy, whole="engine", rehearse=rehearse)


def test_an_operator_on_a_conjugate_is_compared_as_any_other():
    report = check(*toy(Conjugate), [".*"])
    assert dict(report.kinds[0].served) == {"recorded": 1, "compared": 2, "hooks": 9}


def test_a_hugging_face_model_that_goes_on_from_its_cache():
    model, _ = FAMILIES["llama"](use_cache=True)
    ids = torch.randint(0, 128, (2, 12))

    def step():
        model.zero_grad()
        found = model(input_ids=ids[:, :6], use_cache=True)
        loss = found.logits.square().mean()
        for at in range(6, 10):
            found = model(input_ids=ids[:, at : at + 1], past_key_values=found.past_key_values)
            loss = loss + found.logits.square().mean()
        loss.backward()
        return gradients(model)

    expected = step()
    with apply(model, select=[".*", r".*\..*"]) as handle:
        for _ in range(3):
            assert same(step(), expected)
        assert handle.report().freed > 0


def test_a_model_on_the_meta_device_runs_there():
    with torch.device("meta"):
        model, _ = toy()
    x = torch.empty(2, 16, 8, device="meta")
    with apply(model, ["mlp"]) as handle:
        for _ in range(2):
            model(x).backward()
        on_meta = handle.report()
    real, forward = toy()
    with apply(real, ["mlp"]) as handle:
        forward().backward()
        assert on_meta.freed == handle.report().freed > 0
