"""What a model does beside a layer in the middle is in the answer, though that layer is not among those that run."""

import numpy as np
import pytest
import torch
from tests.record.events import signed_events
from torch import nn
from torch.utils.checkpoint import checkpoint

import evenload
from evenload.errors import EvenloadError
from evenload.record.dryrun import real_run

torch.set_num_threads(1)
COUNT = 14


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(COUNT))
        self.adapter = nn.Linear(16, 16)
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        return self.head(self.run(x))

    def run(self, x):
        for number, layer in enumerate(self.layers):
            x = self.after(number, layer(self.before(number, x)))
        return x

    def before(self, _number, x):
        return x

    def after(self, _number, x):
        return x


def adapted(at):
    class Adapted(Stack):
        def after(self, number, x):
            return x + self.adapter(x) if number == at else x

    return Adapted


class Collecting(Stack):
    """Returns the hidden state of one layer beside the last."""

    def forward(self, x):
        self.kept = []
        return self.head(self.run(x)), *self.kept

    def after(self, number, x):
        if number == 6:
            self.kept.append(x)
        return x


class Stepping(Stack):
    """A residual around every four layers."""

    def run(self, x):
        before = x
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number % 4 == 3:
                x = before = x + before
        return x


class Ordered(Stack):
    order = staticmethod(range)

    def run(self, x):
        for number in self.order(len(self.layers)):
            x = self.layers[number](x)
        return x


class EvenFirst(Ordered):
    order = staticmethod(lambda count: [*range(0, count, 2), *range(1, count, 2)])


class Backwards(Ordered):
    order = staticmethod(lambda count: reversed(range(count)))


class Exchanged(Ordered):
    order = staticmethod(lambda count: [6 if n == 5 and count > 6 else 5 if n == 6 else n for n in range(count)])


class Skipping(Ordered):
    order = staticmethod(lambda count: [n for n in range(count) if n != 6])


class Fewer(Stack):
    """From one layer on, only half of the tokens go through."""

    def before(self, number, x):
        return x[:2] if number == 6 else x


class Checkpointed(Stack):
    def run(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


ODD = {
    "an adapter at one layer": adapted(7),
    "an adapter where the run of few has its last": adapted(3),
    "an adapter after the last layer": adapted(COUNT - 1),
    "the hidden state of one layer": Collecting,
    "a residual every four layers": Stepping,
    "two layers exchanged": Exchanged,
    "one layer left out": Skipping,
    "fewer tokens from one layer on": Fewer,
}
ALIKE = {"layers in a row": Stack, "layers backwards": Backwards, "checkpoints": Checkpointed}


def dry(build, **options):
    return evenload.dryrun(build, inputs=torch.empty(4, 16), **options)


@pytest.mark.parametrize("name", [*ODD, *ALIKE, "even layers first"])
def test_the_answer_is_that_of_all_layers(name):
    build = (ODD | ALIKE | {"even layers first": EvenFirst})[name]
    np.testing.assert_array_equal(signed_events(dry(build)), signed_events(dry(build, full=True)))


@pytest.mark.parametrize("name", ODD)
def test_what_the_run_of_few_does_not_show_is_said(name):
    (notice,) = dry(ODD[name]).notices
    assert notice.fact.startswith("all layers ran, because the model treats layer ")


@pytest.mark.parametrize("name", ALIKE)
def test_where_layers_are_treated_alike_few_run(name):
    ledger = dry(ALIKE[name])
    assert [mark.text for mark in ledger.marks if mark.text] == [f"traced layers 0, 1, 12, 13 of {COUNT}"]
    assert not ledger.notices


def test_the_layer_that_is_treated_otherwise_is_named():
    (notice,) = dry(adapted(7)).notices
    assert "treats layer 7 in" in notice.fact


def test_a_step_of_the_users_own_is_looked_at_too():
    def step(model, batch, optimizer):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    assert "treats layer 7" in dry(adapted(7), step=step).notices[0].fact
    assert not dry(Stack, step=step).notices


def test_a_model_that_does_not_run_with_stand_ins_runs_whole():
    class Exacting(Stack):
        def after(self, number, x):
            if x.grad_fn is None:
                raise ValueError("not computed")
            return x

    ledger = dry(Exacting)
    np.testing.assert_array_equal(signed_events(ledger), signed_events(dry(Exacting, full=True)))
    assert [notice.fact for notice in ledger.notices] == [
        "all layers ran, because the model does not run without its layers: ValueError"
    ]


def test_few_real_layers_are_not_composed_where_they_do_not_stand_for_all():
    inputs = torch.ones(4, 16)
    real_run(Stack, inputs=inputs, count=4)
    for build in (adapted(7), Skipping):
        with pytest.raises(EvenloadError, match="few layers do not stand for all: the model treats layer 7") as caught:
            real_run(build, inputs=inputs, count=4)
        assert "--real without a number" in caught.value.fix
        assert real_run(build, inputs=inputs, steps=1)


def test_classes_of_layers_are_left_as_they_were():
    before = (nn.Sequential.__call__, "__call__" in vars(nn.Sequential), torch.autograd.backward)
    dry(adapted(7))
    assert (nn.Sequential.__call__, "__call__" in vars(nn.Sequential), torch.autograd.backward) == before
