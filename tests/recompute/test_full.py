"""Full recompute of whole layers, by torch's checkpoint and by the engine."""

from __future__ import annotations

import pytest
import torch
from tests.recompute import blocks
from tests.recompute.measuring import Operators, allocated, backward, same
from tests.recompute.models import FAMILIES, toy

from evenload.plan.policy import LayerPolicy
from evenload.recompute import apply

torch.set_num_threads(1)

FULL = LayerPolicy(full=True)
MODELS = {
    "toy": toy,
    "dropout": lambda: toy(blocks.Dropout),
    "llama": FAMILIES["llama"],
    "bf16": lambda: FAMILIES["llama"](dtype=torch.bfloat16),
    "mixtral": FAMILIES["mixtral"],
}


@pytest.mark.parametrize("whole", ["checkpoint", "engine"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_to_the_bit(name, whole):
    model, forward = MODELS[name]()
    backward(model, forward)
    expected = backward(model, forward)
    with Operators() as before:
        backward(model, forward)
    with apply(model, FULL, whole=whole):
        for _ in range(3):
            assert same(backward(model, forward), expected)
        with Operators() as after:
            backward(model, forward)
    assert (after.counts - before.counts)["mm"] > 0


@pytest.mark.parametrize("name", ["toy", "llama", "bf16", "mixtral"])
def test_the_engine_keeps_no_more_than_the_checkpoint(name):
    model, forward = MODELS[name]()
    plain = allocated(forward)[0]
    kept, peaks = {}, {}

    def step():
        model.zero_grad(set_to_none=False)
        forward().backward()

    for whole in ("checkpoint", "engine"):
        with apply(model, FULL, whole=whole) as handle:
            for _ in range(2):
                step()
            kept[whole] = allocated(forward)[0]
            peaks[whole] = allocated(step)[1]
            if whole == "engine":
                assert plain - kept[whole] == handle.report().freed
    assert kept["engine"] <= kept["checkpoint"] < plain
    assert peaks["engine"] <= 1.02 * peaks["checkpoint"]


def test_the_checkpoint_is_the_choice_unless_some_results_stay_kept():
    model, forward = toy()
    with apply(model, FULL) as handle:
        forward().backward()
        assert dict(handle._states[0].served) == {"checkpoint": 1}
    with Operators() as plain:
        expected = backward(model, forward)
    with apply(model, LayerPolicy(full=True, select_exclude=(r"mlp\..*\.matmul",))) as handle:
        assert same(backward(model, forward), expected)
        with Operators() as ours:
            assert same(backward(model, forward), expected)
        assert ours.counts["mm"] == plain.counts["mm"]
        assert (ours.counts - plain.counts)["silu"] == 3
        assert dict(handle._states[0].served) == {"recorded": 1, "hooks": 1}


def test_full_recompute_beats_select_on_one_layer():
    model, forward = toy()
    policy = {"full": frozenset({1}), "select": {"mlp": frozenset({0, 1, 2})}}
    from evenload.plan.policy import Policy

    with apply(model, Policy(**policy)) as handle:
        forward().backward()
        assert [next(iter(state.served)) for state in handle._states] == ["recorded", "checkpoint", "compared"]


def test_arguments_named_like_those_of_torchs_checkpoint_stay_the_layers_own():
    class Named(blocks.Ends):
        def forward(self, x, *, use_reentrant, debug=None):
            assert use_reentrant == "mine"
            return super().forward(x) * 2

        def middle(self, y):
            return y.exp()

    torch.manual_seed(0)
    model, x = torch.nn.ModuleList([Named(), Named()]), torch.randn(2, 16, 32)

    def forward():
        return model[1](model[0](x, use_reentrant="mine"), use_reentrant="mine", debug=1).square().mean()

    expected = backward(model, forward)
    with apply(model, FULL):
        assert same(backward(model, forward), expected)


@pytest.mark.parametrize("name", ["toy", "llama"])
def test_one_backward_a_parameter_runs_the_layers_forward_once_only_under_the_engine(name):
    """Zero-bubble schedules ask for gradients one group of parameters at a time."""
    model, forward = MODELS[name]()
    layers = model.layers if name == "toy" else model.model.layers
    parameters = list(layers[1].parameters())
    calls = []
    module = layers[1].mlp
    module.register_forward_pre_hook(lambda *_: calls.append(1))

    def run():
        calls.clear()
        loss = forward()
        return [torch.autograd.grad(loss, one, retain_graph=True)[0] for one in parameters]

    expected = run()
    counts = {}
    for whole in ("checkpoint", "engine"):
        with apply(model, FULL, whole=whole):
            for _ in range(2):
                assert same(run(), expected)
            counts[whole] = len(calls)
    assert counts["engine"] == 1
    assert counts["checkpoint"] > 2


class EndsInTanh(torch.nn.Module):
    """Saves its own output, and its input or not."""

    def __init__(self, save_input: bool) -> None:
        super().__init__()
        self.linear, self.shift = torch.nn.Linear(32, 32), float(not save_input)

    def forward(self, x):
        x = x + self.shift if self.shift else x
        return torch.tanh(torch.nn.functional.gelu(self.linear(x)) + x)


class EndsInBatchNorm(torch.nn.Module):
    """What its last operator saves comes from one that must not run again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(16)

    def forward(self, x):
        return torch.relu(self.norm(self.linear(x)) + x)


OWN_OUTPUT = {
    "saves its input": lambda: EndsInTanh(True),
    "does not": lambda: EndsInTanh(False),
    "norm": EndsInBatchNorm,
}


@pytest.mark.parametrize("held", [True, False], ids=["held after", "not held after"])
@pytest.mark.parametrize("policy", [FULL, LayerPolicy(select=(".*",))], ids=["full", "select"])
@pytest.mark.parametrize("name", OWN_OUTPUT)
def test_an_output_that_the_layer_itself_saves_is_counted_as_it_is(name, policy, held):
    model, forward = toy(OWN_OUTPUT[name])
    if not held:
        model.last = torch.nn.Identity()

        def forward():
            x = model.first(torch.ones(2, 16, 8))
            for layer in model.layers:
                x = layer(x)
            return x.sum()

    backward(model, forward)
    expected, plain = backward(model, forward), allocated(forward)[0]
    with apply(model, policy, layers="layers", whole="engine") as handle:
        for _ in range(3):
            assert same(backward(model, forward), expected)
        assert plain - allocated(forward)[0] == handle.report().freed > 0


class Sums(torch.nn.Module):
    """Backward needs nothing of it, or nothing that its input is needed for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bias = torch.nn.Tanh(), torch.nn.Parameter(torch.ones(32))

    def forward(self, x):
        return x + self.bias


class FromWeights(Sums):
    def forward(self, x):
        return x + self.inner(self.bias.exp() * 0.5).square()


@pytest.mark.parametrize("make", [Sums, FromWeights])
def test_an_input_that_nothing_is_computed_from_is_not_kept(make):
    model, forward = toy(make)
    expected, plain = backward(model, forward), allocated(forward)[0]
    with apply(model, FULL, layers="layers", whole="engine") as handle:
        for _ in range(2):
            assert same(backward(model, forward), expected)
        assert plain - allocated(forward)[0] == handle.report().freed >= 0
