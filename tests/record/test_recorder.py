"""Steps of a recording, the host beside it, and that it leaves no trace."""

import sys

import pytest
import torch
from tests.record.recorded import where
from tests.record.training import Stack, llama
from torch import nn

import evenload
from evenload.errors import EvenloadError
from evenload.ledger.files import read_ledger
from evenload.ledger.ledger import ALIVE
from evenload.ledger.words import Category, MarkKind


def test_a_host_line_stands_at_the_end_of_every_step():
    model = Stack()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenload.record(model=model) as recording:
        for _ in range(3):
            model(torch.randn(8, 32)).sum().backward()
            sgd.step()
            sgd.zero_grad()
    ledger = recording.ledger
    assert [line.step for line in ledger.host] == [0, 1, 2, 3]
    if sys.platform == "linux":
        assert all(line.resident > 50e6 for line in ledger.host)
    assert all(line.pinned == 0 for line in ledger.host)
    steps = [mark.value for mark in ledger.marks if mark.kind is MarkKind.STEP]
    assert steps == [0, 1, 2, 3]


def test_two_optimizers_make_one_step():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    with evenload.record() as recording:
        for _ in range(2):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
    assert len(recording.ledger.step_begins) == 3


def test_a_script_may_say_where_its_steps_end():
    model = Stack()
    with evenload.record(model=model) as recording:
        for _ in range(2):
            with torch.no_grad():
                model(torch.randn(8, 32))
            recording.step()
    assert len(recording.ledger.step_begins) == 3


def test_an_optimizer_that_steps_inside_backward_ends_the_step_at_the_next_forward():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in model.parameters():
        sgd = torch.optim.SGD([parameter], lr=0.1)

        def hook(parameter, sgd=sgd):
            sgd.step()
            sgd.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)
    with evenload.record(model=model) as recording:
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
    ledger = recording.ledger
    assert len(ledger.step_begins) == 3
    gradients = where(ledger, category=Category.GRADIENT)
    assert len(gradients) == 12
    assert (ledger.allocations.freed[gradients] != ALIVE).all()


def test_everything_is_as_before_when_a_recording_ends():
    before = (torch.autograd.backward, torch.autograd.grad, torch.get_rng_state, torch.UntypedStorage.resize_)
    own = "resize_" in vars(torch.UntypedStorage)
    with pytest.raises(ZeroDivisionError), evenload.record():
        1 / 0  # noqa: B018
    after = (torch.autograd.backward, torch.autograd.grad, torch.get_rng_state, torch.UntypedStorage.resize_)
    assert before == after
    assert ("resize_" in vars(torch.UntypedStorage)) == own
    from torch.nn.modules import module

    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks


def test_gradients_are_bit_identical_with_and_without_a_recording():
    def gradients(record):
        torch.manual_seed(0)
        model = llama(checkpointing=True, attention_dropout=0.1)
        batch = torch.randint(0, 1024, (2, 16))
        if record:
            with evenload.record(model=model, stacks=True):
                model(input_ids=batch, labels=batch).loss.backward()
        else:
            model(input_ids=batch, labels=batch).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    for plain, recorded in zip(gradients(record=False), gradients(record=True), strict=True):
        assert torch.equal(plain, recorded)


def test_an_error_inside_leaves_the_ledger_up_to_there(tmp_path):
    path = tmp_path / "run.ledger"

    def run():
        with evenload.record(path=path):
            torch.ones(10)
            raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        run()
    ledger = read_ledger(path)
    assert ledger.complete
    assert [mark.text for mark in ledger.marks if mark.kind is MarkKind.NOTE] == ["ended by RuntimeError: no luck"]
    assert ledger.allocations.nbytes.tolist() == [40]


def test_an_allocation_that_fails_is_marked_with_what_it_asked_for():
    with evenload.record() as recording, pytest.raises(RuntimeError):
        torch.empty(2**60)
    (mark,) = [mark for mark in recording.ledger.marks if mark.kind is MarkKind.FAILED]
    assert mark.value == 2**62
    assert mark.text.startswith("aten.empty")


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"model": 3}, "model is a int, not a torch"),
        ({"optimizer": "adam"}, "optimizer is a str, not a torch"),
        ({"stacks": 1}, "stacks is 1, not True or False"),
        ({"synchronize": "yes"}, "synchronize is 'yes', not True or False"),
    ],
)
def test_wrong_arguments_are_named(options, fact):
    with pytest.raises(EvenloadError, match=fact):
        evenload.record(**options)


def test_a_recording_is_used_once_and_asked_after_it_began():
    recording = evenload.record()
    with pytest.raises(EvenloadError, match="nothing has been recorded yet"):
        _ = recording.ledger
    with recording, pytest.raises(EvenloadError, match="not the number of a micro-batch"), recording.micro_batch(-1):
        pass
    with pytest.raises(EvenloadError, match="has been used"), recording:
        pass
