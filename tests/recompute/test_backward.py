"""All the ways in which backward can be asked for."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.recompute import blocks
from tests.recompute.measuring import Operators, allocated, gradients, same
from tests.recompute.models import FAMILIES, toy

from evenload.recompute import apply

torch.set_num_threads(1)

MODELS = {
    "toy": toy,
    "dropout": lambda: toy(blocks.Dropout),
    "llama": FAMILIES["llama"],
}
PATTERNS = (".*", r".*\..*")


def accumulated(model, forward):
    model.zero_grad()
    torch.manual_seed(3)
    losses = [forward(), forward()]
    for loss in losses:  # two micro-batches in flight
        loss.backward()
    return gradients(model)


def retained(model, forward):
    model.zero_grad()
    torch.manual_seed(3)
    loss = forward()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def only_some(model, forward):
    torch.manual_seed(3)
    chosen = list(model.parameters())[3:5]
    return list(torch.autograd.grad(forward(), chosen))


def part_by_part(model, forward):
    """One backward for every parameter, as zero-bubble schedules do."""
    torch.manual_seed(3)
    loss = forward()
    parameters = list(model.parameters())
    return [torch.autograd.grad(loss, one, retain_graph=True)[0] for one in parameters]


def doubled(model, forward):
    model.zero_grad()
    torch.manual_seed(3)
    parameters = list(model.parameters())
    first = torch.autograd.grad(forward(), parameters, create_graph=True)
    sum(one.square().sum() for one in first).backward()
    return gradients(model)


def under_anomaly_mode(model, forward):
    with torch.autograd.detect_anomaly():
        return accumulated(model, forward)


def inside_autocast(model, forward):
    """Backward is called inside autocast, as many scripts do by mistake."""
    model.zero_grad()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        forward().backward()
    return gradients(model)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    "way", [accumulated, retained, only_some, part_by_part, doubled, under_anomaly_mode, inside_autocast]
)
@pytest.mark.parametrize("name", MODELS)
def test_every_backward_gives_the_same_gradients(way, name):
    model, forward = MODELS[name]()
    if way is doubled and name == "llama":
        model.set_attn_implementation("eager")  # flash attention has no second derivative
    expected = way(model, forward)
    with Operators() as before:
        way(model, forward)
    with apply(model, select=PATTERNS) as handle:
        for _ in range(2):
            assert same(way(model, forward), expected)
        with Operators() as after:
            way(model, forward)
        assert not any(state.why_kept for state in handle._states)
    assert (after.counts - before.counts).total() > 0


@pytest.mark.parametrize("way", [accumulated, retained, only_some, part_by_part])
@pytest.mark.parametrize("name", MODELS)
def test_no_backward_leaves_anything_behind(way, name):
    model, forward = MODELS[name]()

    def step():
        way(model, forward)
        model.zero_grad(set_to_none=True)

    step()
    with apply(model, select=PATTERNS):
        step()
        gc.collect()
        gc.disable()
        try:
            assert [allocated(step)[0] for _ in range(3)] == [0, 0, 0]
        finally:
            gc.enable()


def test_an_operator_runs_again_once_in_a_backward_however_often_its_result_was_saved():
    class Shared(blocks.Ends):
        def middle(self, y):
            z = torch.sin(y)
            return z * z.exp() + z.cos() * z.sqrt().detach() + z**3

    model, forward = toy(Shared, layers=2)
    with apply(model, select=["sin"]):
        forward()
        loss = forward()
        with Operators() as ours:
            loss.backward(retain_graph=True)
        assert ours.counts["sin"] == 2 + 2  # cos' backward is a sine too
        with Operators() as ours:
            loss.backward()
        assert ours.counts["sin"] == 2 + 2


def test_backward_in_another_thread():
    from threading import Thread

    model, forward = toy()
    expected = accumulated(model, forward)
    with apply(model, select=PATTERNS):
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(3)
            losses = [forward(), forward()]
            for loss in losses:
                thread = Thread(target=loss.backward)
                thread.start()
                thread.join()
            assert same(gradients(model), expected)


def test_forwards_of_one_layer_in_two_threads_at_a_time():
    from concurrent.futures import ThreadPoolExecutor

    model, forward = toy()

    def run(_):
        return [one.clone() for one in torch.autograd.grad(forward(), list(model.parameters()))]

    expected = run(0)
    with apply(model, select=PATTERNS), ThreadPoolExecutor(2) as pool:
        for found in pool.map(run, range(8)):
            assert same(found, expected)


def test_a_tensor_that_is_looked_at_outside_of_backward_is_there():
    model, forward = toy(layers=1)
    with apply(model, select=["mlp"]):
        forward()
        loss = forward()
        todo, seen = [loss.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                todo += [one for one, _ in node.next_functions]
        saved = [node._saved_other for node in seen if type(node).__name__ == "MulBackward0"]
        (factor,) = [one for one in saved if one is not None and one.shape == (2, 16, 88)]
        assert torch.isfinite(factor).all()
        loss.backward()


def test_forward_under_no_grad_and_inference_mode_is_left_alone():
    model, forward = toy()
    expected = forward().detach()
    with apply(model, select=PATTERNS) as handle:
        with torch.no_grad():
            assert torch.equal(forward(), expected)
        with torch.inference_mode():
            assert torch.equal(forward(), expected)
        assert not any(state.served for state in handle._states)


def test_an_error_in_a_layer_leaves_no_hooks_and_no_memory_behind():
    class Failing(blocks.Ends):
        fails = False

        def middle(self, y):
            y = y.exp().tanh()
            if self.fails:
                raise KeyboardInterrupt
            return y

    model, forward = toy(Failing)
    expected = accumulated(model, forward)
    with apply(model, select=PATTERNS):
        for warm in (False, True):
            model.layers[1].fails = True
            gc.collect()

            def failing():
                with pytest.raises(KeyboardInterrupt):
                    forward()

            failing()
            gc.collect()
            gc.disable()
            try:
                assert allocated(failing)[0] == 0, warm
            finally:
                gc.enable()
            model.layers[1].fails = False
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            assert same(accumulated(model, forward), expected)
