"""A plan is followed only by forwards that do what the recorded one did: any other is recorded, or keeps everything."""

from __future__ import annotations

import pytest
import torch
from tests.recompute import blocks
from tests.recompute.following import EVERYTHING, backward, follows
from tests.recompute.measuring import allocated, same
from tests.recompute.models import DEFAULT, FAMILIES, toy
from torch import nn
from torch.nn import functional

from evenload.recompute import apply

torch.set_num_threads(1)


def test_other_shapes_are_recorded_each_once():
    model, _ = toy()
    inputs = [torch.randn(2, length, 8) for length in (16, 8, 16, 8, 16)]
    current = []

    def forward():
        return model(current[-1])

    changes = [lambda x=x: current.append(x) for x in inputs]
    found = follows(model, forward, changes)
    assert found == {"recorded": 2, "hooks": 3}


def test_many_shapes_do_not_fill_the_memory_with_plans():
    model, _ = toy(layers=1)
    with apply(model, select=DEFAULT) as handle:
        for length in range(1, 30):
            model(torch.randn(1, length, 8)).backward()
        assert len(handle._states[0].plans) == 16


def test_training_and_evaluation_are_different_forwards():
    model, forward = toy(blocks.Dropout)
    follows(model, forward, [model.train, model.eval, model.train, model.eval, model.train])


def test_frozen_and_trainable_parameters_are_different_forwards():
    model, forward = toy()

    def freeze(flag):
        for layer in model.layers:
            layer.mlp.gate_proj.weight.requires_grad_(flag)

    follows(model, forward, [lambda: freeze(True), lambda: freeze(False), lambda: freeze(True), lambda: freeze(False)])


def test_an_input_with_and_without_gradient_are_different_forwards():
    model, forward = toy()
    kinds = [True, False, True, False]
    follows(model, forward, [lambda flag=flag: model.first.requires_grad_(flag) for flag in kinds])


def test_autocast_is_a_different_forward():
    model, plain = toy()
    on = [False]

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=on[0]):
            return plain()

    follows(model, forward, [lambda flag=flag: on.__setitem__(0, flag) for flag in (False, True, False, True)])


class Scaled(blocks.Ends):
    """Everything that a layer can hold and that changes what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.table, self.function = 2.0, {"power": [2]}, functional.silu
        self.settings = type("Settings", (), {})()
        self.settings.shift = 1.0
        self.act = nn.Tanh()

    def middle(self, y):
        y = self.act(self.function(y * self.scale) + self.settings.shift)
        return y ** self.table["power"][0] * y


@pytest.mark.parametrize("what", ["scale", "shift", "power", "function", "module"])
def test_what_a_layer_holds_is_looked_at(what):
    model, forward = toy(Scaled)

    def change(first):
        for layer in model.layers:
            if what == "scale":
                layer.scale = 2.0 if first else 3.0
            elif what == "shift":
                layer.settings.shift = 1.0 if first else 5.0
            elif what == "power":
                layer.table["power"][0] = 2 if first else 3
            elif what == "function":
                layer.function = functional.silu if first else functional.mish
            else:
                layer.act = nn.Tanh() if first else nn.Sigmoid()

    kinds = [True, False, True, False]
    found = follows(model, forward, [lambda kind=kind: change(kind) for kind in kinds])
    assert not found["kept"]


def test_layers_with_other_constants_have_other_plans():
    model, forward = toy(Scaled)
    for number, layer in enumerate(model.layers):
        layer.scale = 1.0 + number
    follows(model, forward, [lambda: None] * 3)


@pytest.mark.parametrize("make", [toy, FAMILIES["llama"]])
def test_hooks_on_modules_inside_a_layer_are_looked_at(make):
    model, forward = make()
    inner = [module for module in model.modules() if type(module).__name__ in {"SiLU", "SiLUActivation"}]
    hooks = []

    def on():
        hooks.extend(module.register_forward_hook(lambda _module, _args, result: result * 1.1) for module in inner)

    def off():
        while hooks:
            hooks.pop().remove()

    found = follows(model, forward, [off, on, on, off, off])
    assert found["hooks"] >= 2


def test_an_attribute_that_hides_one_of_the_class_is_looked_at():
    class Flagged(blocks.Ends):
        flag = False

        def middle(self, y):
            y = y.sin() * (3.0 if self.flag else 2.0)
            return y.exp()

    model, forward = toy(Flagged)

    def on():
        for layer in model.layers:
            layer.flag = True

    def off():
        for layer in model.layers:
            layer.__dict__.pop("flag", None)

    follows(model, forward, [off, off, on, on, off])


FACTOR = 2


def test_another_number_of_saved_tensors_keeps_everything_and_is_recorded_next_time(monkeypatch):
    class Loops(blocks.Ends):
        def middle(self, y):
            for _ in range(FACTOR):  # a global name, which nothing watches
                y = functional.silu(y) * y
            return y

    model, forward = toy(Loops)

    def factor(value):
        monkeypatch.setitem(globals(), "FACTOR", value)

    found = follows(model, forward, [lambda value=value: factor(value) for value in (2, 2, 3, 3, 3, 1, 1)])
    assert found == {"recorded": 3, "hooks": 2, "kept": 2}


@pytest.mark.parametrize("make", [toy, FAMILIES["llama"]])
def test_a_forward_that_keeps_everything_keeps_no_more_than_without_recomputation(make, monkeypatch):
    model, forward = make()
    plain = allocated(forward)[0]
    with apply(model, select=EVERYTHING) as handle:
        forward()
        for state in handle._states:
            for key, plan in state.plans.items():
                state.plans[key] = type(plan)(**{**vars(plan), "saves": plan.saves[:-1] + plan.saves[-1:] * 2})
        assert allocated(forward)[0] == plain
        assert all(state.why_kept for state in handle._states)
        assert allocated(forward)[0] < plain


def test_weights_may_be_replaced_and_moved_between_steps():
    model, forward = toy()
    x = torch.randn(2, 16, 8, dtype=torch.float64)
    with apply(model, select=EVERYTHING):
        forward().backward()
        forward().backward()
        model.double()
        found = backward(model, lambda: model(x))
        found = backward(model, lambda: model(x))
        state = {name: one * 2 for name, one in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        assigned = backward(model, lambda: model(x))
    model.load_state_dict({name: one / 2 for name, one in state.items()}, assign=True)
    assert same(backward(model, lambda: model(x)), found)
    model.load_state_dict(state, assign=True)
    assert same(backward(model, lambda: model(x)), assigned)


def test_arguments_that_share_memory_are_not_taken_for_others():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32)

        def forward(self, x, other):
            return x + self.a(functional.silu(x * other)) * other

    class Outer(nn.Module):
        shared = True

        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers = nn.Linear(8, 32), nn.ModuleList([Two(), Two()])

        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = layer(x, x if self.shared else x * 0.5)
            return x.square().mean()

    torch.manual_seed(0)
    model, x = Outer(), torch.randn(2, 16, 8)
    follows(model, lambda: model(x), [lambda flag=flag: setattr(model, "shared", flag) for flag in (1, 0, 1, 0)])


def test_micro_batches_that_are_slices_of_one_tensor():
    model, _ = toy()
    batch = torch.randn(6, 16, 8)
    current = []
    changes = [lambda x=x: current.append(x) for x in batch.chunk(3)]
    assert follows(model, lambda: model(current[-1]), changes) == {"recorded": 1, "hooks": 2}


def test_hidden_states_that_are_slices_of_one_tensor():
    model, _ = toy(layers=1)
    layer = model.layers[0]
    with torch.no_grad():
        whole = model.first(torch.randn(6, 16, 8))
    current = []

    def forward():
        return layer((current[-1] * 1).requires_grad_()).square().mean() + layer(current[-1]).square().mean()

    changes = [lambda x=x: current.append(x) for x in (*whole.chunk(3), *whole.chunk(3))]
    follows(model, forward, changes)
