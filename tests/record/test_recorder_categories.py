"""What a recording says every allocation is for."""

import numpy as np
import pytest
import torch
from tests.record.recorded import record_step, saved_storages, storages, total, where
from tests.record.training import Clamp, Stack, llama
from torch import nn

import evenload
from evenload.ledger.curve import by_category, live
from evenload.ledger.words import CATEGORIES, Category


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_activations_are_the_saved_tensors_plus_the_outputs(attention):
    torch.manual_seed(0)
    model = llama(attn_implementation=attention)
    batch = torch.randint(0, 1024, (2, 32))
    outputs = []

    def run():
        result = model(input_ids=batch, labels=batch)
        outputs[:] = [result.loss, result.logits]
        return result.loss

    saved, _ = saved_storages(run)
    there_before = storages([*model.parameters(), *model.buffers(), batch])
    expected = {key: storage for key, storage in (saved | storages(outputs)).items() if key not in there_before}
    ledger = record_step(model, run)
    activations = ledger.allocations.nbytes[where(ledger, category=Category.ACTIVATION)].tolist()
    assert sorted(activations) == sorted(storage.nbytes() for storage in expected.values())


def test_a_tensor_hidden_in_a_context_is_an_activation_though_no_hook_sees_it():
    x = torch.randn(256, 256, requires_grad=True)
    saved, _ = saved_storages(lambda: Clamp.apply(x))
    assert 256 * 256 not in saved
    ledger = record_step(None, lambda: Clamp.apply(x).sum())
    (hidden,) = where(ledger, operator="aten.le.Scalar")
    assert CATEGORIES[ledger.allocations.category[hidden]] is Category.ACTIVATION
    assert ledger.allocations.nbytes[hidden] == 256 * 256


def test_categories_add_up_to_what_the_model_and_the_optimizer_hold():
    torch.manual_seed(0)
    model = Stack()
    adamw = torch.optim.AdamW(model.parameters())
    with evenload.record() as recording:  # nothing is told: parameters are found when the model is called
        for _ in range(2):
            model(torch.randn(8, 32)).sum().backward()
            adamw.step()
    ledger = recording.ledger
    sums = by_category(ledger, live(ledger, ledger.end))
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    states = sum(value.nbytes for state in adamw.state.values() for value in state.values())
    assert sums[Category.PARAMETER] == parameters
    assert sums[Category.GRADIENT] == parameters
    assert sums[Category.OPTIMIZER] == states
    assert sums[Category.ACTIVATION] == 0


def test_parameters_and_states_from_before_are_counted_from_the_start():
    model = Stack()
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 32)).sum().backward()
    adamw.step()
    with evenload.record(model=model, optimizer=adamw) as recording:
        pass
    sums = by_category(recording.ledger, live(recording.ledger, 0))
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert (sums[Category.PARAMETER], sums[Category.GRADIENT]) == (parameters, parameters)
    assert sums[Category.OPTIMIZER] >= 2 * parameters


def test_a_model_that_is_built_inside_has_parameters_even_if_it_never_runs():
    with evenload.record() as recording:
        model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    ledger = recording.ledger
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert total(ledger, where(ledger, category=Category.PARAMETER)) == held


def test_main_copies_that_only_the_optimizer_knows_are_optimizer_state():
    model = nn.Linear(16, 16, bias=False).to(torch.bfloat16)
    main = [parameter.detach().float() for parameter in model.parameters()]
    sgd = torch.optim.SGD(main, lr=0.1)
    with evenload.record(model=model, optimizer=sgd) as recording:
        pass
    ledger = recording.ledger
    assert total(ledger, where(ledger, category=Category.OPTIMIZER)) == 16 * 16 * 4
    assert total(ledger, where(ledger, category=Category.PARAMETER)) == 16 * 16 * 2


def test_what_is_made_outside_and_read_by_forward_is_input():
    model = Stack()
    with evenload.record(model=model) as recording:
        batch, labels, unused = torch.randn(8, 32), torch.zeros(8, 8), torch.ones(77)
        nn.functional.mse_loss(model(batch), labels).backward()
    ledger = recording.ledger
    assert total(ledger, where(ledger, category=Category.INPUT)) == batch.nbytes + labels.nbytes
    assert unused.nbytes in ledger.allocations.nbytes[where(ledger, category=Category.TEMPORARY)]


def test_numpy_memory_is_the_hosts_and_not_in_the_curve():
    array = np.ones((64, 32), dtype=np.float32)
    model = Stack()
    with evenload.record(model=model) as recording:
        model(torch.from_numpy(array)).sum().backward()
    ledger = recording.ledger
    (foreign,) = [
        row for row in range(len(ledger.allocations)) if ledger.devices[ledger.allocations.device[row]] == "foreign"
    ]
    assert ledger.allocations.nbytes[foreign] == array.nbytes
    assert not ledger.on_device[foreign]
    assert ledger.device == "cpu"
