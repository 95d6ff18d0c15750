"""Recording on fake tensors: the same plans without the memory."""

from __future__ import annotations

import pytest
import torch
from tests.recompute import blocks
from tests.recompute.following import EVERYTHING
from tests.recompute.measuring import allocated, backward, same
from tests.recompute.models import DEFAULT, FAMILIES, toy
from torch._subclasses.fake_tensor import FakeTensorMode

from evenload import EvenloadError
from evenload.recompute import apply

torch.set_num_threads(1)


def decisions(handle):
    return [(state.last.decision, state.last.everything, state.last.path) for state in handle._states]


MODELS = {
    "toy": toy,
    "views": lambda: toy(blocks.Views),
    "in-place": lambda: toy(blocks.InPlace),
    "attention": lambda: toy(blocks.Attention),
    "functional": lambda: toy(blocks.Functional),
    "llama": FAMILIES["llama"],
    "bf16": lambda: FAMILIES["llama"](dtype=torch.bfloat16),
    "eager attention": lambda: FAMILIES["llama"](attn_implementation="eager"),
    "qwen3": FAMILIES["qwen3"],
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_recorded_on_fake_tensors_have_the_same_plan_bytes_and_gradients(name):
    model, forward = MODELS[name]()
    backward(model, forward)
    expected = backward(model, forward)
    plain = allocated(forward)[0]
    with apply(model, select=EVERYTHING) as handle:
        forward()
        recorded = decisions(handle)
    with apply(model, select=EVERYTHING, rehearse=True) as handle:
        left, first_peak, loss = allocated(forward)
        del loss
        assert plain - left == handle.report().freed
        assert decisions(handle) == recorded
        for _ in range(2):
            assert same(backward(model, forward), expected)
        _, peak, _ = allocated(forward)
        assert all(sum(state.served[one] for one in ("recorded", "compared")) == 1 for state in handle._states)
        assert not any("kept" in state.served for state in handle._states)
    if recorded[0][2] == "hooks":
        # the first forward also tries once what will be computed again
        assert first_peak <= peak + max(graph.kept_bytes for _, graph, _ in recorded)


def test_the_recorded_forward_holds_one_layers_intermediates_and_the_rehearsed_one_does_not():
    class Deep(blocks.Ends):
        def middle(self, y):
            for _ in range(40):
                y = y + 1.0  # saves nothing, but a recording holds all of them
            return torch.nn.functional.silu(y)

    peaks = {}
    for rehearse in (None, False, True):
        model, forward = toy(Deep, layers=4)
        if rehearse is None:
            peaks[rehearse] = allocated(forward)[1]
        else:
            with apply(model, select=["silu"], rehearse=rehearse):
                peaks[rehearse] = allocated(forward)[1]
    one = 2 * 16 * blocks.WIDE * 4
    assert peaks[False] > peaks[None] + 30 * one
    assert peaks[False] < peaks[None] + 50 * one
    assert peaks[True] <= peaks[None] + 2 * one


def test_a_layer_that_cannot_run_on_fake_tensors_is_recorded_for_real():
    model, forward = toy(blocks.Branch)
    expected = backward(model, forward)
    with apply(model, select=EVERYTHING, rehearse=True) as handle:
        for _ in range(3):
            assert same(backward(model, forward), expected)
        assert handle._states[0].served["recorded"] == 1


def test_a_cache_among_the_arguments_is_not_filled_twice():
    from transformers import DynamicCache

    model, _ = FAMILIES["llama"]()
    ids = torch.randint(0, 128, (2, 8))
    cache = DynamicCache(config=model.config)
    with apply(model, select=DEFAULT, rehearse=True):
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 8
    assert cache.layers[0].keys.shape[-2] == 8


def test_a_module_in_two_places_keeps_its_own_parameters():
    class Twice(blocks.Ends):
        def __init__(self):
            super().__init__()
            self.c = self.d = torch.nn.Linear(blocks.WIDE, blocks.WIDE)

        def middle(self, y):
            return self.d(self.c(y).sin()).cos()

    model, forward = toy(Twice)
    expected, before = backward(model, forward), list(model.parameters())
    with apply(model, select=EVERYTHING, rehearse=True):
        for _ in range(2):
            assert same(backward(model, forward), expected)
    assert all(type(one) is torch.nn.Parameter for one in model.parameters())
    assert list(map(id, model.parameters())) == list(map(id, before))


def test_a_whole_model_is_rehearsed_without_memory():
    model, _ = toy()
    x = torch.randn(2, 16, 8)
    with apply(model, select=DEFAULT) as handle:
        left, peak, report = allocated(lambda: handle.rehearse(x))
        assert left == 0
        assert peak < 100  # numbers in the code, as tensors
        model(x).backward()
        assert dict(handle._states[0].served) == {"recorded": 1, "hooks": 1}
        assert handle.report().freed == report.freed > 0


def test_a_model_that_depends_on_data_cannot_be_rehearsed():
    model, _ = toy(blocks.Branch)
    with apply(model, select=DEFAULT) as handle, pytest.raises(EvenloadError, match="leave the rehearsal out"):
        handle.rehearse(torch.randn(2, 16, 8))


def test_training_under_fake_tensors_runs_recomputation_as_well():
    from tests.recompute.measuring import Operators

    with FakeTensorMode():
        model, forward = FAMILIES["llama"]()
        with apply(model, select=DEFAULT) as handle:
            for _ in range(2):
                loss = forward()
                with Operators() as ours:
                    loss.backward()
                assert ours.counts["silu"] == 3
            assert dict(handle._states[0].served) == {"recorded": 1, "hooks": 1}
