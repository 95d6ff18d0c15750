"""In which phase, module, micro-batch and line a recording sees every allocation."""

from pathlib import Path

import pytest
import torch
from tests.record.recorded import record_step, total, where
from tests.record.training import Stack, llama
from torch import nn

import evenload
from evenload.ledger.words import PHASES, Category, MarkKind, Phase


def test_every_phase_is_told_and_the_loss_outside_modules_is_forward():
    model = Stack()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with evenload.record(model=model) as recording:
        loss = nn.functional.mse_loss(model(torch.randn(8, 32)), torch.zeros(8, 8))
        loss.backward()
        sgd.step()
        torch.ones(3)
    ledger = recording.ledger
    (loss_row,) = where(ledger, operator="aten.mse_loss")
    assert PHASES[ledger.allocations.phase[loss_row]] is Phase.FORWARD
    assert PHASES[ledger.allocations.phase[where(ledger, operator="aten.ones_like")[0]]] is Phase.BACKWARD
    assert {PHASES[code] for code in ledger.allocations.phase[where(ledger, category=Category.OPTIMIZER)]} == {
        Phase.OPTIMIZER
    }
    assert PHASES[ledger.allocations.phase[where(ledger, operator="aten.ones")[-1]]] is Phase.OTHER
    marks = [PHASES[mark.value] for mark in ledger.marks if mark.kind is MarkKind.PHASE]
    assert marks == [Phase.FORWARD, Phase.BACKWARD, Phase.OTHER, Phase.OPTIMIZER, Phase.OTHER]


@pytest.mark.parametrize("nested", [False, True])
def test_recomputation_is_a_phase_of_its_own_with_the_same_modules(nested):
    torch.manual_seed(0)
    model = Stack(nested=True) if nested else llama(checkpointing=True)
    with evenload.record(model=model) as recording:
        if nested:
            model(torch.randn(8, 32)).sum().backward()
        else:
            model(input_ids=torch.zeros(2, 8, dtype=torch.long)).logits.sum().backward()
    ledger = recording.ledger
    again = where(ledger, phase=Phase.RECOMPUTE)
    modules = {ledger.module(row) for row in again}
    name = "blocks.{}.up" if nested else "model.layers.{}.mlp.up_proj"
    assert {name.format(layer) for layer in range(3 if nested else 2)} <= modules
    assert ledger.operator(again[0]) is not None
    assert where(ledger, phase=Phase.RECOMPUTE, category=Category.ACTIVATION)


def test_backward_that_records_a_graph_is_not_recomputation():
    x = torch.randn(32, 32, requires_grad=True)
    with evenload.record() as recording:
        (gradient,) = torch.autograd.grad((x @ x).relu().sum(), x, create_graph=True)
        (gradient**2).sum().backward()
    ledger = recording.ledger
    assert where(ledger, phase=Phase.RECOMPUTE) == []
    kept = where(ledger, phase=Phase.BACKWARD, category=Category.ACTIVATION)
    assert 32 * 32 * 4 in ledger.allocations.nbytes[kept]


def test_recomputation_inside_a_backward_that_records_a_graph_is_told():
    model = Stack(nested=True)
    with evenload.record(model=model) as recording:
        x = torch.randn(8, 32, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert where(recording.ledger, phase=Phase.RECOMPUTE)


def test_backward_knows_the_module_whose_operator_it_undoes():
    torch.manual_seed(0)
    model = llama()
    batch = torch.randint(0, 1024, (2, 16))
    ledger = record_step(model, lambda: model(input_ids=batch, labels=batch).loss)
    for name, parameter in model.named_parameters():
        owner = name.removesuffix(".weight")
        rows = where(ledger, category=Category.GRADIENT, module=owner)
        assert total(ledger, rows) == parameter.nbytes, name
    silu = where(ledger, phase=Phase.BACKWARD, operator="aten.silu_backward")
    assert [ledger.module(row) for row in silu] == ["model.layers.1.mlp.act_fn", "model.layers.0.mlp.act_fn"]
    unknown = [row for row in where(ledger, phase=Phase.BACKWARD) if ledger.module(row) is None]
    assert {ledger.operator(row) for row in unknown} <= {"aten.ones_like", "aten.nll_loss_backward"}


@pytest.mark.parametrize("checkpointing", [True, "reentrant"])
def test_backward_of_a_checkpointed_model_knows_its_modules(checkpointing):
    torch.manual_seed(0)
    model = llama(checkpointing=checkpointing)
    batch = torch.randint(0, 1024, (2, 16))
    ledger = record_step(model, lambda: model(input_ids=batch, labels=batch).loss)
    for name, parameter in model.named_parameters():
        rows = where(ledger, category=Category.GRADIENT, module=name.removesuffix(".weight"))
        assert total(ledger, rows) == parameter.nbytes, name
    silu = where(ledger, phase=Phase.BACKWARD, operator="aten.silu_backward")
    assert [ledger.module(row) for row in silu] == ["model.layers.1.mlp.act_fn", "model.layers.0.mlp.act_fn"]


def test_a_backward_that_does_not_go_through_torch_autograd_is_told_all_the_same():
    from torch.autograd.graph import _engine_run_backward

    model = Stack(layers=1)
    with evenload.record(model=model) as recording:
        loss = model(torch.randn(8, 32)).sum()
        _engine_run_backward((loss,), (torch.ones(()),), False, False, (), True, True)
        torch.ones(5)
    ledger = recording.ledger
    assert total(ledger, where(ledger, category=Category.GRADIENT)) == sum(p.nbytes for p in model.parameters())
    assert PHASES[ledger.allocations.phase[where(ledger, operator="aten.ones")[-1]]] is Phase.OTHER


def test_backward_after_two_forwards_keeps_their_modules_apart():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.ModuleDict({"first": first, "second": second})
    with evenload.record(model=model) as recording:
        left, right = first(torch.randn(2, 4)), second(torch.randn(2, 4))
        left.sum().backward()
        right.sum().backward()
    ledger = recording.ledger
    (relu,) = where(ledger, operator="aten.threshold_backward")
    assert ledger.module(relu) == "second.1"
    gradients = [ledger.module(row) for row in where(ledger, category=Category.GRADIENT)]
    assert gradients == ["first", "first", "second.0", "second.0"]


def test_micro_batches_are_counted_by_backwards_and_start_again_with_every_step():
    model = Stack()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenload.record(model=model) as recording:
        for _ in range(2):
            for _ in range(3):
                model(torch.randn(8, 32)).sum().backward()
            sgd.step()
            sgd.zero_grad()
    ledger = recording.ledger
    rows = where(ledger, operator="aten.native_layer_norm", module="blocks.0.norm")[::3]
    assert ledger.allocations.micro_batch[rows].tolist() == [0, 1, 2, 0, 1, 2]
    assert ledger.step_of(ledger.allocations.allocated[rows]).tolist() == [0, 0, 0, 1, 1, 1]
    back = where(ledger, operator="aten.masked_fill.Scalar", module="blocks.0")
    assert ledger.allocations.micro_batch[back].tolist() == [0, 1, 2, 0, 1, 2]


def test_a_runtime_may_say_which_micro_batch_it_works_on():
    model = Stack()
    with evenload.record(model=model) as recording:
        outputs = []
        for number in range(3):  # as a pipeline does: forwards first, backwards later, in another order
            with recording.micro_batch(number):
                outputs.append(model(torch.randn(8, 32)).sum())
        for output in reversed(outputs):
            output.backward()
    ledger = recording.ledger
    back = where(ledger, operator="aten.masked_fill.Scalar", module="blocks.0")
    assert ledger.allocations.micro_batch[back].tolist() == [2, 1, 0]


def test_a_loss_module_does_not_take_the_name_of_the_model():
    model, loss = Stack(), nn.MSELoss()
    with evenload.record() as recording:
        loss(model(torch.randn(8, 32)), torch.zeros(8, 8)).backward()
    ledger = recording.ledger
    (row,) = where(ledger, operator="aten.mse_loss")
    assert ledger.module(row) == "MSELoss"
    assert where(ledger, module="blocks.0.up", category=Category.GRADIENT)


def test_compiled_and_checkpointed_wrappers_leave_no_trace_in_paths():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 4))
    with evenload.record() as recording:
        torch.compile(model)(torch.randn(2, 4)).sum().backward()
    ledger = recording.ledger
    modules = {ledger.module(row) for row in where(ledger, category=Category.GRADIENT)}
    assert modules == {"0.0", "1"}


def test_stacks_name_the_line_of_the_model_in_forward_and_in_backward():
    model = Stack(layers=1)
    ledger = record_step(model, lambda: model(torch.randn(8, 32)).sum(), stacks=True)
    (norm,) = where(ledger, operator="aten.native_layer_norm")[:1]
    assert ledger.source(norm).startswith(str(Path(__file__).with_name("training.py")))
    assert ledger.source(norm).endswith("Block.forward")
    assert any(Path(__file__).name in line for line in ledger.stack(norm))
    undone = where(ledger, operator="aten.native_layer_norm_backward")[0]
    assert ledger.source(undone) == ledger.source(norm)
    (hand,) = where(ledger, operator="aten.masked_fill.Scalar")
    assert ledger.source(hand).endswith("Clamp.backward")
    assert not any("site-packages/torch/" in line or "evenload/record" in line for line in ledger.stack(norm))


def test_without_stacks_there_are_no_lines():
    model = Stack(layers=1)
    ledger = record_step(model, lambda: model(torch.randn(8, 32)).sum())
    assert ledger.frames == ()
    assert ledger.source(0) is None
    assert not ledger.metadata.stacks
